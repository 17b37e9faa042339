"""Applying edits: pure, and the same for the agent loop, for SFT traces and for the evaluator.

An edit names a line of the only file and replaces the first occurrence of `old` in that line's text (the line without
its leading whitespace) by `new`. Indentation and the number of lines never change.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.formats import Action, Tool


class EditError(ValueError):
    """The edit cannot be applied to the present files; the text says why. The files stay as they are."""


def indentation(line: str) -> str:
    """The leading whitespace of a line."""
    return line[: len(line) - len(line.lstrip())]


def apply_edit(files: dict[str, str], action: Action) -> dict[str, str]:
    """The files after one edit, as a new dict. Raises EditError; never changes `files`."""
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
    """Whether edits make the one text of the other: as many lines, each indented as it was."""
    old, new = before.rstrip("\n").split("\n"), after.rstrip("\n").split("\n")
    return len(old) == len(new) and all(
        a == b or indentation(a) == indentation(b) for a, b in zip(old, new, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Workspace:
    """The files of an attempt and what `undo` returns to. Immutable: every step gives a new one."""

    files: dict[str, str]
    past: tuple[dict[str, str], ...] = ()

    def edit(self, action: Action) -> Workspace:
        """Raises EditError."""
        return Workspace(apply_edit(self.files, action), (*self.past, self.files))

    def undo(self) -> Workspace:
        """Takes the last edit back. Raises EditError when there is none."""
        if not self.past:
            raise EditError("there is no edit to undo")
        return Workspace(self.past[-1], self.past[:-1])
