"""Worlds on a real ledger: what `quick` has, and trainers and schedulers that die, a second scheduler, commits whose answer is
lost, and a ledger that is put back to what it was.

The ledger is SQLite in memory, copied from a migrated one, so that a world costs tenths of a second. `history` is what happened,
one event a line, for whoever reads a failure.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import StaticPool

from services.scheduler.desk import Desk
from services.scheduler.store import Fenced, Store
from services.scheduler.working_set import WorkingSet
from shared.contracts import lineage
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.lineage import Fork
from shared.contracts.run import RunConfig, ScheduleConfig
from tests.unit.scheduler.ledgers import opened
from tests.unit.scheduler.quick import FROM_WORKERS, QuickWorld
from tests.unit.scheduler.world import REF, RUN, Sent

FAULTS = (
    "the trainer dies",
    "the scheduler dies before its commit",
    "the scheduler dies after its commit",
    "a second scheduler takes over",
    "the answer to a commit is lost",
    "a commit fails",
)
# Seconds. Nothing here takes so long, so what is lost is missed sooner.
PATIENT = {"attempt_s": 120.0, "grading_s": 60.0}
SILENT = (m.AttemptHeartbeat, m.ProblemAdmitted)


@cache
def _template() -> bytes:
    """A migrated, empty ledger."""
    with TemporaryDirectory() as folder, opened("sqlite", Path(folder)) as engine:
        with contextlib.closing(sqlite3.connect(str(engine.url.database))) as file:
            with contextlib.closing(sqlite3.connect(":memory:")) as memory:
                file.backup(memory)
                data = bytearray(memory.serialize())
    data[18:20] = b"\x01\x01"  # a database in memory has no write-ahead log
    return bytes(data)


@contextlib.contextmanager
def in_memory() -> Iterator[Engine]:
    """An empty ledger that nothing but this process sees."""
    raw = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    raw.deserialize(_template())
    raw.execute("PRAGMA foreign_keys=ON")
    engine = create_engine(
        "sqlite://",
        creator=lambda: raw,
        poolclass=StaticPool,
        json_serializer=lambda value: msgspec.json.encode(value).decode(),
        json_deserializer=msgspec.json.decode,
    )
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    with contextlib.closing(raw):
        yield engine


def _raw(engine: Engine) -> sqlite3.Connection:
    with engine.connect() as connection:
        raw = connection.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)
    return raw


class Unreliable(Store):
    """`fault`: what becomes of the next commit."""

    fault = ""

    def commit(self, sets: list[WorkingSet], *rest: Any) -> None:  # type: ignore[override]
        fault, self.fault = self.fault, ""
        if fault != "a commit fails":
            super().commit(sets, *rest)
        if fault:
            raise OperationalError("COMMIT", {}, Exception(fault))


@dataclass
class HarshWorld(QuickWorld):
    """`faults`: tick -> what goes wrong then. `restored`: the tick whose ledger comes back, and the tick at which it does. None:
    never. Nothing that was acknowledged in between comes again."""

    faults: dict[int, str] = field(default_factory=dict)
    restored: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.ticks, self.term = 0, 0
        self.upto: float | None = None
        self.forks: dict[int, Fork] = {}
        self.positions: dict[int, tuple[int, int]] = {}  # serial -> incarnation and step
        self.problem_of: dict[str, str] = {}
        self.nets: list[str] = []  # groups that the trainer had to set aside itself
        self.history: list[str] = []
        self.kept: bytes | None = None
        super().__post_init__()

    def note(self, what: str) -> None:
        self.history.append(f"{self.now:6.0f}  {what}")

    # The scheduler's process

    def new_desk(self) -> Any:
        self.term += 1
        with self.engine.begin() as connection:
            _lead(connection, self.term)
        return self._desk()

    def _desk(self) -> Desk:
        store = Unreliable(self.engine)
        return Desk(store, lambda ref: self.run_config, term=self.term, **PATIENT, **self.object_store())

    def tick(self, seconds: float = 1.0) -> None:
        self.ticks += 1
        if self.restored is not None and self.ticks == self.restored[0]:
            self.kept = _raw(self.engine).serialize()
        super().tick(seconds)
        if self.restored is None or self.kept is None:
            return
        if self.ticks == self.restored[1]:
            self.note(f"the ledger is put back to what it was at tick {self.restored[0]}")
            _raw(self.engine).deserialize(self.kept)
            self.restart()

    def schedule(self) -> None:
        unread = [*self.inbox, *self.delayed, *(sent for queue in self.late.values() for _, sent in queue)]
        said = [self.said_at[sent.offset] for sent in unread if sent.topic in FROM_WORKERS]
        fault = self.faults.get(self.ticks, "")
        if fault:
            self.note(fault)
        if fault == "the scheduler dies before its commit":
            return self.restart()
        batch = [self.inbox[i] for i in range(min(self.random.randint(1, 40), len(self.inbox)))]
        old = self.desk
        if fault == "a second scheduler takes over":
            self.restart()
        try:
            old.store.fault = fault if "commit" in fault and "dies" not in fault else ""  # type: ignore[attr-defined]
            result = old.handle(batch, self.now, self.marks, read_upto=min(said, default=self.now))
        except (
            OperationalError
        ):  # the same batch comes again; what was committed is fetched before it, as the service does
            return self.publish([one for _, one in old.store.pending() if one.sequence > self.marks.get(RUN, 0)])
        except Fenced:
            assert fault == "a second scheduler takes over", "nobody else leads"
            return None
        assert fault != "a second scheduler takes over" or not result.outbox, (
            "a scheduler that does not lead has written"
        )
        if fault == "the scheduler dies after its commit":
            return self.restart()
        for _ in batch:
            self.inbox.popleft()
        self.refused.extend(result.refused.values())
        self.publish([message for _, message in result.outbox])

    # What is said, for the history

    def send(self, topic: t.Topic, message: Any) -> None:
        if not isinstance(message, SILENT):
            self.note(f"-> {_short(message)}")
        super().send(topic, message)

    def publish(self, messages: list[Any]) -> None:
        for one in messages:
            self.note(f"<- {_short(one.message)}")
            if isinstance(one.message, m.GroupReady):
                self.problem_of[one.message.group] = one.message.problem
        super().publish(messages)

    # The trainer

    def begin_incarnation(self) -> None:
        self.forks[self.incarnation + 1] = Fork(self.incarnation, self.saved[0])
        super().begin_incarnation()

    def publish_policy(self) -> None:
        serial = self.serial if self.incarnation or self.step else 0
        self.positions[serial] = self.incarnation, self.step
        super().publish_policy()

    def age_of(self, version: int, step: int) -> int:
        return lineage.age(self.forks, self.incarnation, step, self.positions[version])

    def train(self) -> None:
        if self.faults.get(self.ticks) == "the trainer dies":
            return self.begin_incarnation()
        self._set_aside()
        before, incarnation = set(self.trained), self.incarnation
        super(QuickWorld, self).train()
        if self.incarnation != incarnation:
            return None
        for name in self.trained.keys() - before:
            for member in self.groups[name].members:
                truth = self.true[member.trajectory.key]
                if (truth.attempt, truth.epoch, truth.reward) != (member.attempt, member.epoch, member.reward):
                    self.mixed.append(member.attempt)
                self.true_ages += [self.age_of(version, self.step) for version in truth.versions]

    def _set_aside(self) -> None:
        """As the real trainer does, with what must not be trained."""
        bound = self.run_config.schedule.max_staleness
        done, taken = self.trained.keys() | self.aside, dict(self.practised)
        for ready in sorted((g for g in self.groups.values() if g.group not in done), key=lambda g: g.sequence):
            versions = [v for member in ready.members for v in self.true[member.trajectory.key].versions]
            late = max(self.age_of(v, self.step + 1) for v in versions) > bound
            if late or taken.setdefault(ready.problem, ready.group) != ready.group:
                self.nets.append(ready.group)
                self.note(f"the trainer sets {ready.group} aside: {'too old' if late else 'its problem was trained'}")
                self.quarantine(ready.group)


def _lead(connection: Connection, term: int) -> None:
    statement = "INSERT INTO lease (name, holder, term, renewals) VALUES ('scheduler', '', :term, 0)"
    connection.execute(text(f"{statement} ON CONFLICT (name) DO UPDATE SET term = :term"), {"term": term})


def _short(message: Any) -> str:
    """A message in a line: what it is about, and the numbers that matter."""
    parts = [type(message).__name__]
    if (key := getattr(message, "key", None)) is not None:
        parts.append(f"{key.attempt} epoch {key.epoch}")
    for name in ("attempt", "group", "groups", "action", "incarnation", "step", "serial", "replica", "mode", "again"):
        value = getattr(message, name, None)
        if value not in (None, ""):
            parts.append(f"{name} {sorted(value) if isinstance(value, dict) else value}")
    for name in ("reason", "what"):
        if getattr(message, name, ""):
            parts.append(repr(getattr(message, name)))
    if isinstance(message, m.RolloutFinished | m.RolloutScored):
        parts.append(f"{message.trajectory.key}, versions {message.oldest_version} to {message.newest_version}")
    return " ".join(parts)


def harsh(engine: Engine, seed: int, trouble: Any, **changed: Any) -> HarshWorld:
    defaults: dict[str, Any] = {"max_steps": 5, "group_size": 2, "group_min": 2, "groups_per_step": 2, "lease_s": 5.0}
    schedule = {**defaults, **{k: changed.pop(k) for k in list(changed) if k in ScheduleConfig.__struct_fields__}}
    config = RunConfig(run=RUN, base=REF, pack=REF, pack_hidden=REF, schedule=ScheduleConfig(**schedule))
    return HarshWorld(engine, config, seed=seed, trouble=trouble, problems=60, capacity=12, **changed)


__all__ = ["FAULTS", "HarshWorld", "Sent", "harsh", "in_memory"]
