"""The ledger as the scheduler reads and writes it: a run into a working set, a batch of changes into one transaction.

Core statements in bulk. Every transaction checks that this process still leads (`Fenced`), so that a scheduler that was
thought dead cannot write beside its successor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import Connection, Engine, Table, select, update
from sqlalchemy.dialects import postgresql, sqlite

from services.scheduler.hardness import Outcome
from services.scheduler.lineage import Fork
from services.scheduler.working_set import (
    Attempt,
    Group,
    Head,
    Message,
    ReplicaState,
    WorkingSet,
    returns,
)
from shared.contracts import codec
from shared.contracts.messages import RolloutScored
from shared.contracts.topics import TOPICS
from shared.ledger import models
from shared.ledger.transitions import AttemptState, GroupState, RunState

LEASE = "scheduler"
_tables: dict[str, Any] = models.Base.metadata.tables
# Insert-only tables in the order of their references. A repeated fact is the same fact.
_FACTS = ("packs", "problems", "incarnations", "policies", "steps", "trained", "inbox")


class Fenced(RuntimeError):
    """Another scheduler leads now: this transaction was refused and nothing was written."""


class Store:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    # Reading

    def active(self) -> list[str]:
        """Runs that are not over, oldest first."""
        runs = _tables["runs"]
        with self.engine.begin() as connection:
            query = select(runs.c.run_id).where(runs.c.state != RunState.finished.value).order_by(runs.c.created_at)
            return [row.run_id for row in connection.execute(query)]

    def load(self, run: str, now: float) -> WorkingSet | None:
        """None: the ledger has not heard of this run. `now`: leases begin anew."""
        with self.engine.begin() as connection:
            row = _one(connection, "runs", run)
            if row is None:
                return None
            head = Head(**{f.name: row[f.name] for f in fields(Head)})
            head.state = RunState(head.state)
            ws = WorkingSet(head)
            _load_trainer(connection, ws)
            _load_problems(connection, ws)
            _load_groups(connection, ws)
            _load_open(connection, ws, now)
        ws.last_work_at = now
        return ws

    def gone(self, run: str, attempts: Iterable[str]) -> dict[str, int]:
        """Of these attempts, those that the ledger knows, with their epoch."""
        wanted = sorted(set(attempts))
        table = _tables["attempts"]
        known: dict[str, int] = {}
        with self.engine.begin() as connection:
            for start in range(0, len(wanted), 500):
                query = select(table.c.attempt_id, table.c.epoch).where(
                    table.c.run_id == run, table.c.attempt_id.in_(wanted[start : start + 500])
                )
                known.update({row.attempt_id: row.epoch for row in connection.execute(query)})
        return known

    def load_members(self, ws: WorkingSet, groups: Sequence[Group], now: float) -> None:
        """The attempts of complete groups, which the working set does not keep, for announcing them again."""
        with self.engine.begin() as connection:
            for start in range(0, len(groups), 200):
                some = {g.id: g for g in groups[start : start + 200]}
                for group in some.values():
                    group.attempts = []
                for attempt in _attempts(connection, ws.id, list(some), now):
                    some[attempt.group].attempts.append(attempt)

    def handled(self, run: str, topic: str, offset: int, digest: str) -> bool:
        """Whether this message of `topic` was handled before."""
        t = _tables["inbox"]
        with self.engine.begin() as connection:
            query = select(t.c.position).where(
                t.c.run_id == run, t.c.topic == topic, t.c.position == offset, t.c.digest == digest
            )
            return connection.execute(query).first() is not None

    def pending(self) -> list[tuple[str, Message]]:
        """Messages that were committed and perhaps not published, in their order per run."""
        t = _tables["outbox"]
        query = select(t).where(t.c.published_at.is_(None)).order_by(t.c.run_id, t.c.sequence)
        with self.engine.begin() as connection:
            rows = connection.execute(query).all()
        found = []
        for row in rows:
            topic = TOPICS[row.topic]
            _, headers = _schema(topic.name)
            found.append((row.run_id, Message(row.sequence, topic, row.key, codec.decode(topic, row.message, headers))))
        return found

    # Writing

    def commit(self, sets: Sequence[WorkingSet], published: dict[str, int], now: float, term: int | None) -> None:
        """One transaction: all changes of these runs, and the outbox marked as published up to a sequence per run.
        Raises Fenced. Afterwards the changes are the caller's to forget."""
        with self.engine.begin() as connection:
            _check_term(connection, term)
            for ws in sets:
                self._write(connection, ws, now)
            outbox = _tables["outbox"]
            for run, upto in published.items():
                connection.execute(
                    update(outbox)
                    .where(outbox.c.run_id == run, outbox.c.sequence <= upto, outbox.c.published_at.is_(None))
                    .values(published_at=now)
                )

    def prune(self, before: float, term: int | None) -> None:
        """Forgets messages published before this time: what they said is in the events."""
        outbox = _tables["outbox"]
        with self.engine.begin() as connection:
            _check_term(connection, term)
            connection.execute(outbox.delete().where(outbox.c.published_at < before))

    def _write(self, connection: Connection, ws: WorkingSet, now: float) -> None:
        changes = ws.changes
        head = {f.name: getattr(ws.head, f.name) for f in fields(Head)}
        _upsert(connection, _tables["runs"], ("run_id",), [head])
        for name in _FACTS:
            _bulk(connection, _tables[name], changes.rows.get(name, []))
        _upsert(
            connection,
            _tables["groups"],
            ("run_id", "group_id"),
            [_group_row(ws.id, group) for group in changes.groups.values()],
        )
        _upsert(
            connection,
            _tables["attempts"],
            ("run_id", "attempt_id"),
            [_attempt_row(ws.id, attempt) for attempt in changes.attempts.values()],
        )
        _bulk(connection, _tables["verdicts"], [_verdict_row(scored, now) for scored in changes.verdicts])
        _upsert(
            connection,
            _tables["replicas"],
            ("run_id", "replica"),
            [_replica_row(ws.id, name, ws.replicas[name]) for name in sorted(changes.replicas)],
        )
        _bulk(connection, _tables["events"], changes.events, ("run_id", "subject", "kind", "epoch"))
        if changes.outbox:
            rows = [
                {
                    "run_id": ws.id,
                    "sequence": one.sequence,
                    "topic": one.topic.name,
                    "key": one.key,
                    "message": codec.encode(one.topic, one.message)[0],
                    "created_at": now,
                    "published_at": None,
                }
                for one in changes.outbox
            ]
            connection.execute(_tables["outbox"].insert(), rows)


