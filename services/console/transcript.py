"""A trajectory for people: as a conversation, and token by token. Pure.

Secrets are masked here where they stretch over several of the texts that a page shows: tokens, lines of a difference.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shared.contracts.trajectory import Segment, Span
from shared.formats import Action, Format, Tool
from shared.masking import masked, secrets

MASK = "•"
AROUND = 400  # tokens before and after those that are shown: a secret may begin or end there
MAX_CHARS = 20_000  # of one block; the tokens below have the rest
# Role of a span (shared.contracts.trajectory) -> what its tokens are where nobody sampled them there.
GIVEN = {"prompt": "context", "tool_output": "tool output", "summary": "summary of the context before, put in again"}
_BREAK_BEFORE = re.compile(r"(?<!^)(?=<(?:L\d+|T\d+|tests|obs|edit|undo|test|submit|sum)>)")


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call in words. `before`, `after`: what an edit replaces."""

    tool: str
    where: str = ""
    before: str = ""
    after: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens [start, end) of a segment, as one thing that somebody said."""

    role: str
    turn: int
    ok: bool
    sampled: bool
    start: int
    end: int
    text: str
    calls: tuple[Call, ...] = ()
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """`heat`: 0 (the policy was sure) to 9 (it hardly ever says this); -1 where nothing was sampled. `given`: what it is then,
    which is why it is not trained; empty: it was sampled."""

    index: int
    id: int
    text: str
    heat: int
    logprob: float
    version: int
    given: str
    begins: str  # the role that begins here, or ""


def blocks(segment: Segment, chat: Format | None) -> Iterator[Block]:
    """The spans of a segment, in order; a segment without spans is one block."""
    spans = segment.spans or [Span(start=0, end=len(segment.tokens), role="tokens")]
    for span in spans:
        ids = [int(t) for t in segment.tokens[span.start : span.end]]
        sampled = bool(segment.loss_mask[span.start : span.end].any())
        text = layout(chat.text(ids)) if chat else f"{len(ids)} tokens; the chat format of this run is not at hand"
        calls: tuple[Call, ...] = ()
        if chat and sampled and span.role in ("tool_call", "final"):
            calls = tuple(_call(action) for action in chat.actions(ids))
        yield Block(
            role=span.role.replace("_", " "),
            turn=span.turn,
            ok=span.ok,
            sampled=sampled,
            start=span.start,
            end=span.end,
            text=text[:MAX_CHARS],
            calls=calls,
            cut=len(text) > MAX_CHARS,
        )


def _call(action: Action) -> Call:
    if action.error:
        return Call(tool="broken call", error=action.error)
    if action.tool == Tool.edit:
        return Call(tool="edit", where=f"line {action.line + 1}", before=action.old, after=action.new)
    if action.tool == Tool.summary:
        return Call(tool="summary", after=action.text)
    return Call(tool=action.tool.value)


def layout(text: str) -> str:
    """Line breaks before the markers of a compact format: they carry none. Text without markers stays as it is."""
    return _BREAK_BEFORE.sub("\n", text)


def tokens(segment: Segment, chat: Format | None, first: int, count: int) -> list[Token]:
    """Tokens first .. first + count of a segment, one by one, exactly as the engine saw them; -1 where a secret was."""
    begins = {span.start: span.role.replace("_", " ") for span in segment.spans}
    hidden = _secret(segment, chat, first, count) if chat else set()
    given = _given(segment, first, count)
    found = []
    for i in range(first, min(first + count, len(segment.tokens))):
        token, sampled = int(segment.tokens[i]), bool(segment.loss_mask[i])
        logprob = float(segment.logprobs[i])
        found.append(
            Token(
                index=i,
                id=-1 if i in hidden else token,
                text=MASK if i in hidden else chat.text([token]) if chat else str(token),
                heat=heat(logprob) if sampled else -1,
                logprob=logprob,
                version=int(segment.versions[i]),
                given="" if sampled else given.get(i, "given"),
                begins=begins.get(i, ""),
            )
        )
    return found


def _given(segment: Segment, first: int, count: int) -> dict[int, str]:
    """Index -> what a token is if nobody sampled it."""
    found = {}
    for span in segment.spans:
        if span.role in GIVEN:
            found.update(dict.fromkeys(range(max(span.start, first), min(span.end, first + count)), GIVEN[span.role]))
    return found


def _secret(segment: Segment, chat: Format, first: int, count: int) -> set[int]:
    """Which tokens hold a part of a secret."""
    start, stop = max(0, first - AROUND), min(len(segment.tokens), first + count + AROUND)
    texts = [chat.text([int(token)]) for token in segment.tokens[start:stop]]
    found = secrets("".join(texts))
    hidden, at = set(), 0
    for i, text in enumerate(texts, start):
        if any(at < end and begin < at + len(text) for begin, end, _ in found):
            hidden.add(i)
        at += len(text)
    return hidden


def heat(logprob: float) -> int:
    """0 for probability 1, one more for each factor of two, 9 at most."""
    return min(9, max(0, round(-logprob / math.log(2))))


def versions(segment: Segment) -> list[int]:
    """The policy versions that sampled this segment's tokens, rising."""
    return [int(v) for v in np.unique(segment.versions[segment.loss_mask])]


def diff(before: dict[str, str], after: dict[str, str]) -> list[tuple[str, str]]:
    """Unified difference of the files, as (kind, line): kind is add, del, hunk, file or same."""
    lines: list[tuple[str, str]] = []
    kinds = {"+": "add", "-": "del", "@": "hunk", " ": "same"}
    for path in sorted({*before, *after}):
        old, new = masked(before.get(path, "")).splitlines(), masked(after.get(path, "")).splitlines()
        changed = list(difflib.unified_diff(old, new, lineterm="", n=3))[2:]
        if changed:
            lines.append(("file", path))
            lines += [(kinds.get(line[:1], "same"), line) for line in changed]
    return lines
