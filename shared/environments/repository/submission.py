"""The changes of an attempt, as data: found by comparing trees, checked against limits, applied to a fresh copy.

Invariants:
- Only regular files are submitted. Links, devices and pipes are never followed, read or written.
- `apply` and `apply_inside` write nothing outside their folder, whatever the changes say: they come from a sandbox.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shared.contracts.trajectory import Change
from shared.environments.repository.inside import files
from shared.environments.repository.trees import wrong_place
from shared.environments.repository.unpacked import Entries

if TYPE_CHECKING:
    from shared.environments.tools import FileAccess

MAX_CHANGES = 2000
MAX_BYTES = 32 << 20  # of all changed files together


class SubmissionError(ValueError):
    """The changes cannot be applied; the text names the path, what was found and what is allowed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """`changed`: regular files that are new or differ. `deleted`: paths that the base has and the tree has not.
    `refused`: path -> why it cannot be submitted."""

    changed: tuple[str, ...]
    deleted: tuple[str, ...]
    refused: dict[str, str]


def difference(base: Entries, now: Entries) -> Difference:
    """Compare two scans of a tree."""
    changed, refused = [], {}
    for path, entry in now.items():
        if base.get(path) == entry:
            continue
        kind, content, *_ = entry
        if kind == "file":
            changed.append(path)
        else:
            refused[path] = f"a link to {content}" if kind == "link" else str(content)
    gone = tuple(sorted(path for path in base if path not in now))
    return Difference(tuple(sorted(changed)), gone, refused)


def change_of(data: bytes, executable: bool) -> Change:
    """Return a file as a change: as text where it is UTF-8, else as bytes."""
    try:
        return Change(text=data.decode(), executable=executable)
    except UnicodeDecodeError:
        return Change(data=data, executable=executable)


def content(change: Change) -> bytes:
    """Return the bytes of a change that is no deletion."""
    return change.text.encode("utf-8", "surrogatepass") if change.text is not None else change.data or b""


def objection(changes: Mapping[str, Change]) -> str | None:
    """Return why the changes cannot be applied: the path, what was found, what is allowed. None: they can."""
    if len(changes) > MAX_CHANGES:
        return f"found {len(changes)} changed files; allowed: at most {MAX_CHANGES}"
    size = sum(len(content(change)) for change in changes.values())
    if size > MAX_BYTES:
        return f"found {size} bytes in changed files; allowed: at most {MAX_BYTES}"
    for path, change in changes.items():
        if wrong := wrong_place(path):
            return f"{path!r:.200}: {wrong}"
        if change.text is not None and change.data is not None:
            return f"{path!r:.200}: found both text and data; allowed: one of them"
    written = {path for path, change in changes.items() if not change.deleted}
    if wrong := _collision(written):
        return wrong
    for path in written:
        parts = path.split("/")
        for end in range(1, len(parts)):
            if (folder := "/".join(parts[:end])) in written:
                return f"{folder!r:.200}: found as a file and as a folder; allowed: one of them"
    return None


def _collision(paths: Iterable[str]) -> str | None:
    """Return which two paths, or folders of paths, differ only in case. None: no two do."""
    known: dict[str, str] = {}
    for path in paths:
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            one = "/".join(parts[:end])
            other = known.setdefault(files.folded(one), one)
            if other != one:
                return f"{one!r:.200}: differs from {other!r:.200} only in case; allowed: one of the two"
    return None


def split(changes: Mapping[str, Change]) -> tuple[list[str], dict[str, tuple[bytes, bool]]]:
    """Return the paths that the changes delete, and what they write: path -> (contents, executable). Raises SubmissionError."""
    if wrong := objection(changes):
        raise SubmissionError(wrong)
    deleted = [path for path, change in changes.items() if change.deleted]
    written = {path: (content(one), one.executable) for path, one in changes.items() if not one.deleted}
    return deleted, written


def apply(changes: Mapping[str, Change], folder: Path) -> None:
    """Write the changes into a folder that no process uses. Raises SubmissionError before the first write, or at a path that
    leads through a link; OSError."""
    deleted, written = split(changes)
    try:
        files.change(str(folder), deleted, written)
    except files.Refused as error:
        raise SubmissionError(str(error)) from None


async def apply_inside(changes: Mapping[str, Change], there: FileAccess, folder: str) -> None:
    """Do what `apply` does, by the file server of a sandbox. Raises SubmissionError, FileError, InfrastructureError."""
    deleted, written = split(changes)
    encoded = {path: [base64.b64encode(data).decode(), executable] for path, (data, executable) in written.items()}
    answer = await there.ask("apply", path=folder, deleted=deleted, written=encoded)
    if answer["refused"]:
        raise SubmissionError(str(answer["refused"]))