# Rows


def _schema(topic: str) -> tuple[str, dict[str, str]]:
    return topic, {codec.SCHEMA_HEADER: f"{topic}/{codec.MAJOR}.{codec.MINOR}"}


def _group_row(run: str, group: Group) -> dict[str, Any]:
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
        "oldest_versions": group.oldest_versions,
        "step": group.step,
        "reason": group.reason,
    }


def _attempt_row(run: str, attempt: Attempt) -> dict[str, Any]:
    return {
        "run_id": run,
        "attempt_id": attempt.id,
        "group_id": attempt.group,
        "place": attempt.place,
        "epoch": attempt.epoch,
        "state": attempt.state.value,
        "policy_floor": attempt.policy_floor,
        "oldest_version": attempt.oldest_version,
        "worker": attempt.worker,
        "requested_at": attempt.requested_at,
        "claimed_at": attempt.claimed_at,
        "finished_at": attempt.finished_at,
        "cancelled_at": attempt.cancelled_at,
        "stop": attempt.stop,
        "seconds": attempt.seconds,
        "trajectory": attempt.trajectory,
        "effort": attempt.effort,
        "reason": attempt.reason,
    }


def _verdict_row(scored: RolloutScored, now: float) -> dict[str, Any]:
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


def _replica_row(run: str, name: str, replica: ReplicaState) -> dict[str, Any]:
    return {"run_id": run, "replica": name, **{f.name: getattr(replica, f.name) for f in fields(ReplicaState)}}


# Statements


def _insert(connection: Connection, table: Table) -> Any:
    """INSERT with ON CONFLICT, in the words of this database."""
    return {"sqlite": sqlite.insert, "postgresql": postgresql.insert}[connection.dialect.name](table)


