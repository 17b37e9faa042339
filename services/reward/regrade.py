"""Recorded submissions graded again: the file that keeps the new verdicts, and the table of what changed. No sandbox here.

Invariants
- Nothing recorded is changed: the new verdicts are lines of a file of their own.
- A submission that could not be graded has no line, no verdict and no reward; it is named with the reason. It is never a zero.
- The file holds gradings against one set of tests, by one state of the code. Its first line names both, and a file of another set
  or state is refused.
"""

from __future__ import annotations

import fcntl
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import xxhash

from services.reward.rescore import Change, Record, rescored
from shared.contracts.messages import Verdict
from shared.contracts.run import RewardConfig

EXAMPLES = 5


class BadFile(ValueError):
    """The file of gradings cannot be continued; the text says why and what is allowed."""


class Against(msgspec.Struct, frozen=True, kw_only=True):
    """What submissions are graded against: the first line of a file. `pack`, `pack_hidden`: checksums; the empty string: each
    problem's own, as the ledger has it. `code`: see `code_state`; the empty string: the file is older than this field."""

    run: str
    pack: str = ""
    pack_hidden: str = ""
    code: str = ""


def code_state(folders: Iterable[Path], *facts: str) -> str:
    """Return a checksum of the Python files below the folders and of the facts: when it changes, verdicts may change."""
    digest = xxhash.xxh3_128()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            data = path.read_bytes()
            digest.update(f"{path.relative_to(folder)}\0{len(data)}\0".encode() + data)
    digest.update("\0".join(facts).encode())
    return digest.hexdigest()


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One submission graded again. `trajectory`: its checksum."""

    attempt: str
    trajectory: str
    problem: str
    before: Verdict
    after: Verdict


class GradingFile:
    """The lines of a file, and a place to add to them. `with GradingFile(…)` closes it."""

    def __init__(self, path: Path, tests: Against) -> None:
        """Open or begin the file. A last line that a crash cut short is dropped. Raises BadFile, OSError."""
        self.lines: dict[tuple[str, str], Line] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            self._begin(path, tests)
        except BaseException:
            self._file.close()
            raise

    def _begin(self, path: Path, tests: Against) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadFile(f"{path}: another process writes it; allowed: a new file, or this one afterwards") from None
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        head, *rest = data[:whole].splitlines() or [b""]
        if not whole:
            if data:
                raise BadFile(f"{path}: it is no file of gradings; allowed: a new file")
            self._file.write(msgspec.json.encode(tests) + b"\n")
            self._file.flush()
            return
        try:
            found = msgspec.json.decode(head, type=Against)
            lines = [msgspec.json.decode(line, type=Line) for line in rest]
        except msgspec.MsgspecError as error:
            raise BadFile(f"{path}: it is no file of gradings ({error}); allowed: a new file") from None
        if found != tests and msgspec.structs.replace(found, code=tests.code) == tests:
            raise BadFile(
                f"{path}: found gradings by another state of the code or of the sandboxes ({found.code[:12] or 'unknown'}); "
                f"allowed: {tests.code[:12]}, or a new file (--out NEW)"
            )
        if found != tests:
            raise BadFile(f"{path}: found gradings of {_said(found)}; allowed: {_said(tests)}, or a new file")
        self._file.truncate(whole)
        self.lines = {(line.attempt, line.trajectory): line for line in lines}

    def add(self, lines: Iterable[Line]) -> None:
        """Keep more lines. They are on disk when it returns."""
        for line in lines:
            self.lines[line.attempt, line.trajectory] = line
            self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> GradingFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def _said(tests: Against) -> str:
    parts = (f"{name} {value[:12]}" for name, value in (("pack", tests.pack), ("hidden", tests.pack_hidden)) if value)
    return f"{tests.run} against {', '.join(parts) or 'its own tests'}"


@dataclass(slots=True)
class Row:
    """One problem, or all of them. `solved`: attempts before and after, of those that were graded."""

    graded: int = 0
    solved: tuple[int, int] = (0, 0)
    newly_solved: int = 0
    newly_failed: int = 0
    changed: int = 0  # another verdict: also other counts, another error
    not_graded: int = 0


@dataclass(slots=True)
class Regraded:
    """`problems`: those with a change or a submission that was not graded. `mean`: the reward before and after, both under the
    run's configuration of now. `signal`: groups in which not all rewards are equal. `reasons`: attempt -> why it was not graded."""

    total: Row = field(default_factory=Row)
    problems: dict[str, Row] = field(default_factory=dict)
    mean: tuple[float, float] = (0.0, 0.0)
    groups: int = 0
    signal: tuple[int, int] = (0, 0)
    reasons: dict[str, str] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)  # attempts whose `solved` changed


def compared(
    records: Sequence[Record], after: Mapping[str, Verdict], reasons: Mapping[str, str], config: RewardConfig
) -> Regraded:
    """Return what changed. `after`: new verdicts by attempt. `reasons`: of the attempts that were not graded."""
    found = Regraded(reasons=dict(reasons))
    rows: dict[str, Row] = defaultdict(Row)
    graded = [record for record in records if record.attempt in after]
    for record in graded:
        for row in (rows[record.problem], found.total):
            _count(row, record.verdict, after[record.attempt])
        if record.verdict.solved != after[record.attempt].solved and len(found.examples) < EXAMPLES:
            found.examples.append(record.attempt)
    for record in records:
        if record.attempt in reasons:
            rows[record.problem].not_graded += 1
            found.total.not_graded += 1
    found.problems = {name: row for name, row in sorted(rows.items()) if row.changed or row.not_graded}
    was = rescored(graded, config)
    now = rescored([_regraded(record, after[record.attempt]) for record in graded], config)
    if graded:
        found.mean = (sum(c.reward for c in was) / len(graded), sum(c.reward for c in now) / len(graded))
    found.signal = (_signals(was), _signals(now))
    found.groups = len({record.group for record in graded})
    return found


def _count(row: Row, before: Verdict, after: Verdict) -> None:
    row.graded += 1
    row.solved = (row.solved[0] + before.solved, row.solved[1] + after.solved)
    row.newly_solved += after.solved and not before.solved
    row.newly_failed += before.solved and not after.solved
    row.changed += before != after


def _regraded(record: Record, verdict: Verdict) -> Record:
    """Return the record with another verdict and the same findings."""
    graded = None if record.graded is None else msgspec.structs.replace(record.graded, verdict=verdict)
    return replace(record, verdict=verdict, graded=graded)


def _signals(changes: Sequence[Change]) -> int:
    groups: dict[str, set[float]] = defaultdict(set)
    for change in changes:
        groups[change.record.group].add(round(change.reward, 9))
    return sum(len(rewards) > 1 for rewards in groups.values())
