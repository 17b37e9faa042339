"""Applying edits: pure, and the same for the agent loop, for SFT traces and for the evaluator.

An edit names a line of the only file and replaces the first occurrence of `old` in that line's text (the line without
its leading whitespace) by `new`. Indentation and the number of lines never change.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.environments.function.actions import Action, Tool


class EditError(ValueError):
    """The edit cannot be applied to the present files; the text says why. The files stay as they are."""


def indentation(line: str) -> str:
    """Return the leading whitespace of a line."""
    return line[: len(line) - len(line.lstrip())]


def apply_edit(files: dict[str, str], action: Action) -> dict[str, str]:
    """Return the files after one edit, as a new dict. `files` stays unchanged. Raises EditError."""
    if action.tool is not Tool.edit or action.error:
        raise EditError(action.error or f"found tool {action.tool}; expected an edit")
    if len(files) != 1:
        raise EditError(f"found {len(files)} files; a span edit names no file and needs exactly one")
    ((path, text),) = files.items()
    lines = text.split("\n")
    if not 0 <= action.line < len(lines):
        raise EditError(f"line {action.line + 1} of {len(lines)}")
    if "\n" in action.new or "\r" in action.new:
        raise EditError("the replacement holds a line break; an edit stays within one line")
    indent = indentation(lines[action.line])
    body = lines[action.line][len(indent) :]
    if not action.old and body:
        raise EditError(f"nothing to replace is named, and line {action.line + 1} is not empty")
    at = body.find(action.old)
    if at < 0:
        raise EditError(f"{action.old!r} does not occur in line {action.line + 1}")
    lines[action.line] = indent + body[:at] + action.new + body[at + len(action.old) :]
    return {path: "\n".join(lines)}


def reachable(before: str, after: str) -> bool:
    """Return whether edits can turn `before` into `after`: both have as many lines, each indented alike."""
    old, new = before.rstrip("\n").split("\n"), after.rstrip("\n").split("\n")
    return len(old) == len(new) and all(
        a == b or indentation(a) == indentation(b) for a, b in zip(old, new, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Files:
    """The files of an attempt and what `undo` returns to. Immutable: every step gives a new one."""

    files: dict[str, str]
    past: tuple[dict[str, str], ...] = ()

    def edit(self, action: Action) -> Files:
        """Return the files after an edit. Raises EditError."""
        return Files(apply_edit(self.files, action), (*self.past, self.files))

    def undo(self) -> Files:
        """Return the files before the last edit. Raises EditError when there is no edit."""
        if not self.past:
            raise EditError("there is no edit to undo")
        return Files(self.past[-1], self.past[:-1])
