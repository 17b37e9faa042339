"""The ledger as the scheduler reads and writes it: a run into a working set, a batch of changes into one transaction.

Core statements in bulk. Every transaction checks that this process still leads (`Fenced`), so that a scheduler that was
thought dead cannot write beside its successor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Engine, bindparam, func, select, update

from services.scheduler import loading, rows
from services.scheduler.records import Group, Message
from services.scheduler.rows import TABLES
from services.scheduler.working_set import WorkingSet
from shared.contracts import codec
from shared.contracts.life import RunState
from shared.contracts.topics import TOPICS
from shared.ledger import unhurried

LEASE = "scheduler"
# Insert-only tables in the order of their references. A repeated fact is the same fact.
_FACTS = ("packs", "problems", "incarnations", "policies", "steps", "trained", "inbox")

# Statements of every transaction, made once: composing them costs more than running them.
_OUTBOX, _LEASE, _LISTENING = TABLES["outbox"], TABLES["lease"], TABLES["listening"]
_MARK = (
    update(_OUTBOX)
    .where(
        _OUTBOX.c.run_id == bindparam("of_run"),
        _OUTBOX.c.sequence <= bindparam("upto"),
        _OUTBOX.c.published_at.is_(None),
    )
    .values(published_at=bindparam("at"))
)
_REPLICAS = TABLES["replicas"]
_FORGET = _REPLICAS.delete().where(_REPLICAS.c.run_id == bindparam("of_run"), _REPLICAS.c.replica == bindparam("name"))
_TERM = select(_LEASE.c.term).where(_LEASE.c.name == LEASE).with_for_update(read=True)


class Fenced(RuntimeError):
    """Another scheduler leads now: this transaction was refused and nothing was written."""


class Store:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    # Reading

    def active(self) -> list[str]:
        """Runs that are not over, oldest first."""
        runs = TABLES["runs"]
        with self.engine.begin() as connection:
            query = select(runs.c.run_id).where(runs.c.state != RunState.finished.value).order_by(runs.c.created_at)
            return [row.run_id for row in connection.execute(query)]

    def load(self, run: str, now: float, before: WorkingSet | None = None) -> WorkingSet | None:
        """None: the ledger has not heard of this run. `now`, `before`: see `loading.load`."""
        with self.engine.begin() as connection:
            unhurried(connection)
            return loading.load(connection, run, now, before)

    def gone(self, run: str, attempts: Iterable[str]) -> dict[str, int]:
        """Of these attempts, those that the ledger knows, with their epoch."""
        wanted = sorted(set(attempts))
        table = TABLES["attempts"]
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
                for attempt in loading.attempts_of(connection, ws.id, list(some), now):
                    some[attempt.group].attempts.append(attempt)

    def handled(self, run: str, topic: str, offset: int, digest: str) -> bool:
        """Whether this message of `topic` was handled before."""
        t = TABLES["inbox"]
        with self.engine.begin() as connection:
            query = select(t.c.position).where(
                t.c.run_id == run, t.c.topic == topic, t.c.position == offset, t.c.digest == digest
            )
            return connection.execute(query).first() is not None

    def newest(self) -> float:
        """The latest time that was entered; 0: nothing was yet. What was said stays in the outbox for an hour."""
        events, runs, outbox = TABLES["events"], TABLES["runs"], TABLES["outbox"]
        last = (runs.c.run_id == events.c.run_id) & (runs.c.last_event == events.c.sequence)
        with self.engine.begin() as connection:
            entered = connection.execute(select(func.max(events.c.at)).select_from(runs.join(events, last))).scalar()
            said = connection.execute(select(func.max(outbox.c.created_at))).scalar()
        return max(entered or 0.0, said or 0.0)

    def pending(self) -> list[tuple[str, Message]]:
        """Messages that were committed and perhaps not published, in their order per run."""
        t = TABLES["outbox"]
        query = select(t).where(t.c.published_at.is_(None)).order_by(t.c.run_id, t.c.sequence)
        with self.engine.begin() as connection:
            messages = connection.execute(query).all()
        found = []
        for row in messages:
            topic = TOPICS[row.topic]
            headers = {codec.SCHEMA_HEADER: f"{topic.name}/{codec.MAJOR}.{codec.MINOR}"}
            found.append((row.run_id, Message(row.sequence, topic, row.key, codec.decode(topic, row.message, headers))))
        return found

    def listening(self) -> dict[str, Any] | None:
        """Return how long the last scheduler has listened (`Listening.state`). None: nobody has written that down yet."""
        with self.engine.begin() as connection:
            return connection.execute(select(_LISTENING.c.state).where(_LISTENING.c.name == LEASE)).scalar()

    # Writing

    def commit(
        self,
        sets: Sequence[WorkingSet],
        published: dict[str, int],
        now: float,
        term: int | None,
        listening: dict[str, Any] | None = None,
    ) -> None:
        """One transaction: all changes of these runs, the outbox marked as published up to a sequence per run, and how long
        this scheduler has listened (`Listening.state`; None: as it was). Raises Fenced. Afterwards the changes are the
        caller's to forget."""
        with self.engine.begin() as connection:
            _check_term(connection, term)
            for ws in sets:
                self._write(connection, ws, now)
            for run, upto in published.items():
                connection.execute(_MARK, {"of_run": run, "upto": upto, "at": now})
            if listening is not None:
                rows.upsert(connection, "listening", [{"name": LEASE, "state": listening}])

    def prune(self, before: float, term: int | None) -> None:
        """Forgets messages published before this time: what they said is in the events."""
        outbox = TABLES["outbox"]
        with self.engine.begin() as connection:
            _check_term(connection, term)
            connection.execute(outbox.delete().where(outbox.c.published_at < before))

    def _write(self, connection: Connection, ws: WorkingSet, now: float) -> None:
        changes, run = ws.changes, ws.id
        rows.upsert(connection, "runs", [rows.head_row(ws.head)])
        for table in _FACTS:
            rows.insert(connection, table, changes.rows.get(table, []))
        rows.upsert(connection, "groups", [rows.group_row(run, group) for group in changes.groups.values()])
        rows.upsert(connection, "attempts", [rows.attempt_row(run, attempt) for attempt in changes.attempts.values()])
        rows.insert(connection, "verdicts", [rows.verdict_row(scored, now) for scored in changes.verdicts])
        there, gone = sorted(changes.replicas & ws.replicas.keys()), sorted(changes.replicas - ws.replicas.keys())
        rows.upsert(connection, "replicas", [rows.replica_row(run, name, ws.replicas[name]) for name in there])
        if gone:
            connection.execute(_FORGET, [{"of_run": run, "name": name} for name in gone])
        rows.insert(connection, "events", changes.events, ("run_id", "subject", "kind", "epoch"))
        if changes.outbox:
            connection.execute(TABLES["outbox"].insert(), [rows.outbox_row(run, one, now) for one in changes.outbox])


def _check_term(connection: Connection, term: int | None) -> None:
    """`term` None: a caller that needs no leadership, such as a test of the store alone."""
    if term is None:
        return
    held = connection.execute(_TERM).scalar_one_or_none()
    if held != term:
        raise Fenced(f"term {term} is over: the lease is at term {held}")
