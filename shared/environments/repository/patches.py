"""Applies unified diffs, as git writes them, to a tree in memory.

A hunk's old lines must stand at the line that it names, or else in exactly one other place of the file. There is no
fuzzy match. A patch that does not fit the tree is refused; the error names the path or the line of the patch. Binary
patches and links are refused too, since their content is not text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from shared.contracts.trajectory import Change
from shared.environments.repository import submission
from shared.environments.repository.trees import File, Link, Tree, wrong_path

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_DIGITS = 9  # of a line's number; Python reads no number of more than 4,300
_NO_NEWLINE = "\\ No newline at end of file"
_NOTHING = "/dev/null"
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


class PatchError(ValueError):
    """The text is no patch, or the tree cannot take it; the text names the path and the line of the patch."""


@dataclass(slots=True)
class Hunk:
    """`start`: zero-based line of the old file where it begins. Lines keep their ends."""

    start: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


@dataclass(slots=True)
class FilePatch:
    """`old`, `new`: paths; None: the file is made, or deleted. `executable`: None where the mode stays."""

    old: str | None
    new: str | None
    hunks: list[Hunk] = field(default_factory=list)
    executable: bool | None = None
    copied: bool = False


def changes_of(tree: Tree, patch: str) -> dict[str, Change]:
    """Return the files that the patch changes, as it leaves them. Raises PatchError."""
    return changes(tree, applied(tree, patch))


def changes(before: Tree, after: Tree) -> dict[str, Change]:
    """Return what differs between two trees. Raises PatchError for a link that differs."""
    found: dict[str, Change] = {}
    for path in sorted({*before, *after}):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        if isinstance(new, Link):
            raise PatchError(f"{path!r:.200}: is a link; allowed: changes of files")
        found[path] = Change() if new is None else change_of(new)
    return found


def change_of(file: File) -> Change:
    """Return a file as a change of it."""
    return submission.change_of(file.data, file.executable)


def with_changes(tree: Tree, changes: Mapping[str, Change]) -> dict[str, File | Link]:
    """Return the tree after the changes."""
    after = dict(tree)
    for path, change in changes.items():
        if change.deleted:
            after.pop(path, None)
        else:
            after[path] = File(submission.content(change), change.executable)
    return after


def applied(tree: Tree, patch: str) -> dict[str, File | Link]:
    """Return the tree after the patch. Every change starts from the files of `tree`, as in one `git diff`. Raises PatchError."""
    found = parse(patch)
    gone = _removed(found)
    made: dict[str, File] = {}
    for one in found:
        if one.new is not None:
            made[one.new] = _made(tree, one, gone)
        elif _patched(_old_file(tree, one), one).data and one.hunks:
            raise PatchError(f"{one.old!r:.200}: the patch deletes it, but lines are left")
    return {path: entry for path, entry in tree.items() if path not in gone} | made


def _removed(found: list[FilePatch]) -> set[str]:
    """Return the paths that the patch renames or deletes. Raises PatchError if it changes a path twice, as a series of
    commits does."""
    removed = [one.old for one in found if one.old is not None and not one.copied and one.old != one.new]
    written = [one.new for one in found if one.new is not None]
    kept = [one.old for one in found if one.old is not None and one.old == one.new]
    for paths in (removed, written, [*dict.fromkeys(removed), *dict.fromkeys(kept)]):
        if twice := [path for path, times in Counter(paths).items() if times > 1]:
            raise PatchError(
                f"{twice[0]!r:.200}: the patch changes it twice; allowed: one diff of the tree, no series of commits"
            )
    return set(removed)


def _made(tree: Tree, one: FilePatch, gone: Set[str]) -> File:
    """Return the file that a part of the patch leaves. `gone`: paths that other parts rename or delete. Raises PatchError."""
    if one.new != one.old and one.new in tree and one.new not in gone:
        raise PatchError(f"{one.new!r:.200}: is in the tree; the patch makes it")
    return _patched(_old_file(tree, one), one)


def _old_file(tree: Tree, one: FilePatch) -> File:
    if one.old is None:
        return File(b"")
    if not isinstance(file := tree.get(one.old), File):
        raise PatchError(f"{one.old!r:.200}: is not a file of the tree; the patch changes it")
    return file


def _patched(file: File, patch: FilePatch) -> File:
    executable = file.executable if patch.executable is None else patch.executable
    if not patch.hunks:
        return File(file.data, executable)
    path = patch.new or patch.old
    lines = _lines(file.data.decode("utf-8", "surrogateescape"))
    done: list[str] = []
    at = 0
    for hunk in patch.hunks:
        start = _place(lines, hunk, at)
        if start is None:
            raise PatchError(
                f"{path!r:.200}: the lines of the hunk at line {hunk.start + 1} do not stand there, and in no other place or in "
                "several; allowed: a patch of exactly this tree"
            )
        done += lines[at:start] + hunk.new
        at = start + len(hunk.old)
    data = "".join(done + lines[at:]).encode("utf-8", "surrogateescape")
    return File(data, executable)


def _place(lines: list[str], hunk: Hunk, least: int) -> int | None:
    """Return the line where the hunk's old lines begin: the one that it names, or else the only other match. None: no match, or
    several."""
    size = len(hunk.old)
    if hunk.start >= least and lines[hunk.start : hunk.start + size] == hunk.old:
        return hunk.start
    if not size:
        return None
    others = [at for at in range(least, len(lines) - size + 1) if lines[at : at + size] == hunk.old]
    return others[0] if len(others) == 1 else None


def _lines(text: str) -> list[str]:
    """Return the lines with their ends. A carriage return is an ordinary character."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def parse(patch: str) -> list[FilePatch]:
    """Read a unified diff. Raises PatchError naming the line. An empty text is no patch."""
    try:
        patch.encode()
    except UnicodeEncodeError as error:
        number = patch.count("\n", 0, error.start) + 1
        raise PatchError(f"line {number}: found half a character ({patch[error.start]!a}); allowed: UTF-8") from None
    lines = patch.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    found = list(_files(lines))
    if not found:
        raise PatchError("found no file in it; allowed: a unified diff, as `git diff` writes it")
    return found


