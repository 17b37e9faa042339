"""Describes a function to an agent: as the problem itself for `compact-1`, as messages and tools for chat models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.environments import Brief, Message, ToolSpec
from shared.environments.function.actions import Observation, Tool
from shared.problems import Case, FunctionProblem, values

SHOWN = 8  # visible cases in the task
LONGEST = 300  # characters of a value

_SYSTEM = "You repair a Python function. Change it with edit until test passes, then call submit."


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


TOOLS = (
    ToolSpec(
        Tool.edit,
        "Replace the first occurrence of old by new within one line. Indentation and the number of lines stay.",
        _object(
            line={"type": "integer", "description": "line number, from 1"},
            old={"type": "string"},
            new={"type": "string"},
        ),
        "changes",
    ),
    ToolSpec(Tool.undo, "Take the last edit back.", _object(), "reverts"),
    ToolSpec(Tool.test, "Run the visible tests.", _object(), "tests"),
    ToolSpec(Tool.submit, "Submit the file as it is. Ends the attempt.", _object(), "ends"),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """The problem with the present state of its files: `compact-1` writes the task from it."""

    problem: FunctionProblem
    files: dict[str, str]


def brief_of(problem: FunctionProblem, files: dict[str, str]) -> Brief:
    parts = [problem.prompt or f"{problem.entry} is broken. Repair it.", numbered(files), _cases(problem)]
    task = Message("user", "\n\n".join(part for part in parts if part))
    return Brief((Message("system", _SYSTEM), task), TOOLS, Subject(problem, files))


def told(problem: FunctionProblem, files: dict[str, str], observation: Observation | None = None) -> str:
    """Return what a chat model reads after a call: the outcome of a test, or the file as it is now."""
    if observation is None:
        return numbered(files)
    if observation.failing is None:
        return "All visible tests pass."
    case = problem.visible[observation.failing]
    return f"{_call(problem, case.args)} gave {_shown(observation.got)}, expected {_wanted(case)}"


def numbered(files: Mapping[str, str]) -> str:
    """Return the files with line numbers, each below its path."""
    return "\n\n".join(
        "\n".join([path, *(f"{n:3} {line}" for n, line in enumerate(text.rstrip("\n").split("\n"), 1))])
        for path, text in files.items()
    )


def _cases(problem: FunctionProblem) -> str:
    return "\n".join(f"{_call(problem, case.args)} must give {_wanted(case)}" for case in problem.visible[:SHOWN])


def _wanted(case: Case) -> str:
    """Return the expected value; for one that must be changed in place, with words that say so."""
    value = _shown(case.expected)
    return f"None and an argument changed to {value}" if case.changed is True else value


def _call(problem: FunctionProblem, args: str) -> str:
    return f"{problem.entry.rpartition('::')[2]}({_shown(args)[1:-1]})"


def _shown(value: str) -> str:
    """Return a tagged value as Python would print it; anything else (the name of an exception) as it is."""
    try:
        text = values.show(value)
    except ValueError:
        text = value
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
