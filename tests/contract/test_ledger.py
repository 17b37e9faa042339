"""The ledger's own promises, held by the database: the same on SQLite, on PostgreSQL, and through a pooler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from shared import ledger
from shared.contracts.codec import SCHEMA_HEADER, decode
from shared.contracts.life import RunState
from shared.contracts.messages import RunStatus, Verdict
from shared.contracts.run import Ref
from shared.contracts.topics import RUNS_STATE
from shared.ledger import models
from shared.ledger.migrate import HEAD
from shared.ledger.transitions import GROUP_MOVES, AttemptState, GroupState, Place, may_become
from tests.unit.scheduler.ledgers import ALL, ledger_url, opened, unguarded

REF = Ref(key="k", size=3, checksum="c" * 32)
T: dict[str, Any] = models.Base.metadata.tables
RUN = {
    "run_id": "r", "state": "running", "config": REF, "code_version": "", "incarnation": 0, "created_at": 0.0, "spent_s": 0.0,
    "reason": "", "last_event": 0, "last_message": 0, "last_draw": 0, "last_ready": 0,
}  # fmt: skip
GROUP = {
    "run_id": "r", "group_id": "g", "problem_id": "p", "number": 0, "draw": 1, "state": "open", "size": 2, "sequence": None,
    "reward_config": "default", "requested_at": 0.0, "members": 0, "solved": 0, "turns": 0.0, "thinking_tokens": 0.0,
    "versions": [], "step": 0, "reason": "",
}  # fmt: skip
ATTEMPT = {
    "run_id": "r", "attempt_id": "a", "group_id": "g", "place": 0, "epoch": 0, "state": "requested", "policy_floor": 0,
    "worker": "", "requested_at": 0.0, "reason": "",
}  # fmt: skip
VERDICT = {
    "run_id": "r", "attempt_id": "a", "epoch": 0, "reward": 1.0, "solved": True, "terms": {},
    "verdict": Verdict(solved=True, passed=1, total=1), "reward_config": "default", "scored_at": 0.0,
}  # fmt: skip
STEP = {"run_id": "r", "incarnation": 0, "step": 1, "serial": 1, "committed_at": 0.0, "metrics": {}}
FACT = {"run_id": "r", "group_id": "g", "incarnation": 0, "step": 1, "reported_age": 0}
BACK_TO_0004 = (
    "ALTER TABLE replicas DROP COLUMN damaged",
    "ALTER TABLE replicas DROP COLUMN serving",
    "ALTER TABLE attempts DROP COLUMN sampled",
    "ALTER TABLE attempts DROP COLUMN grading_s",
    "ALTER TABLE attempts DROP COLUMN grade_at",
    *(
        f"ALTER TABLE attempts DROP COLUMN {name}"
        for name in ("checkpoint", "asked_at", "repeats", "gradings", "overtaken_at")
    ),
    "DROP TABLE listening",
)
EVENT = {"run_id": "r", "sequence": 1, "at": 0.0, "kind": "k", "subject": "s", "epoch": 0, "data": {}}


@pytest.fixture(params=ALL)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    with opened(request.param, tmp_path) as engine:
        put(engine, runs=RUN, packs={"run_id": "r", "pack_hash": "h", "pack": REF, "pack_hidden": REF})
        put(
            engine,
            problems={"run_id": "r", "problem_id": "p", "pack_hash": "h", "category": "", "cell": "", "admitted_at": 0},
        )
        put(engine, groups=GROUP, attempts=ATTEMPT)
        yield engine


def put(engine: Engine, **rows: dict[str, Any]) -> None:
    with engine.begin() as connection:
        for table, row in rows.items():
            connection.execute(insert(T[table]).values(row))


def refused(engine: Engine, **rows: dict[str, Any]) -> bool:
    try:
        put(engine, **rows)
    except IntegrityError:
        return True
    return False


def test_the_migrations_make_exactly_the_tables_of_the_models(engine: Engine) -> None:
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, models.Base.metadata) == []


def test_the_newest_migration_is_the_one_that_the_code_reads() -> None:
    versions = Path(models.__file__).parent / "migrations" / "versions"
    assert max(path.name[:4] for path in versions.glob("[0-9]*.py")) == HEAD


def test_migrating_again_changes_nothing(engine: Engine) -> None:
    ledger.upgrade(engine)
    ledger.require_current(engine)


def test_a_ledger_of_the_first_release_is_brought_up_with_its_rows(engine: Engine) -> None:
    unguarded(engine)
    with engine.begin() as connection:
        for statement in (
            "UPDATE groups SET versions = '[3, 5]'",
            "ALTER TABLE groups RENAME COLUMN versions TO oldest_versions",
            "ALTER TABLE attempts DROP COLUMN newest_version",
            "ALTER TABLE runs DROP COLUMN drain",
            *BACK_TO_0004,
            "UPDATE alembic_version SET version_num = '0001'",
        ):
            connection.execute(text(statement))
    with pytest.raises(ledger.LedgerOutdated):
        ledger.require_current(engine)
    ledger.upgrade(engine)
    ledger.require_current(engine)
    with engine.begin() as connection:
        assert connection.execute(select(T["groups"].c.versions)).scalars().all() == [[3, 5]]
        assert connection.execute(select(T["attempts"].c.newest_version)).scalars().all() == [None]
        assert connection.execute(select(T["runs"].c.drain)).scalars().all() == [True]


def test_runs_of_before_are_announced_to_the_services_of_this_release(engine: Engine) -> None:
    put(engine, runs=RUN | {"run_id": "r-none", "config": None})
    configured = {"run_id": "r", "subject": "", "epoch": 0, "data": {}}
    for sequence, (kind, at) in enumerate((("run.configured", 5.0), (f"run.{RUN['state']}", 7.0)), 100):
        put(engine, events=configured | {"sequence": sequence, "kind": kind, "at": at})
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0008'"))
    ledger.upgrade(engine)
    with engine.begin() as connection:
        (row,) = connection.execute(select(T["outbox"])).all()
        last = connection.execute(select(T["runs"].c.last_message).where(T["runs"].c.run_id == "r")).scalar()
    status = decode(RUNS_STATE, row.message, {SCHEMA_HEADER: "runs.state/1.0"})
    assert status == RunStatus(
        run="r",
        state=RunState(RUN["state"]),
        number=7000,
        configs=[RUN["config"]],
        started=5.0,
        since=7.0,
        reason=RUN["reason"],
    )
    assert (row.topic, row.key, row.sequence, row.published_at) == ("runs.state", "r", last, None)


def test_a_ledger_without_guards_gets_them_and_keeps_its_rows(engine: Engine) -> None:
    put(engine, steps=STEP)
    put(engine, events=EVENT, trained=FACT, verdicts=VERDICT)
    unguarded(engine)
    with engine.begin() as connection:
        for statement in ("ALTER TABLE runs DROP COLUMN drain", *BACK_TO_0004):
            connection.execute(text(statement))
        connection.execute(text("UPDATE alembic_version SET version_num = '0002'"))
        connection.execute(text("UPDATE trained SET reported_age = 3"))  # nothing refuses it yet
    ledger.upgrade(engine)
    ledger.require_current(engine)
    with engine.begin() as connection:
        for table, row in {"events": EVENT, "verdicts": VERDICT, "attempts": ATTEMPT, "groups": GROUP}.items():
            kept = connection.execute(select(T[table])).mappings().one()
            assert {name: kept[name] for name in row} == row
    for table in ("events", "trained", "verdicts"):
        with pytest.raises(IntegrityError), engine.begin() as connection:
            connection.execute(text(f"DELETE FROM {table}"))


def test_a_problem_lives_in_one_group_at_a_time(engine: Engine) -> None:
    second = {**GROUP, "group_id": "g2", "number": 1}
    assert refused(engine, groups=second)
    with engine.begin() as connection:
        connection.execute(text("UPDATE groups SET state = 'dropped' WHERE group_id = 'g'"))
    assert not refused(engine, groups=second)
    assert refused(engine, groups={**GROUP, "group_id": "g3", "number": 1, "state": "dropped"})  # its number is taken


def test_a_group_is_trained_once_per_incarnation_by_a_step_that_exists(engine: Engine) -> None:
    assert refused(engine, trained=FACT)
    put(engine, steps=STEP)
    put(engine, trained=FACT)
    assert refused(engine, trained=FACT)
    assert refused(engine, steps={**STEP, "incarnation": 1})  # a serial is never reused
    put(engine, steps={**STEP, "incarnation": 1, "serial": 2})
    put(engine, trained={**FACT, "incarnation": 1})


def test_a_second_verdict_is_refused(engine: Engine) -> None:
    put(engine, verdicts=VERDICT)
    assert refused(engine, verdicts={**VERDICT, "reward": 0.0})


def test_an_event_has_its_own_number_and_a_fact_is_told_once(engine: Engine) -> None:
    put(engine, events=EVENT)
    assert refused(engine, events={**EVENT, "subject": "other"})
    assert refused(engine, events={**EVENT, "sequence": 2})
    put(engine, events={**EVENT, "sequence": 2, "epoch": 1})


@pytest.mark.parametrize("table", ["events", "trained", "verdicts"])
def test_a_fact_is_neither_changed_nor_deleted(engine: Engine, table: str) -> None:
    put(engine, steps=STEP)
    put(engine, events=EVENT, trained=FACT, verdicts=VERDICT)
    with engine.begin() as connection:
        before = connection.execute(select(T[table])).all()
    statements = [f"UPDATE {table} SET run_id = run_id", f"DELETE FROM {table}"]
    if engine.dialect.name == "postgresql":
        statements.append(f"TRUNCATE {table}")
    for statement in statements:
        with pytest.raises(IntegrityError, match=f"{table}: facts are neither changed nor deleted"):
            with engine.begin() as connection:
                connection.execute(text(statement))
    with engine.begin() as connection:
        assert connection.execute(select(T[table])).all() == before


def test_what_was_sent_may_be_forgotten(engine: Engine) -> None:
    sent = {"run_id": "r", "sequence": 1, "topic": "t", "key": "", "message": b"", "created_at": 0.0}
    put(engine, outbox=sent, inbox={"run_id": "r", "topic": "t", "position": 0, "digest": ""})
    with engine.begin() as connection:
        connection.execute(text("UPDATE outbox SET published_at = 1"))
        for table in ("outbox", "inbox"):
            assert connection.execute(text(f"DELETE FROM {table}")).rowcount == 1


def moved(engine: Engine, table: str, changes: dict[str, Any], to: dict[str, Any]) -> bool:
    """Whether a row of the table that is at `changes` can be written as being at `to`. It is as it was afterwards."""
    with engine.connect() as connection, connection.begin() as transaction:
        template = {"attempts": ATTEMPT, "groups": GROUP}[table]
        own = (
            {"attempt_id": "b", "place": 1}
            if table == "attempts"
            else {"group_id": "h", "number": 1, "problem_id": "q"}
        )
        key = T[table].c.attempt_id == "b" if table == "attempts" else T[table].c.group_id == "h"
        connection.execute(insert(T[table]).values({**template, **own, **changes}))
        try:
            connection.execute(update(T[table]).where(key).values(to))
        except IntegrityError as error:
            if f"{table}: no such move" not in str(error):
                raise
            return False
        finally:
            transaction.rollback()
    return True


def test_an_attempt_moves_in_the_database_as_it_moves_in_the_code(engine: Engine) -> None:
    places = [Place(epoch, state) for epoch in (1, 2) for state in AttemptState]
    for at, to in itertools.product(places, places):
        old, new = ({"epoch": p.epoch, "state": p.state.value, "trajectory": REF} for p in (at, to))
        assert moved(engine, "attempts", old, new) is may_become(at, to), (at, to)


def test_an_attempt_leaves_no_end_and_its_epoch_never_falls() -> None:
    for end in (AttemptState.failed, AttemptState.dropped, AttemptState.grouped):
        assert [s for s in AttemptState for e in (1, 2) if may_become(Place(1, end), Place(e, s))] == [end]
    assert not any(may_become(Place(2, a), Place(1, b)) for a in AttemptState for b in AttemptState)


def test_a_group_moves_in_the_database_as_it_moves_in_the_code(engine: Engine) -> None:
    put(
        engine,
        problems={"run_id": "r", "problem_id": "q", "pack_hash": "h", "category": "", "cell": "", "admitted_at": 0},
    )
    for at, to in itertools.product(GroupState, GroupState):
        allowed = at is to or to in GROUP_MOVES[at]
        old, new = ({"state": s.value, "sequence": 7} for s in (at, to))
        assert moved(engine, "groups", old, new) is allowed, (at, to)


@pytest.mark.parametrize(
    "rows",
    [
        {"attempts": {**ATTEMPT, "attempt_id": "b", "place": 1, "state": "unheard"}},
        {"attempts": {**ATTEMPT, "attempt_id": "b", "place": 0}},
        {"attempts": {**ATTEMPT, "attempt_id": "b", "place": 1, "epoch": -1}},
        {"attempts": {**ATTEMPT, "attempt_id": "b", "place": 1, "state": "scored"}},  # without a trajectory
        {"attempts": {**ATTEMPT, "attempt_id": "b", "group_id": "nobody"}},
        {"groups": {**GROUP, "group_id": "h", "number": 1, "state": "ready"}},  # without its place in the order
        {"groups": {**GROUP, "group_id": "h", "problem_id": "nothing"}},
    ],
)
def test_what_cannot_be_is_refused(engine: Engine, rows: dict[str, Any]) -> None:
    assert refused(engine, **rows)


def test_structures_come_back_as_they_went_in(engine: Engine) -> None:
    put(engine, verdicts=VERDICT)
    with engine.begin() as connection:
        assert connection.execute(select(T["runs"].c.config)).scalar() == REF
        assert connection.execute(select(T["verdicts"].c.verdict)).scalar() == VERDICT["verdict"]
        assert connection.execute(select(T["attempts"].c.trajectory)).scalar() is None


@pytest.mark.parametrize("kind", ALL)
def test_a_reader_sees_one_snapshot_and_cannot_write(kind: str, tmp_path: Path) -> None:
    with ledger_url(kind, tmp_path) as url:
        writer = ledger.connect(url)
        ledger.upgrade(writer)
        put(writer, runs=RUN)
        reader = ledger.connect(url, read_only=True)
        with reader.begin() as connection:
            assert connection.execute(select(T["runs"].c.run_id)).scalars().all() == ["r"]
            put(writer, runs={**RUN, "run_id": "r2"})
            assert connection.execute(select(T["runs"].c.run_id)).scalars().all() == ["r"]
        with pytest.raises(DBAPIError):
            put(reader, runs={**RUN, "run_id": "r3"})
        reader.dispose()
        writer.dispose()


@pytest.mark.parametrize("kind", ALL)
def test_two_processes_may_migrate_at_once(kind: str, tmp_path: Path) -> None:
    with ledger_url(kind, tmp_path) as url:
        engines = [ledger.connect(url) for _ in range(8)]
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(ledger.upgrade, engines))
        for engine in engines:
            ledger.require_current(engine)
            engine.dispose()


def test_a_ledger_that_is_not_there_or_not_ours_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ledger.LedgerMissing, match="no ledger here; start the services once"):
        ledger.connect(f"sqlite:///{tmp_path / 'none.db'}", read_only=True)
    with pytest.raises(ValueError, match="allowed: sqlite:///PATH, postgresql://"):
        ledger.connect("mysql://somewhere/x")
    with pytest.raises(ValueError, match="must survive its process"):
        ledger.connect("sqlite://")


def test_a_ledger_of_another_version_is_refused_in_words(tmp_path: Path) -> None:
    engine = ledger.connect(f"sqlite:///{tmp_path / 'ledger.db'}")
    with pytest.raises(ledger.LedgerOutdated, match="start the scheduler of this version once"):
        ledger.require_current(engine)
    ledger.upgrade(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ledger.LedgerOutdated, match="written by a newer one"):
        ledger.upgrade(engine)
    engine.dispose()