def _files(lines: list[str]) -> Iterator[FilePatch]:
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("diff --git "):
            one, at = _of_git(lines, at)
            yield one
        elif line.startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            one, at = _of_plain(lines, at)
            yield one
        elif line.startswith("@@ "):
            raise PatchError(
                f"line {at + 1}: found a hunk without a file; allowed: `--- a/path` and `+++ b/path` before it"
            )
        else:  # a message, an index line
            at += 1


def _of_git(lines: list[str], at: int) -> tuple[FilePatch, int]:
    head, number = lines[at], at + 1
    one = FilePatch(None, None)
    known = made = deleted = False
    at += 1
    while at < len(lines) and not lines[at].startswith(("diff --git ", "@@ ", "--- ")):
        word, _, rest = lines[at].partition(" ")
        if lines[at].startswith(("GIT binary patch", "Binary files ")):
            raise PatchError(f"line {at + 1}: found a binary patch; allowed: patches of text")
        if lines[at].startswith(("new file mode ", "new mode ", "deleted file mode ")):
            mode = lines[at].rsplit(" ", 1)[1]
            if mode not in ("100644", "100755"):
                raise PatchError(f"line {at + 1}: found mode {mode}; allowed: 100644, 100755 (no links, no submodules)")
            made, deleted = made or (word == "new" and "file" in lines[at]), deleted or word == "deleted"
            one.executable = None if word == "deleted" else mode == "100755"
        elif lines[at].startswith(("rename from ", "copy from ")):
            one.old, one.copied, known = _name(rest[5:], "", at), word == "copy", True
        elif lines[at].startswith(("rename to ", "copy to ")):
            one.new = _name(rest[3:], "", at)
        at += 1
    if at + 1 < len(lines) and lines[at].startswith("--- ") and lines[at + 1].startswith("+++ "):
        plain, at = _of_plain(lines, at)
        one.hunks = plain.hunks
        if not known:
            one.old, one.new = plain.old, plain.new
    elif not known:  # a mode alone, or an empty file
        path = _same(head, number)
        one.old, one.new = (None if made else path), (None if deleted else path)
    return one, at


