"""The work of an attempt as a unified diff, against the files as the problem gives them."""

from __future__ import annotations

import difflib

from shared.contracts.trajectory import Change, Submission
from shared.environments import Environment
from shared.problems import Problem


def unified(environment: Environment, problem: Problem, submission: Submission) -> str:
    """Return a diff that `patch -p1` takes; binary and empty files are named only. Empty: nothing was changed."""
    changes = {path: Change(text=text) for path, text in submission.files.items()} | submission.changes
    given = environment.given(problem, sorted(changes))
    return "".join(_of_file(path, given.get(path), changes[path]) for path in sorted(changes))


def _of_file(path: str, before: str | None, change: Change) -> str:
    if change.data is not None:
        return f"Binary file b/{path} has {len(change.data)} bytes\n"
    if change.deleted and before is None:
        return f"Binary file a/{path} was deleted\n"
    if before is None and not change.text:
        return f"Empty file b/{path} was created\n"
    if change.deleted and not before:
        return f"Empty file a/{path} was deleted\n"
    old, new = _lines(before or ""), _lines(change.text or "")
    names = ("/dev/null" if before is None else f"a/{path}", "/dev/null" if change.deleted else f"b/{path}")
    lines = []
    for line in difflib.unified_diff(old, new, *names):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines)


def _lines(text: str) -> list[str]:
    """Return the lines with their ends. Only a line feed ends a line: source files may hold other separators within one."""
    *whole, rest = text.split("\n")
    return [f"{line}\n" for line in whole] + ([rest] if rest else [])
