"""A policy that plays a fixed list of replies, for tests of environments.

    [{"calls": [{"name": "read", "arguments": {"path": "a.py"}}]},
     {"text": "Done.", "calls": [{"name": "submit", "arguments": {}}]}]

The file holds such a list, or one reply a line. Calls are written in the form of the chat format and read back from it, so
an attempt goes through everything that a sampled one does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from services.rollout.ends import TurnLimit
from services.rollout.generation import Generation
from shared.chat import writing as chat
from shared.renderers import Renderer, Unwritable
from shared.renderers.formats.compact_1 import Compact

FORM = '{"text": "…", "calls": [{"name": "…", "arguments": {…}}]}'


class BadScript(ValueError):
    """The file is no script; the text names the reply, what was found and what is allowed."""


class CallSaid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`text` stands before the calls, as a model would sample it: a control token that it spells is one. With neither, the reply
    is an empty message."""

    text: str = ""
    calls: list[CallSaid] = []


def read_script(path: Path) -> list[Reply]:
    """Return the replies of a file. Raises BadScript."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadScript(f"--scripted {path}: cannot be read ({error})") from None
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else _lines(text)
        return [_reply(number, value) for number, value in enumerate(found, 1)]
    except ValueError as error:
        raise BadScript(f"--scripted {path}: {error}; allowed: a JSON list of replies, or one a line: {FORM}") from None


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.split("\n") if line.strip()]  # a string may hold other separators


def _reply(number: int, value: Any) -> Reply:
    try:
        return msgspec.convert(value, Reply)
    except msgspec.ValidationError as error:
        raise ValueError(f"reply {number}: {error}") from None


class Scripted:
    """Implements services.rollout.agent.Model. After the last reply the attempt ends, and the work is submitted as it is."""

    def __init__(self, replies: Sequence[Reply], renderer: Renderer) -> None:
        self._written = [written(reply, renderer) for reply in replies]
        self._next = 0

    @property
    def partial(self) -> Generation | None:
        return None

    async def generate(self, tokens: list[int], *, max_new_tokens: int, first_row: int) -> Generation:
        if self._next == len(self._written):
            raise TurnLimit
        said = self._written[self._next]
        self._next += 1
        return generation(said[:max_new_tokens], cut=len(said) > max_new_tokens)


def generation(tokens: list[int], *, cut: bool = False) -> Generation:
    """Return tokens that no model of ours sampled as a generation: probability one, version 0."""
    return Generation(
        tokens=tokens,
        logprobs_N=np.zeros(len(tokens), dtype=np.float32),
        versions_N=np.zeros(len(tokens), dtype=np.int32),
        oldest_kv_version=0,
        finish="length" if cut else "stop",
    )


def written(reply: Reply, renderer: Renderer) -> list[int]:
    """Return a reply in the ids of a chat format. Raises BadScript for a format or a call that cannot be written here."""
    if isinstance(renderer, Compact):
        return _compact(reply, renderer)
    try:
        return chat.written(renderer, reply.text, [(call.name, call.arguments) for call in reply.calls], shielded=False)
    except Unwritable as error:
        raise BadScript(f"--checkpoint: {error}, one of compact-1, or no --checkpoint") from None


def _compact(reply: Reply, renderer: Compact) -> list[int]:
    ids: list[int] = []
    simple = {"undo": renderer.undo, "test": renderer.test, "submit": renderer.submit}
    for call in reply.calls:
        if call.name in simple:
            ids.append(simple[call.name])
        elif call.name == "edit":
            ids += _compact_edit(call.arguments, renderer)
        else:
            raise BadScript(f"found a call of {call.name!r:.60}; allowed in compact-1: edit, undo, test, submit")
    if not ids:
        raise BadScript("found a reply without a call; allowed in compact-1: calls alone")
    return ids


def _compact_edit(arguments: Mapping[str, Any], renderer: Compact) -> list[int]:
    try:
        line, old, new = int(arguments["line"]), str(arguments["old"]), str(arguments["new"])
        return [
            *(renderer.edit, renderer.line_token(line - 1), *renderer.encode(old)),
            *(renderer.got, *renderer.encode(new), renderer.end),
        ]
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise BadScript(f"edit: found {dict(arguments)!r:.80} ({error}); allowed: line (from 1), old and new") from None
