"""The working set's structures as rows of the ledger's tables, and the bulk statements that write them."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql, sqlite

from services.scheduler.records import Attempt, Group, Head, Message, ReplicaState
from shared.contracts import codec
from shared.contracts.messages import RolloutScored
from shared.ledger import models

TABLES: dict[str, Any] = models.Base.metadata.tables


def head_row(head: Head) -> dict[str, Any]:
    return {f.name: getattr(head, f.name) for f in fields(Head)}


def group_row(run: str, group: Group) -> dict[str, Any]:
    return {
        "run_id": run,
        "group_id": group.id,
        "problem_id": group.problem,
        "number": group.number,
        "draw": group.draw,
        "state": group.state.value,
        "size": group.size,
        "reward_config": group.reward_config,
        "requested_at": group.requested_at,
        "closed_at": group.closed_at,
        "sequence": group.sequence,
        "announced": group.announced,
        "members": group.members,
        "solved": group.solved,
        "turns": group.turns,
        "thinking_tokens": group.thinking_tokens,
        "versions": group.versions,
        "step": group.step,
        "reason": group.reason,
    }


def attempt_row(run: str, attempt: Attempt) -> dict[str, Any]:
    return {
        "run_id": run,
        "attempt_id": attempt.id,
        "group_id": attempt.group,
        "place": attempt.place,
        "epoch": attempt.epoch,
        "state": attempt.state.value,
        "policy_floor": attempt.policy_floor,
        "oldest_version": attempt.oldest_version,
        "newest_version": attempt.newest_version,
        "worker": attempt.worker,
        "requested_at": attempt.requested_at,
        "claimed_at": attempt.claimed_at,
        "finished_at": attempt.finished_at,
        "cancelled_at": attempt.cancelled_at,
        "stop": attempt.stop,
        "seconds": attempt.seconds,
        "trajectory": attempt.trajectory,
        "effort": attempt.effort,
        "sampled": attempt.sampled,
        "grading_s": attempt.grading_s,
        "grade_at": attempt.grade_at,
        "asked_at": attempt.asked_at,
        "repeats": attempt.repeats,
        "gradings": attempt.gradings,
        "overtaken_at": attempt.overtaken_at,
        "reason": attempt.unusable or attempt.reason,
        "checkpoint": attempt.checkpoint,
    }


def verdict_row(scored: RolloutScored, now: float) -> dict[str, Any]:
    return {
        "run_id": scored.run,
        "attempt_id": scored.key.attempt,
        "epoch": scored.key.epoch,
        "reward": scored.reward,
        "solved": scored.verdict.solved,
        "verdict": scored.verdict,
        "terms": scored.terms,
        "reward_config": scored.reward_config,
        "scored_at": now,
    }


def replica_row(run: str, name: str, replica: ReplicaState) -> dict[str, Any]:
    return {"run_id": run, "replica": name, **{f.name: getattr(replica, f.name) for f in fields(ReplicaState)}}


def outbox_row(run: str, one: Message, now: float) -> dict[str, Any]:
    return {
        "run_id": run,
        "sequence": one.sequence,
        "topic": one.topic.name,
        "key": one.key,
        "message": codec.encode(one.topic, one.message)[0],
        "created_at": now,
        "published_at": None,
    }


# Statements. Made once: composing them costs more than running them.


@functools.cache
def _insert(table: str, dialect: str, once: tuple[str, ...] | None) -> Any:
    """INSERT that keeps the first of rows with equal `once` (None: equal primary key)."""
    key = once or tuple(column.name for column in TABLES[table].primary_key)
    return _dialect(dialect)(TABLES[table]).on_conflict_do_nothing(index_elements=key)


@functools.cache
def _upsert(table: str, dialect: str) -> Any:
    """INSERT that writes all columns of a row with an equal primary key anew."""
    key = tuple(column.name for column in TABLES[table].primary_key)
    insert = _dialect(dialect)(TABLES[table])
    changed = {column.name: insert.excluded[column.name] for column in TABLES[table].columns if column.name not in key}
    return insert.on_conflict_do_update(index_elements=key, set_=changed)


def _dialect(name: str) -> Any:
    return {"sqlite": sqlite.insert, "postgresql": postgresql.insert}[name]


def insert(connection: Connection, table: str, rows: list[dict[str, Any]], once: tuple[str, ...] | None = None) -> None:
    if rows:
        connection.execute(_insert(table, connection.dialect.name, once), rows)


def upsert(connection: Connection, table: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(_upsert(table, connection.dialect.name), rows)
