"""The tables, typed. What they promise: see `shared.ledger`. Everything is keyed by run.

Values of state columns are those of `shared.ledger.transitions`. `*_at` are seconds since 1970 (UTC); versions are serials.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKeyConstraint,
    Index,
    MetaData,
    UniqueConstraint,
    false,
    text,
    true,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from shared.contracts.life import RunState
from shared.contracts.messages import Effort, Verdict
from shared.contracts.run import Ref
from shared.ledger.transitions import AttemptState, GroupState
from shared.ledger.types import Json, PlainText, StructJson

NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMES)
    type_annotation_map = {str: PlainText(), int: BigInteger(), dict[str, Any]: Json, list[int]: Json}  # noqa: RUF012


def _one_of(column: str, states: type[StrEnum]) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(repr(s.value) for s in states)})", name=column)


class Run(Base):
    """`last_*` are the counters from which the next number of each sequence follows."""

    __tablename__ = "runs"
    __table_args__ = (_one_of("state", RunState),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    config: Mapped[Ref | None] = mapped_column(StructJson(Ref))  # its checksum is the configuration's hash
    code_version: Mapped[str]
    pack_hash: Mapped[str | None]
    incarnation: Mapped[int]  # of the surviving lineage; -1: no trainer has spoken yet
    created_at: Mapped[float]
    first_request_at: Mapped[float | None]
    clock_started_at: Mapped[float | None]  # the budget's clock runs since then; None: it stands
    spent_s: Mapped[float]  # on the budget's clock before that
    stopped_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    reason: Mapped[str]
    drain: Mapped[bool] = mapped_column(server_default=true())  # of a pause: the trainer trains what is complete
    last_event: Mapped[int]
    last_message: Mapped[int]  # of the outbox
    last_draw: Mapped[int]  # groups ever asked for
    last_ready: Mapped[int]  # groups ever announced: the ledger's order


class Pack(Base):
    __tablename__ = "packs"
    __table_args__ = (ForeignKeyConstraint(["run_id"], ["runs.run_id"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    pack_hash: Mapped[str] = mapped_column(primary_key=True)
    pack: Mapped[Ref] = mapped_column(StructJson(Ref))
    pack_hidden: Mapped[Ref] = mapped_column(StructJson(Ref))


class Problem(Base):
    __tablename__ = "problems"
    __table_args__ = (ForeignKeyConstraint(["run_id", "pack_hash"], ["packs.run_id", "packs.pack_hash"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    problem_id: Mapped[str] = mapped_column(primary_key=True)
    pack_hash: Mapped[str]
    category: Mapped[str]
    cell: Mapped[str]
    admitted_at: Mapped[float]


class Group(Base):
    """`number`: the how-manieth group of its problem. `sequence`: the ledger's order of ready groups."""

    __tablename__ = "groups"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "problem_id"], ["problems.run_id", "problems.problem_id"]),
        UniqueConstraint("run_id", "problem_id", "number"),
        UniqueConstraint("run_id", "sequence"),
        Index(
            "uq_groups_problem_alive",
            "run_id",
            "problem_id",
            unique=True,
            sqlite_where=text("state IN ('open', 'ready')"),
            postgresql_where=text("state IN ('open', 'ready')"),
        ),
        _one_of("state", GroupState),
        CheckConstraint("state <> 'ready' OR sequence IS NOT NULL", name="ready_is_ordered"),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    group_id: Mapped[str] = mapped_column(primary_key=True)
    problem_id: Mapped[str]
    number: Mapped[int]
    draw: Mapped[int]
    state: Mapped[str]
    size: Mapped[int]  # G
    reward_config: Mapped[str]
    requested_at: Mapped[float]
    closed_at: Mapped[float | None]
    sequence: Mapped[int | None]
    announced: Mapped[int | None]  # the incarnation that it was last announced to
    members: Mapped[int]  # survivors, 0 while open
    solved: Mapped[int]  # of the members
    turns: Mapped[float]  # mean per member
    thinking_tokens: Mapped[float]  # mean per member
    versions: Mapped[list[int]]  # serials that the members' tokens may have
    step: Mapped[int]  # of the surviving lineage when it closed
    reason: Mapped[str]


class Attempt(Base):
    __tablename__ = "attempts"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "group_id"], ["groups.run_id", "groups.group_id"]),
        UniqueConstraint("run_id", "group_id", "place"),
        _one_of("state", AttemptState),
        CheckConstraint("epoch >= 0", name="epoch"),
        CheckConstraint(
            "state NOT IN ('finished', 'scored', 'grouped') OR trajectory IS NOT NULL", name="finished_has_trajectory"
        ),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt_id: Mapped[str] = mapped_column(primary_key=True)
    group_id: Mapped[str]
    place: Mapped[int]  # in the group
    epoch: Mapped[int]
    state: Mapped[str]
    policy_floor: Mapped[int]
    oldest_version: Mapped[int | None]  # of its sampled tokens so far; None: no token yet
    newest_version: Mapped[int | None]  # of its sampled tokens; None: not finished
    worker: Mapped[str]
    requested_at: Mapped[float]  # of this epoch, as all that follows
    claimed_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    cancelled_at: Mapped[float | None]
    stop: Mapped[str | None]
    seconds: Mapped[float | None]
    trajectory: Mapped[Ref | None] = mapped_column(StructJson(Ref))
    effort: Mapped[Effort | None] = mapped_column(StructJson(Effort))
    sampled: Mapped[int | None]  # the epoch that the trajectory is of; None: the epoch in force
    grading_s: Mapped[float]  # how long grading may take; 0: as long as any
    grade_at: Mapped[float | None]  # when it is to be graded again; None: nobody said that grading failed
    asked_at: Mapped[float] = mapped_column(server_default="0")  # when its request or its grading was last repeated
    repeats: Mapped[int] = mapped_column(server_default="0")  # of its request
    gradings: Mapped[int] = mapped_column(server_default="0")  # times that it was to be graded again
    overtaken_at: Mapped[float | None]  # since when a rollout that finished later has its verdict; None: none has
    reason: Mapped[str]
    checkpoint: Mapped[Ref | None] = mapped_column(StructJson(Ref))  # that its next epoch continues from; None: none


