"""Tool calls within an answer, as OpenAI's clients get them. Pure, never raises. Which form is read, the checkpoint says
(shared.renderers.calls).

Invariants: the parts of a text, joined, are the text; what is no well-formed call is text, and so is a call inside of thinking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.chat.reader import begun
from shared.renderers.calls import Calls, Schemas
from shared.renderers.calls import Part as Read
from shared.renderers.calls.hermes import CLOSE, OPEN, Hermes

HERMES: Calls = Hermes()


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments`: a JSON object, as the model wrote it. `source`: the call as it stood in the text, with the white space
    and the marks around it, which a template writes by itself."""

    name: str
    arguments: str
    source: str


def parse(text: str, calls: Calls = HERMES, thinking: bool = False, schemas: Schemas | None = None) -> list[str | Call]:
    """The parts of a text, in order. `thinking`: the prompt has opened a block of thinking. `schemas`: of the tools' parameters, by
    name, for forms of calls that write no types."""
    parts: list[str | Call] = []
    read = calls.parts(text, thinking, schemas)
    done = 0
    for i, part in enumerate(read):
        if part.kind != "call" or part.error is not None:
            continue
        begin, end = _around(text, read, i, done)
        if begin > done:
            parts.append(text[done:begin])
        parts.append(Call(part.name, part.written, text[begin:end]))
        done = end
    if done < len(text):
        parts.append(text[done:])
    return parts


def content_of(parts: Sequence[str | Call]) -> str:
    return "".join(part for part in parts if isinstance(part, str))


def settled(text: str, calls: Calls = HERMES) -> int:
    """How many characters are content whatever comes after them: none from where a call may have begun."""
    starts = [start for tag in calls.opens if (start := text.find(tag)) >= 0]
    return len(text[: min(starts) if starts else len(text) - begun(text, calls.opens)].rstrip())


def _around(text: str, read: Sequence[Read], i: int, done: int) -> tuple[int, int]:
    """Where a call with its white space and marks begins, not before `done`, and where it ends."""
    begin, end = read[i].start, read[i].end
    before = i
    while before and read[before - 1].kind == "mark":
        before -= 1
        begin = read[before].start
    while i + 1 < len(read) and read[i + 1].kind == "mark":
        i += 1
        end = read[i].end
    thought = max((part.end for part in read[:i] if part.kind == "thinking" and part.end <= begin), default=0)
    floor = max(done, thought)
    begin = max(done, floor + len(text[floor:begin].rstrip()))
    end += len(text[end:]) - len(text[end:].lstrip())
    return begin, end


__all__ = ["CLOSE", "OPEN", "Call", "begun", "content_of", "parse", "settled"]