def _of_plain(lines: list[str], at: int) -> tuple[FilePatch, int]:
    one = FilePatch(_name(lines[at][4:], "a/", at), _name(lines[at + 1][4:], "b/", at + 1))
    if one.old is None and one.new is None:
        raise PatchError(f"line {at + 1}: found {_NOTHING} twice; allowed: one path at least")
    at += 2
    while at < len(lines) and (head := _HUNK.match(lines[at])):
        hunk, at = _hunk(lines, at, head)
        one.hunks.append(hunk)
    return one, at


def _hunk(lines: list[str], at: int, head: re.Match[str]) -> tuple[Hunk, int]:
    number = at + 1
    if any(len(found) > _DIGITS for found in head.groups("")):
        raise PatchError(f"line {number}: found a number of more than {_DIGITS} digits; allowed: at most that many")
    first = int(head[1])
    olds, news = int(head[2] or 1), int(head[4] or 1)
    hunk = Hunk(first - 1 if olds else first)
    at += 1
    last: list[list[str]] = []
    while at < len(lines) and (len(hunk.old) < olds or len(hunk.new) < news or lines[at].startswith("\\")):
        mark, text = lines[at][:1], lines[at][1:] + "\n"
        if mark == "\\":
            for side in last:
                side[-1] = side[-1].removesuffix("\n")
            last = []
        elif mark in (" ", ""):  # some editors cut the blank of an empty line
            last = [hunk.old, hunk.new]
        elif mark in "-+":
            last = [hunk.old] if mark == "-" else [hunk.new]
        else:
            break
        if mark != "\\":
            for side in last:
                side.append(text)
        at += 1
    if (len(hunk.old), len(hunk.new)) != (olds, news):
        raise PatchError(
            f"line {number}: the hunk says {olds} old and {news} new lines; found {len(hunk.old)} and {len(hunk.new)}"
        )
    return hunk, at


def _name(text: str, prefix: str, at: int) -> str | None:
    """Return the path that a header names. None: the file does not exist on that side. Raises PatchError."""
    text = _unquoted(text, at) if text.startswith('"') else text.split("\t")[0].rstrip("\r")
    if text == _NOTHING:
        return None
    path = text.removeprefix(prefix)
    if wrong := wrong_path(path):
        raise PatchError(f"line {at + 1}: {path!r:.200}: {wrong}")
    return path


def _same(head: str, number: int) -> str:
    """Return the path of `diff --git a/PATH b/PATH`. Raises PatchError if the two differ."""
    text = head.removeprefix("diff --git ")
    middle = len(text) // 2
    if text.startswith('"'):
        old, new = _unquoted(text[:middle], number - 1), _unquoted(text[middle + 1 :], number - 1)
    else:
        old, new = text[:middle], text[middle + 1 :]
    if old.removeprefix("a/") != new.removeprefix("b/") or wrong_path(old.removeprefix("a/")):
        raise PatchError(f"line {number}: found {head[:100]!r}; allowed: one path, the same twice")
    return old.removeprefix("a/")


def _unquoted(text: str, at: int) -> str:
    r"""Return a name that git has quoted, such as "a/\303\244.py", unquoted. Raises PatchError."""
    body = text.strip()[1:-1]
    data = bytearray()
    place = 0
    while place < len(body):
        if body[place] != "\\":
            data += body[place].encode()
            place += 1
        elif octal := re.match(r"[0-3][0-7]{2}", body[place + 1 :]):
            data.append(int(octal[0], 8))
            place += 4
        elif body[place + 1 : place + 2] in _ESCAPES:
            data += _ESCAPES[body[place + 1]].encode()
            place += 2
        else:
            raise PatchError(f"line {at + 1}: found {text[:100]!r}, which is no quoted name")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise PatchError(f"line {at + 1}: found {text[:100]!r}, which is no UTF-8") from None
