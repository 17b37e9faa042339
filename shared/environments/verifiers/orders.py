"""Talks with the runner inside the sandbox: one order in, events out.

Invariant: an event counts only with the order's nonce, which no other process in the sandbox can read.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.environments.agent import AGENTS
from shared.environments.repository import runtime
from shared.environments.repository.inside.verifiers_runner import LOG
from shared.environments.verifiers.problem import Source, VerifiersProblem
from shared.sandbox.contract import Program, Sandbox

RUNNER = f"{runtime.HOME}/inside/verifiers_runner.py"
_CHUNK = 1 << 16
_LONGEST = 4 << 20  # bytes of one line; a longer one is no answer of the runner


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    """A message of the runner."""


class Refused(Event, frozen=True):
    """Nothing was asked of the model, and the order cannot be carried out."""

    why: str


class Broken(Event, frozen=True):
    """The environment's rollout or rubric raised an error that `verifiers` does not take as an end of the rollout. `error`: its
    type. `why`: what it says, for people."""

    error: str
    why: str


class Example(Event, frozen=True):
    index: int
    digest: Annotated[str, Meta(max_length=64)]
    prompt: Annotated[str, Meta(max_length=1 << 16)]


class Listed(Event, frozen=True):
    """`examples`: how many the split holds."""

    examples: int


class Began(Event, frozen=True):
    """The environment is loaded, and the rollout begins."""


class Rolled(Event, frozen=True):
    """The rollout is over. `turns`: answers of the model. `error`: the type of the error that ended it; empty: none
    did. `why`: what that said, for people."""

    turns: int
    error: str
    why: str


class Scored(Event, frozen=True):
    """`reward`, `metrics`: as Python writes floats, since JSON knows no `nan`."""

    reward: str
    metrics: dict[str, str]


Events = Refused | Broken | Example | Listed | Began | Rolled | Scored


def listing(source: Source, first: int, most: int) -> dict[str, Any]:
    """Return the order for a split's examples from index `first` on, at most `most`."""
    return {"act": "list", **_named(source), "first": first, "most": most}


def rollout(problem: VerifiersProblem, url: str, key: str) -> dict[str, Any]:
    """Return the order for one rollout. `url`: of OpenAI's API, as the sandbox sees it."""
    example = {"index": problem.index, "digest": problem.digest}
    return {"act": "rollout", **_named(problem.source), **example, "url": url, "key": key}


def _named(source: Source) -> dict[str, Any]:
    return {"environment": source.environment, "arguments": source.arguments, "split": source.split}


class Runner:
    """One order that is carried out."""

    def __init__(self, program: Program, nonce: str) -> None:
        self._program, self._nonce = program, nonce

    @classmethod
    async def given(cls, sandbox: Sandbox, folder: str, order: dict[str, Any]) -> Runner:
        """Start the runner with the Python of `folder` below AGENTS. Raises SandboxUnavailable."""
        nonce = secrets.token_urlsafe(24)
        # Through a shell, which writes down why the interpreter cannot be started.
        started = ["/bin/sh", "-c", f'exec "$0" "$@" 2>>{LOG}', f"{AGENTS}/{folder}/bin/python", "-I", RUNNER]
        program = await sandbox.spawn(started)
        with contextlib.suppress(ConnectionError):  # it says nothing then, which `events` shows
            await program.send(json.dumps({"nonce": nonce, **order}).encode() + b"\n")
        return cls(program, nonce)

    async def events(self) -> AsyncIterator[Events]:
        """Yield the runner's events until it ends. Skip lines without the nonce."""
        held = b""
        while data := await self._program.receive(_CHUNK):
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                if (event := event_of(line, self._nonce)) is not None:
                    yield event
            held = b"" if len(held) > _LONGEST else held

    async def kill(self) -> None:
        await self._program.kill()


class _Line(msgspec.Struct, frozen=True):
    nonce: str
    said: Events


def event_of(line: bytes, nonce: str) -> Events | None:
    """Return the event of a line. None: it is no answer to the order with this nonce."""
    try:
        found = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found.said if secrets.compare_digest(found.nonce.encode(), nonce.encode()) else None
