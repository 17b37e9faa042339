"""Style of the lines that an attempt changed in the Python files of a tree, by ruff before and after.

A line is held against the attempt only where it wrote it, and only as far as the lines that stood there before had less of the same
rule. Other languages are passed over. The rules are fixed here, so that no tree and no attempt can turn them off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from difflib import SequenceMatcher

from services.reward.ruff_server import Issue, Unavailable, shared_server
from shared.problems.schema import MAX_CODE
from shared.terms import Evidence, Found, Seen, Unreadable

LINES = 4000  # changed in one file; of more, the first are looked at
FILES = 50  # of one attempt; of more, the first by name


def prepare() -> None:
    """Start ruff before the time of a term begins to count."""
    shared_server().start()


def find(seen: Seen) -> Found:
    """Count the issues on changed lines that were not there before."""
    changed = {path: change.text for path, change in sorted(seen.trajectory.changes.items()) if change.text is not None}
    paths = [path for path, text in changed.items() if path.endswith(".py") and len(text) <= MAX_CODE][:FILES]
    if not paths:
        return Found()
    old = {path: seen.before.get(path, "") for path in paths}
    new = {path: changed[path] for path in paths}
    before, after, lines = _checked(old, new)
    evidence = []
    for path in paths:
        replaced, written = lines[path]
        had = Counter(rule for line, rule, _ in before[path] if line in replaced)
        for line, rule, message in after[path]:
            if line not in written:
                continue
            if had[rule]:
                had[rule] -= 1
                continue
            evidence.append(Evidence(f"{path[:200]}:{line}: {rule} {message[:160]}"))
    return Found(float(len(evidence)), evidence)


def changed_lines(old: str, new: str) -> tuple[set[int], set[int]]:
    """Return the numbers of the lines, from 1, that were replaced or removed in `old`, and written in `new`."""
    a, b = _lines(old), _lines(new)
    most = min(len(a), len(b))
    head = next((at for at in range(most) if a[at] != b[at]), most)
    tail = next((at for at in range(most - head) if a[-1 - at] != b[-1 - at]), most - head)
    left, right = a[head : len(a) - tail][:LINES], b[head : len(b) - tail][:LINES]
    replaced: set[int] = set()
    written: set[int] = set()
    for tag, i, j, k, m in SequenceMatcher(a=left, b=right, autojunk=len(left) > 500).get_opcodes():
        if tag != "equal":
            replaced.update(range(head + i + 1, head + j + 1))
            written.update(range(head + k + 1, head + m + 1))
    return replaced, written


def _lines(text: str) -> list[str]:
    """Return the lines as ruff counts them. `str.splitlines` also splits at form feeds, U+2028 and others."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def _checked(
    old: Mapping[str, str], new: Mapping[str, str]
) -> tuple[dict[str, list[Issue]], dict[str, list[Issue]], dict[str, tuple[set[int], set[int]]]]:
    """Return the issues of both states and the changed lines, by path. The lines are compared while ruff works. Raises Unreadable
    where ruff does not work."""
    server = shared_server()
    try:
        asked = server.ask([*old.values(), *new.values()])
        lines = {path: changed_lines(old[path], new[path]) for path in old}
        issues = server.answers(asked)
    except Unavailable as error:
        raise Unreadable(str(error)) from None
    return dict(zip(old, issues, strict=False)), dict(zip(new, issues[len(old) :], strict=True)), lines
