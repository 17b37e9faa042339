"""Problem, JSONL v1: one JSON object a line.

The public part (`Problem`) is all that the agent and the rollout worker ever see; the hidden part (`Hidden`) goes to
graders only. A pack is two objects: public lines and hidden lines, joined by id.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ProblemError(ValueError):
    """A line that is no problem; the text names the line, the field, what was found and what is allowed."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One test: positional arguments and what the original returned, as tagged JSON texts (shared.problems.values)."""

    args: str
    expected: str


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    time_s: float = 2.0
    memory_mb: int = 512


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """The public part. `files`: path -> text, the broken state. `entry`: the function under test, `path::name` or `name`
    when there is one file. `actual`: what the broken code returns for each visible case (tagged JSON, or an exception's
    name); it saves the agent a first test run. `cell`: relatives (problems of one origin function)."""

    id: str
    kind: Literal["function", "repository"] = "function"
    category: str = "debugging"
    prompt: str = ""
    files: dict[str, str]
    entry: str
    visible: list[Case]
    actual: list[str] = []
    limits: Limits = Limits()
    cell: str = ""
    origin: str = ""  # distribution:module:qualname
    licence: str = ""
    image: str = ""  # repository problems
    base_commit: str = ""


class Hidden(msgspec.Struct, frozen=True, kw_only=True):
    """The hidden part. `solution`: path -> text, the original, for the oracle check and for SFT traces; it never leaves
    the curator and the graders. `bug`: what was broken (kind of mutation), for reports."""

    id: str
    cases: list[Case]
    solution: dict[str, str] = {}
    bug: str = ""


def parse_line(line: str, number: int) -> tuple[Problem, Hidden]:
    """One line of a user's JSONL file, with `hidden` inside it. Raises ProblemError naming the line and the field."""
    try:
        raw: dict[str, Any] = msgspec.json.decode(line)
        if not isinstance(raw, dict):
            raise msgspec.ValidationError("Expected `object`")
        hidden_raw = raw.pop("hidden", [])
        solution, bug = raw.pop("solution", {}), raw.pop("bug", "")
        problem = msgspec.convert(raw, Problem)
        hidden = msgspec.convert({"id": problem.id, "cases": hidden_raw, "solution": solution, "bug": bug}, Hidden)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProblemError(f"line {number}: {error}") from None
    if problem.kind == "function" and not hidden.cases:
        raise ProblemError(f"line {number}: field 'hidden' is empty; a function problem needs at least one hidden case")
    return problem, hidden
