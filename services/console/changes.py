"""Shows the changes of an attempt, file by file, as unified differences. Pure.

Both sides come from others, so time and size are bounded: a page compares so many lines and no more (`Effort`), and shows so
many. Secrets are masked before a text becomes lines: they may stretch over several.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shared.contracts.trajectory import Submission
from shared.masking import masked

MAX_FILES = 100  # files shown with a difference; later files are only named
MAX_NAMES = 1000
MAX_LINES, MAX_PAGE_LINES = 600, 4000  # lines of one difference; lines of all on a page
MAX_WIDTH = 400  # characters of a line
MAX_TEXT, MAX_TEXT_LINES = 1 << 19, 20_000  # of a text that is compared
STEPS = 20_000_000  # of comparing, on one page: of a tenth of a microsecond each
PER_CHARACTER, PER_LINE = 4, 20  # steps that masking a character and handling a line take
CONTEXT = 3  # unchanged lines around a change

Line = tuple[str, str]
"""Kind (add, del, hunk, same, note) and text."""
_KINDS = {"+": "add", "-": "del", "@": "hunk", " ": "same", "\\": "note"}


@dataclass(frozen=True, slots=True)
class FileChange:
    """`state`: changed, new, deleted or binary. `left_out`: lines of the difference that are not shown. `told`: what else is to
    be said of it; empty: nothing."""

    path: str
    state: str
    executable: bool
    added: int
    removed: int
    lines: tuple[Line, ...]
    left_out: int = 0
    told: str = ""


@dataclass(slots=True)
class Effort:
    """The steps, lines and files that are left for the differences of one page."""

    steps: int = STEPS
    lines: int = MAX_PAGE_LINES
    files: int = MAX_FILES


@dataclass(frozen=True, slots=True)
class Changes:
    """`files`: those that differ; `more`: names of further ones; `unnamed`: how many there are beyond these."""

    files: tuple[FileChange, ...]
    more: tuple[str, ...] = ()
    unnamed: int = 0


def of(submission: Submission, before: Mapping[str, str] | None) -> Changes:
    """`before`: the text of the files as the problem gives them, of those that it has as text; None: unknown."""
    paths = sorted({*submission.files, *submission.changes})
    effort = Effort()
    found: list[FileChange] = []
    for number, path in enumerate(paths):
        if effort.files <= 0:
            rest = paths[number:]
            return Changes(tuple(found), tuple(rest[:MAX_NAMES]), max(0, len(rest) - MAX_NAMES))
        if (change := _change(path, submission, before, effort)) is not None:
            found.append(change)
            effort.files -= 1
    return Changes(tuple(found))


def _change(path: str, submission: Submission, before: Mapping[str, str] | None, effort: Effort) -> FileChange | None:
    """Return the change of a file; None: the file is unchanged."""
    old = None if before is None else before.get(path)
    change = submission.changes.get(path)
    text = submission.files.get(path) if change is None else change.text
    executable = change is not None and change.executable
    if change is not None and change.deleted:
        told = "" if old is not None else "its text is not known"
        return _file(path, "deleted", False, old or "", "", effort, told)
    if text is None:
        size = len(change.data or b"") if change is not None else 0
        return FileChange(path, "binary", executable, 0, 0, (), told=f"{size:,} bytes")
    if old is None:
        told = "what it was before cannot be read" if before is None else ""
        return _file(path, "changed" if before is None else "new", executable, "", text, effort, told)
    if old == text:
        told = "its text is as it was" if change is not None else ""
        return FileChange(path, "changed", executable, 0, 0, (), told=told) if change is not None else None
    return _file(path, "changed", executable, old, text, effort, "")


def _file(path: str, state: str, executable: bool, old: str, new: str, effort: Effort, told: str) -> FileChange:
    size = f"{len(old):,} characters before, {len(new):,} after"
    if max(len(old), len(new)) > MAX_TEXT or max(old.count("\n"), new.count("\n")) > MAX_TEXT_LINES:
        told = f"{told}; {size}: too long to be shown".removeprefix("; ")
        return FileChange(path, state, executable, 0, 0, (), told=told)
    effort.steps -= PER_CHARACTER * (len(old) + len(new)) + PER_LINE * (old.count("\n") + new.count("\n"))
    if effort.steps < 0:
        return FileChange(path, state, executable, 0, 0, (), told=f"{size}: the page shows enough already")
    lines = compared(old, new, effort)
    if not lines and old != new:
        told = "it differs in the newline at its end, or in what is masked"
    added, removed = (sum(kind == wanted for kind, _ in lines) for wanted in ("add", "del"))
    shown = tuple(lines[: max(0, min(MAX_LINES, effort.lines))])
    effort.lines -= len(shown)
    cut = tuple((kind, line if len(line) <= MAX_WIDTH else f"{line[:MAX_WIDTH]}…") for kind, line in shown)
    return FileChange(path, state, executable, added, removed, cut, len(lines) - len(shown), told)


def compared(old: str, new: str, effort: Effort | None = None) -> list[Line]:
    """Return the unified difference of two texts, secrets masked. If comparing would take too long, all old lines are removed and
    all new ones added."""
    a, b = _lines(old), _lines(new)
    effort = effort or Effort()
    head, tail = _alike(a, b)
    middle_a, middle_b = a[head : len(a) - tail], b[head : len(b) - tail]
    needed = _steps(middle_a, middle_b)
    if needed > effort.steps:
        return [
            ("hunk", f"@@ -{_range(0, len(middle_a), head)} +{_range(0, len(middle_b), head)} @@"),
            *(("del", f"-{line}") for line in middle_a),
            *(("add", f"+{line}") for line in middle_b),
        ]
    effort.steps -= needed
    # Lines that are equal at both ends are left out, but for the context: comparing takes time by all lines.
    before, behind = min(head, CONTEXT), min(tail, CONTEXT)
    start = head - before
    return list(_unified(a[start : len(a) - tail + behind], b[start : len(b) - tail + behind], start))


def _unified(a: Sequence[str], b: Sequence[str], start: int) -> Iterator[Line]:
    matcher = difflib.SequenceMatcher(None, a, b)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        first, last = group[0], group[-1]
        yield "hunk", f"@@ -{_range(first[1], last[2], start)} +{_range(first[3], last[4], start)} @@"
        for tag, a1, a2, b1, b2 in group:
            if tag == "equal":
                yield from (("same", f" {line}") for line in a[a1:a2])
                continue
            yield from (("del", f"-{line}") for line in a[a1:a2])
            yield from (("add", f"+{line}") for line in b[b1:b2])


def _range(first: int, last: int, start: int) -> str:
    """Return a range as a unified difference writes it: counted from 1; an empty range names the line before it."""
    length = last - first
    begin = start + first + (1 if length else 0)
    return f"{begin}" if length == 1 else f"{begin},{length}"


def _lines(text: str) -> list[str]:
    """Split at newlines alone, as editors see lines."""
    lines = masked(text).split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _alike(a: Sequence[str], b: Sequence[str]) -> tuple[int, int]:
    """Return how many equal lines the two begin with, and how many they end with."""
    shorter = min(len(a), len(b))
    head = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    tail = next((i for i in range(shorter - head) if a[-1 - i] != b[-1 - i]), shorter - head)
    return head, tail


def _steps(a: Sequence[str], b: Sequence[str]) -> int:
    """Return an upper bound on difflib's steps: pairs of equal lines, once for each piece that it finds. Lines making up over 1 %
    of a text of 200 lines or more are skipped, as difflib does."""
    there = Counter(b)
    popular = len(b) // 100 + 1 if len(b) >= 200 else len(b) + 1
    pairs = sum(count * there[line] for line, count in Counter(a).items() if there[line] <= popular)
    return len(a) + len(b) + pairs * max(1, min(len(a), len(b)))


def looks_like_a_patch(text: str) -> bool:
    return text.startswith(("--- ", "diff --git ", "*** Begin Patch")) or "\n@@ " in text[:2000]


def patch_lines(text: str) -> list[Line]:
    """Return the lines of a text that is already a difference."""
    return [(_KINDS.get(line[:1], "same"), line) for line in masked(text).split("\n")]
