"""The life of one attempt, from the ledger: every fact about it, about its group and about the steps that trained it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, or_, select

from shared.ledger.models import Attempt, Event, Trained


@dataclass(frozen=True, slots=True)
class Moment:
    """`at`: seconds, when the scheduler recorded it. `of`: what it happened to, in words."""

    sequence: int
    at: float
    kind: str
    of: str
    epoch: int
    data: dict[str, Any]


def runs_of(connection: Connection, attempt: str) -> list[str]:
    """The runs that know this attempt; attempts are named after their run, so more than one would be a wonder."""
    return list(connection.execute(select(Attempt.run_id).where(Attempt.attempt_id == attempt)).scalars())


def life(connection: Connection, run: str, attempt: str) -> list[Moment]:
    """In the ledger's order. Empty for an attempt that the run does not know."""
    group = connection.execute(
        select(Attempt.group_id).where(Attempt.run_id == run, Attempt.attempt_id == attempt)
    ).scalar()
    if group is None:
        return []
    trained = connection.execute(
        select(Trained.incarnation, Trained.step).where(Trained.run_id == run, Trained.group_id == group)
    ).all()
    steps = [
        and_(Event.kind == "step.committed", Event.subject == str(step), Event.epoch == incarnation)
        for incarnation, step in trained
    ]
    rows = connection.execute(
        select(Event.sequence, Event.at, Event.kind, Event.subject, Event.epoch, Event.data)
        .where(Event.run_id == run, or_(Event.subject.in_([attempt, group]), *steps))
        .order_by(Event.sequence)
    ).all()
    names = {attempt: "attempt", group: f"group {group}"}
    return [
        Moment(
            row.sequence,
            row.at,
            row.kind,
            names.get(row.subject, f"step {row.subject}"),
            row.epoch,
            _without_lists(row.data),
        )
        for row in rows
    ]


def _without_lists(data: dict[str, Any]) -> dict[str, Any]:
    """A step names all its groups and metrics; here only what concerns this attempt is of interest."""
    return {name: value for name, value in data.items() if not isinstance(value, list | dict)}