class VerdictRow(Base):
    """Insert-only: the first verdict recorded wins."""

    __tablename__ = "verdicts"
    __table_args__ = (ForeignKeyConstraint(["run_id", "attempt_id"], ["attempts.run_id", "attempts.attempt_id"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    attempt_id: Mapped[str] = mapped_column(primary_key=True)
    epoch: Mapped[int]
    reward: Mapped[float]
    solved: Mapped[bool]
    verdict: Mapped[Verdict] = mapped_column(StructJson(Verdict))
    terms: Mapped[dict[str, Any]]
    reward_config: Mapped[str]
    scored_at: Mapped[float]


class Incarnation(Base):
    """A trainer's life: it continued `parent` from `step`. Primary key: claimed once."""

    __tablename__ = "incarnations"
    __table_args__ = (ForeignKeyConstraint(["run_id"], ["runs.run_id"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    incarnation: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int]
    parent: Mapped[int]
    started_at: Mapped[float]


class Step(Base):
    __tablename__ = "steps"
    __table_args__ = (ForeignKeyConstraint(["run_id"], ["runs.run_id"]), UniqueConstraint("run_id", "serial"))

    run_id: Mapped[str] = mapped_column(primary_key=True)
    incarnation: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    serial: Mapped[int]
    committed_at: Mapped[float]
    metrics: Mapped[dict[str, Any]]


class Trained(Base):
    """The fact that `step` of `incarnation` trained a group. Never changed, never deleted."""

    __tablename__ = "trained"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "group_id"], ["groups.run_id", "groups.group_id"]),
        ForeignKeyConstraint(["run_id", "incarnation", "step"], ["steps.run_id", "steps.incarnation", "steps.step"]),
        Index("ix_trained_step", "run_id", "incarnation", "step"),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    group_id: Mapped[str] = mapped_column(primary_key=True)
    incarnation: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int]
    reported_age: Mapped[int]  # by the trainer


class Policy(Base):
    __tablename__ = "policies"
    __table_args__ = (ForeignKeyConstraint(["run_id"], ["runs.run_id"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    serial: Mapped[int] = mapped_column(primary_key=True)
    incarnation: Mapped[int]
    step: Mapped[int]
    parent: Mapped[int]
    manifest: Mapped[Ref] = mapped_column(StructJson(Ref))
    published_at: Mapped[float]


class Replica(Base):
    """The last word of each inference replica, until it is held to be gone."""

    __tablename__ = "replicas"
    __table_args__ = (ForeignKeyConstraint(["run_id"], ["runs.run_id"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    replica: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str]
    serial: Mapped[int]
    ok: Mapped[bool]
    url: Mapped[str]
    pause_s: Mapped[float]
    applied_at: Mapped[float]
    reason: Mapped[str]
    damaged: Mapped[bool] = mapped_column(server_default=false())
    serving: Mapped[int] = mapped_column(server_default="-1")


class Event(Base):
    """Append-only. `sequence` strictly increases within a run; (kind, subject, epoch) is a fact and recorded once."""

    __tablename__ = "events"
    __table_args__ = (
        ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
        UniqueConstraint("run_id", "subject", "kind", "epoch"),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    kind: Mapped[str]
    subject: Mapped[str]
    epoch: Mapped[int]
    data: Mapped[dict[str, Any]]


class OutboxRow(Base):
    """Published in the order of `sequence`, per run; `published_at` is set once the bus has it."""

    __tablename__ = "outbox"
    __table_args__ = (
        ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
        Index(
            "ix_outbox_pending",
            "run_id",
            "sequence",
            sqlite_where=text("published_at IS NULL"),
            postgresql_where=text("published_at IS NULL"),
        ),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True)
    topic: Mapped[str]
    key: Mapped[str]
    message: Mapped[bytes]
    created_at: Mapped[float]
    published_at: Mapped[float | None]


class InboxRow(Base):
    """Messages of `runs.commands` and of `alerts` that were handled. The digest keeps a log that was made anew apart from the old
    one."""

    __tablename__ = "inbox"
    __table_args__ = (ForeignKeyConstraint(["run_id"], ["runs.run_id"]),)

    run_id: Mapped[str] = mapped_column(primary_key=True)
    topic: Mapped[str] = mapped_column(primary_key=True)
    offset: Mapped[int] = mapped_column("position", primary_key=True)
    digest: Mapped[str] = mapped_column(primary_key=True)


class LeaseRow(Base):
    """One row per name. `term` counts the holders: a transaction of an older term is refused. `renewals` moves while the
    holder lives; a waiting one watches it on its own clock, so that clocks of two machines need not agree."""

    __tablename__ = "lease"

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str]
    term: Mapped[int]
    renewals: Mapped[int]


class ListeningRow(Base):
    """One row per name. `state`: how long the last scheduler has listened (services/scheduler/listening.py)."""

    __tablename__ = "listening"

    name: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[dict[str, Any]]
