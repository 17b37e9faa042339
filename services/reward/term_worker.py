"""The process that computes terms: `python -m services.reward.term_worker`. It answers on standard output, one message per term.

It lives as long as its parent and can be killed at any time: it holds nothing but what it can read again. A message is its length,
four bytes, and MessagePack. For each Look it says Ready when everything that all terms need is there, then an Answer for each
name, in their order. What a term prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import sys
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from services.reward import behaviour, reading
from shared import terms
from shared.contracts.graded import Finding
from shared.contracts.trajectory import unpack
from shared.environments import ToolSpec
from shared.renderers import Renderer
from shared.renderers.registry import load_renderer
from shared.terms import Seen, Turn, Unreadable

MEMORY = 8 << 30  # bytes of address space: a term that takes more gets a MemoryError
MAX_MESSAGE = (1 << 31) - 1


class Tool(msgspec.Struct, frozen=True):
    """A tool of the problem, as shared.environments.ToolSpec."""

    name: str
    description: str
    parameters: dict[str, Any]
    effect: Literal["reads", "changes", "reverts", "tests", "runs", "notes", "ends"]


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to look at. `trajectory`: packed. `before`: the files that it changed, as they were given. `checkpoint`: a folder
    with the run's tokenizer and its card; the empty string: `unreadable` says why there is none."""

    names: list[str]
    trajectory: bytes
    before: dict[str, str] = {}
    tools: list[Tool] = []
    task: str = ""
    checkpoint: str = ""
    unreadable: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The attempt is unpacked and its renderer loaded."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a term found, or the reason why there is no finding."""

    name: str
    found: Finding | str


def send(file: IO[bytes], message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_MESSAGE:
        raise ValueError(f"{len(data)} bytes in one message; allowed: {MAX_MESSAGE}")
    file.write(len(data).to_bytes(4, "little") + data)
    file.flush()


@functools.lru_cache(maxsize=4)
def _renderer(checkpoint: str) -> Renderer:
    return load_renderer(Path(checkpoint))


def seen(look: Look) -> Seen:
    """Return the attempt as terms see it. Only the terms that ask for its text fail, with Unreadable, if its tokens
    cannot be turned into text; the others go on."""
    trajectory = unpack(look.trajectory)
    specs = [ToolSpec(tool.name, tool.description, tool.parameters, tool.effect) for tool in look.tools]
    why = look.unreadable or "the run's tokenizer is not known here"
    renderer: Renderer | None = None
    if look.checkpoint:
        try:
            renderer = _renderer(look.checkpoint)
        except Exception as error:  # a renderer of somebody else's, or a folder that was removed
            why = f"{type(error).__name__}: {error}"

    def read() -> tuple[Turn, ...]:
        if renderer is None:
            raise Unreadable(f"the text of the tokens cannot be read: {why}")
        return reading.turns(trajectory, renderer, specs)

    return Seen(trajectory, look.before, {spec.name: spec.effect for spec in specs}, look.task, read)


def prepare(name: str) -> None:
    """Import a term, and call the function `prepare` of its module where it has one."""
    module = sys.modules.get(terms.load(name).__module__)
    getattr(module, "prepare", lambda: None)()


def work(incoming: IO[bytes], outgoing: IO[bytes]) -> None:
    """Answer until `incoming` ends."""
    while len(head := incoming.read(4)) == 4:
        look = msgspec.msgpack.decode(incoming.read(int.from_bytes(head, "little")), type=Look)
        attempt = seen(look)
        for name in look.names:
            with contextlib.suppress(Exception):  # no part of the term's time; `answer` says why it failed
                prepare(name)
        send(outgoing, Ready())
        for name in look.names:
            send(outgoing, Answer(name=name, found=behaviour.answer(name, attempt)))


def main() -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with contextlib.suppress(OSError):  # where memory ends, this process goes and not its grader
        Path("/proc/self/oom_score_adj").write_text("1000")
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError):
        work(sys.stdin.buffer, outgoing)


if __name__ == "__main__":
    main()