def _upsert(connection: Connection, table: Table, key: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    insert = _insert(connection, table)
    changed = {name: insert.excluded[name] for name in rows[0] if name not in key}
    connection.execute(insert.on_conflict_do_update(index_elements=key, set_=changed), rows)


def _bulk(
    connection: Connection, table: Table, rows: list[dict[str, Any]], once: tuple[str, ...] | None = None
) -> None:
    """Inserts; of rows with equal `once` (default: the primary key) the first stays."""
    if rows:
        key = once or tuple(column.name for column in table.primary_key)
        connection.execute(_insert(connection, table).on_conflict_do_nothing(index_elements=key), rows)


def _check_term(connection: Connection, term: int | None) -> None:
    """`term` None: a caller that needs no leadership, such as a test of the store alone."""
    if term is None:
        return
    lease = _tables["lease"]
    query = select(lease.c.term).where(lease.c.name == LEASE).with_for_update(read=True)
    held = connection.execute(query).scalar_one_or_none()
    if held != term:
        raise Fenced(f"term {term} is over: the lease is at term {held}")


# Loading


def _one(connection: Connection, table: str, run: str) -> Any:
    t = _tables[table]
    return connection.execute(select(t).where(t.c.run_id == run)).mappings().first()


def _all(connection: Connection, table: str, run: str, *order: str) -> list[Any]:
    t = _tables[table]
    return list(connection.execute(select(t).where(t.c.run_id == run).order_by(*[t.c[name] for name in order])))


def _load_trainer(connection: Connection, ws: WorkingSet) -> None:
    ws.start_lineage([Fork(r.incarnation, r.step, r.parent) for r in _all(connection, "incarnations", ws.id)])
    for r in _all(connection, "policies", ws.id, "serial"):
        ws.policies[r.serial] = (r.incarnation, r.step, r.published_at)
    for r in _all(connection, "replicas", ws.id):
        ws.replicas[r.replica] = ReplicaState(r.pool, r.serial, r.ok, r.url, r.pause_s, r.applied_at, r.reason)
    ws.tip = ws.lineage.start
    for r in _all(connection, "steps", ws.id, "committed_at", "step"):
        ws.steps[r.incarnation, r.step] = r.serial
        if ws.lineage.survives(r.incarnation, r.step):
            ws.commits.append(r.committed_at)
            ws.tip = max(ws.tip, r.step)
    for r in _all(connection, "trained", ws.id):
        if ws.lineage.survives(r.incarnation, r.step):
            ws.trained.add(r.group_id)


def _load_problems(connection: Connection, ws: WorkingSet) -> None:
    for r in _all(connection, "packs", ws.id):
        ws.packs[r.pack_hash] = (r.pack, r.pack_hidden)
    rows = _all(connection, "problems", ws.id, "problem_id")
    ws.catalogue.add([(r.problem_id, r.category, r.cell, r.pack_hash) for r in rows])


def _load_groups(connection: Connection, ws: WorkingSet) -> None:
    """Open groups without their attempts, waiting groups, and of all others what counts and what they taught."""
    ready = []
    for r in _all(connection, "groups", ws.id, "problem_id", "number"):
        group = Group(
            id=r.group_id,
            problem=r.problem_id,
            number=r.number,
            draw=r.draw,
            size=r.size,
            reward_config=r.reward_config,
            requested_at=r.requested_at,
            state=GroupState(r.state),
            closed_at=r.closed_at,
            sequence=r.sequence,
            announced=r.announced,
            members=r.members,
            solved=r.solved,
            turns=r.turns,
            thinking_tokens=r.thinking_tokens,
            oldest_versions=list(r.oldest_versions),
            step=r.step,
            reason=r.reason,
        )
        ws.catalogue.numbers[ws.catalogue.index[group.problem]] = group.number + 1
        if group.id in ws.trained or not returns(group.state, group.announced, group.number):
            ws.catalogue.take(group.problem)
        else:
            ws.catalogue.give_back(group.problem)
        if group.sequence is not None:
            ws.announced[group.id] = group.problem
            ready.append(group)
        if group.state is GroupState.open:
            ws.open[group.id] = group
    for group in sorted(ready, key=lambda g: g.sequence or 0):
        category, cell = ws.catalogue.kind(group.problem)
        ws.hardness.observe(
            Outcome(category, cell, group.members, group.solved, group.turns, group.thinking_tokens, group.step)
        )
        if group.state is GroupState.ready and group.id not in ws.trained:
            ws.waiting[group.id] = group


def _load_open(connection: Connection, ws: WorkingSet, now: float) -> None:
    config = ws.head.config
    if config is None and ws.open:
        raise RuntimeError(f"run {ws.id!r}: the ledger has open groups and no configuration; it is damaged")
    names = list(ws.open)
    for start in range(0, len(names), 200):
        for attempt in _attempts(connection, ws.id, names[start : start + 200], now):
            ws.attempts[attempt.id] = attempt
            ws.open[attempt.group].attempts.append(attempt)


def _attempts(connection: Connection, run: str, groups: list[str], now: float) -> list[Attempt]:
    a, v = _tables["attempts"], _tables["verdicts"]
    query = (
        select(a, v.c.reward, v.c.solved)
        .outerjoin(v, (v.c.run_id == a.c.run_id) & (v.c.attempt_id == a.c.attempt_id))
        .where(a.c.run_id == run, a.c.group_id.in_(groups))
        .order_by(a.c.group_id, a.c.place)
    )
    return [
        Attempt(
            id=r.attempt_id,
            group=r.group_id,
            place=r.place,
            epoch=r.epoch,
            state=AttemptState(r.state),
            policy_floor=r.policy_floor,
            requested_at=r.requested_at,
            heard_at=now,
            oldest_version=r.oldest_version,
            worker=r.worker,
            claimed_at=r.claimed_at,
            finished_at=r.finished_at,
            cancelled_at=r.cancelled_at,
            stop=r.stop,
            seconds=r.seconds,
            trajectory=r.trajectory,
            effort=r.effort,
            reason=r.reason,
            reward=r.reward,
            solved=bool(r.solved),
        )
        for r in connection.execute(query)
    ]
