"""One row for each scored attempt of a run, read from the ledger and the object store, and kept as compressed CSV."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from sqlalchemy import select

from benchmarks.behaviour import term
from services.reward import records
from shared import ledger
from shared import objects as stores
from shared.ledger.models import Group


@dataclass(frozen=True, slots=True)
class Row:
    """`draw`: number of its group, in the order of requests. `version`: the newest that sampled it. `later`: it was scored by
    the configuration that came in mid-run. `found`: the term's amount, whatever its weight then; -1: the grader has no answer.
    `seconds`: from the run's first request to the group's."""

    arm: str
    seed: int
    group: str
    problem: str
    draw: int
    version: int
    seconds: float
    later: bool
    solved: bool
    found: float
    tokens: int
    turns: int
    edits: int
    reward: float


def read(state: Path, arm: str, seed: int, first: str) -> list[Row]:
    """Return the scored attempts of the run in a state folder. `first`: id of the reward configuration that it began with."""
    engine = ledger.connect(f"sqlite:///{state / 'ledger.db'}", read_only=True)
    objects = stores.connect(f"file:{state / 'objects'}")
    try:
        run = records.named(engine, "")
        with engine.begin() as connection:
            rows = connection.execute(
                select(Group.group_id, Group.draw, Group.requested_at).where(Group.run_id == run)
            ).all()
        drawn = {name: (draw, at) for name, draw, at in rows}
        begin = min((at for _, at in drawn.values()), default=0.0)
        return [
            Row(
                arm, seed, one.group, one.problem, drawn[one.group][0], one.version or 0, drawn[one.group][1] - begin,
                one.reward_config != first, one.verdict.solved, _amount(one), one.effort.sampled_tokens, one.effort.turns,
                one.effort.edits, one.reward,
            )
            for one, _ in records.read(engine, objects, run)
        ]  # fmt: skip
    finally:
        engine.dispose()


def _amount(one: records.Record) -> float:
    graded = one.graded
    if graded is None or graded.terms is None or term.NAME not in graded.terms or term.NAME in graded.quarantined:
        return -1.0
    found = graded.findings.get(term.NAME)
    return found.amount if found else 0.0


def write(path: Path, rows: Iterable[Row]) -> None:
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    names = [field.name for field in fields(Row)]
    out.writerow(names)
    out.writerows([_written(getattr(row, name)) for name in names] for row in rows)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def _written(value: str | int | float | bool) -> str | int | float:
    if isinstance(value, bool):
        return int(value)
    return round(value, 4) if isinstance(value, float) else value


def load(path: Path) -> list[Row]:
    """Raises ValueError where the file holds no such table."""
    try:
        text = gzip.decompress(path.read_bytes()).decode()
        return [_row(line) for line in csv.DictReader(io.StringIO(text))]
    except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: no table of attempts: {error!r}") from None


def _row(line: dict[str, str]) -> Row:
    kinds = {"str": str, "int": int, "float": float, "bool": lambda text: text == "1"}
    return Row(**{field.name: kinds[str(field.type)](line[field.name]) for field in fields(Row)})


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows by group, in the order in which the groups were asked for."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.draw):
        found.setdefault(row.group, []).append(row)
    return found
