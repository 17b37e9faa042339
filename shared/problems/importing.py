"""Anyone's own problems: a JSONL file, one problem a line, hidden cases inside (docs/problems.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.problems.schema import Case, Hidden, Problem, ProblemError, parse_line
from shared.problems.values import decode

_MAX_ERRORS = 20  # named in one message
_ID = re.compile(r"[!-~]{1,128}\Z")  # visible ASCII: ids stand in keys, files and labels


@dataclass(frozen=True, slots=True)
class Line:
    """A problem and the line of the file that it stands on, counted from 1."""

    number: int
    problem: Problem
    hidden: Hidden


def import_jsonl(path: Path) -> list[tuple[Problem, Hidden]]:
    """In the order of the file; empty lines are skipped. Raises ProblemError that names every bad line and its field."""
    return [(line.problem, line.hidden) for line in read_lines(path)]


def read_lines(path: Path) -> list[Line]:
    """As `import_jsonl`, with the numbers of the lines."""
    try:
        # At line feeds alone: JSON may hold other ends of a line as they are (U+2028, U+0085). A mark of the byte order is none.
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemError(f"{path}: {error}") from None
    read: list[Line] = []
    errors: list[str] = []
    first: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            problem, hidden = parse_line(line, number)
            check(problem, hidden, number)
            if problem.id in first:
                raise ProblemError(
                    f"line {number}: field 'id': {problem.id!r} stands on line {first[problem.id]} as well"
                )
        except ProblemError as error:
            errors.append(str(error))
            continue
        first[problem.id] = number
        read.append(Line(number, problem, hidden))
    if errors:
        raise ProblemError(f"{path}:\n{listed(errors)}")
    if not read:
        raise ProblemError(f"{path}: no problems in it; one JSON object a line is expected (docs/problems.md)")
    return read


def listed(reasons: Sequence[str]) -> str:
    """One a line; of very many the first, and how many more there are."""
    more = [f"… and {len(reasons) - _MAX_ERRORS} more"] if len(reasons) > _MAX_ERRORS else []
    return "\n".join([*reasons[:_MAX_ERRORS], *more])


def entry_of(problem: Problem) -> tuple[str, str]:
    """(path, name) of the function under test. Raises ValueError."""
    path, _, name = problem.entry.rpartition("::")
    if not path and len(problem.files) == 1:
        (path,) = problem.files
    if path not in problem.files or not name.isidentifier():
        raise ValueError(
            f"found {problem.entry!r}; allowed: path::name with a path of 'files' "
            f"({', '.join(sorted(problem.files))}), or name where there is one file"
        )
    return path, name


def check(problem: Problem, hidden: Hidden, number: int) -> None:
    """What the types do not say. Raises ProblemError."""

    def refuse(field: str, what: str) -> ProblemError:
        return ProblemError(f"line {number}: field {field!r}: {what}")

    if not _ID.match(problem.id):
        raise refuse("id", f"found {problem.id!r}; allowed: 1 to 128 visible ASCII characters")
    if problem.kind != "function":
        raise refuse(
            "kind", f"found {problem.kind!r}; allowed: 'function' ('repository' is reserved, nothing runs it yet)"
        )
    try:
        path, name = entry_of(problem)
    except ValueError as error:
        raise refuse("entry", str(error)) from None
    for field, text in ((f"files[{path}]", problem.files[path]), (f"solution[{path}]", hidden.solution.get(path))):
        if text is not None and not _defines(text, name):
            raise refuse(field, f"defines no function {name!r} at its top level")
    unknown = sorted(set(hidden.solution) - set(problem.files))
    if unknown:
        raise refuse("solution", f"found {unknown[0]!r}, which is not in 'files'")
    if not problem.visible:
        raise refuse("visible", "is empty; the agent needs at least one case to see")
    if problem.actual and len(problem.actual) != len(problem.visible):
        raise refuse("actual", f"found {len(problem.actual)} texts for {len(problem.visible)} visible cases")
    for field, cases in (("visible", problem.visible), ("hidden", hidden.cases)):
        for index, case in enumerate(cases):
            _check_case(case, f"line {number}: field '{field}[{index}]")
    if problem.limits.time_s <= 0 or problem.limits.memory_mb < 64:
        raise refuse("limits", "allowed: time_s above 0, memory_mb from 64")


def _defines(text: str, name: str) -> bool:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return True  # a syntax error may be the bug; the gate sees what it does
    return any(
        isinstance(node, ast.FunctionDef | ast.Assign | ast.ImportFrom) and _binds(node, name) for node in tree.body
    )


def _binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name == name
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    return isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names)


def _check_case(case: Case, where: str) -> None:
    for field in ("args", "expected"):
        text = getattr(case, field)
        try:
            value = decode(text)
        except (ValueError, RecursionError) as error:
            raise ProblemError(
                f"{where}.{field}': found {text[:60]!r}: {error}; allowed: tagged JSON (docs/problems.md)"
            ) from None
        if field == "args" and not isinstance(value, list):
            raise ProblemError(f"{where}.args': found {text[:60]!r}; allowed: a JSON list of positional arguments")
