"""What only the embedded bus promises: many processes on one file, retention, errors of the file."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
import structlog

from shared.bus import BusUnavailable, connect, dead_letters, sqlite_worker
from shared.bus.sqlite import SqliteBus
from shared.bus.sqlite_store import Position, Row, Store
from shared.contracts.codec import Raw
from shared.contracts.messages import Alert, PolicyApplied, RunCommand
from shared.contracts.topics import POLICIES_APPLIED, RUNS_COMMANDS, RUNS_STATE, Topic
from tests.patience import quiet
from tests.ruling import status

TOPIC = Topic("t", (Alert,), partitions=4)
COMPACTED = Topic("c", (Alert,), partitions=1, compacted=True)


def alert(what: object) -> Alert:
    return Alert(run="r", name="n", severity="info", what=str(what))


def run(scenario):
    async def bounded():
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())


def age(path: Path, seconds: float) -> None:
    """Makes every message older."""
    with sqlite3.connect(path) as db:
        db.execute("UPDATE messages SET at = at - ?", (seconds,))
    db.close()


def count(path: Path, topic: str) -> int:
    db = sqlite3.connect(path)
    try:
        return db.execute("SELECT count(*) FROM messages WHERE topic = ?", (topic,)).fetchone()[0]
    finally:
        db.close()


async def read(bus, topic, group, number, acknowledge=True):
    deliveries = bus.deliveries([topic], group, 100)
    got = [await anext(deliveries) for _ in range(number)]
    if acknowledge:
        for delivery in got:
            delivery.done()
    return [delivery.message.what for delivery in got]


def test_the_purge_deletes_only_what_every_group_has_acknowledged_and_only_when_it_is_old(tmp_path):
    async def scenario():
        path = tmp_path / "bus.db"
        bus = SqliteBus(path, client="x")
        await bus.publish_many([(TOPIC, str(i), alert(i)) for i in range(20)])
        await read(bus, TOPIC, "fast", 20)
        await bus.lag([TOPIC], "fast")
        age(path, 7200)
        slow = bus.deliveries([TOPIC], "slow", 100)
        got = [await anext(slow) for _ in range(20)]
        assert await bus.purge() == 0
        for delivery in got[:10]:
            delivery.done()
        await bus.lag([TOPIC], "slow")
        assert 0 < await bus.purge() <= 10
        for delivery in got[10:]:
            delivery.done()
        await bus.publish(TOPIC, "k", alert("new"))
        await read(bus, TOPIC, "fast", 1)
        (await anext(slow)).done()
        await bus.lag([TOPIC], "slow")
        await bus.purge()
        assert count(path, "t") == 1  # acknowledged by all, but young
        await bus.close()

    run(scenario)


def test_a_topic_that_somebody_reads_as_broadcast_keeps_everything_for_its_retention(tmp_path):
    async def scenario():
        path = tmp_path / "bus.db"
        bus = SqliteBus(path, client="x")
        await bus.publish_many([(TOPIC, str(i), alert(i)) for i in range(5)])
        await read(bus, TOPIC, "g", 5)
        await read(bus, TOPIC, None, 5)
        await bus.lag([TOPIC], "g")
        age(path, TOPIC.retention_h * 3600 - 60)
        assert await bus.purge() == 0
        assert len(await read(bus, TOPIC, None, 5)) == 5
        age(path, 120)
        assert await bus.purge() == 5
        await bus.close()

    run(scenario)


def test_a_compacted_topic_keeps_the_last_message_of_each_key_for_its_retention(tmp_path):
    async def scenario():
        path = tmp_path / "bus.db"
        bus = SqliteBus(path, client="x")
        await bus.publish_many([(COMPACTED, key, alert(f"{key}{i}")) for i in range(3) for key in "ab"])
        await read(bus, COMPACTED, None, 6)
        age(path, COMPACTED.retention_h * 3600 - 60)
        assert await bus.purge() == 4
        assert await read(bus, COMPACTED, None, 2) == ["a2", "b2"]
        age(path, 120)
        assert await bus.purge() == 2
        await bus.close()

    run(scenario)


def test_of_a_run_the_last_status_is_kept_and_earlier_ones_for_a_while(tmp_path):
    async def scenario():
        path = tmp_path / "bus.db"
        bus = SqliteBus(path, client="x")
        said = [status(run, state) for state in ("running", "paused") for run in ("a", "b")]
        await bus.publish_many([(RUNS_STATE, one.run, one) for one in said])
        await anext(bus.deliveries([RUNS_STATE], None, 1))
        age(path, RUNS_STATE.compact_after_h * 3600 - 60)
        assert await bus.purge() == 0
        age(path, 120)
        assert await bus.purge() == 2
        late = bus.deliveries([RUNS_STATE], None, 8)
        assert [(await anext(late)).message for _ in range(2)] == said[2:]
        await bus.close()

    run(scenario)


def test_of_a_replica_the_last_word_is_kept_and_of_a_run_every_command(tmp_path):
    async def scenario():
        path = tmp_path / "bus.db"
        bus = SqliteBus(path, client="x")
        for serial in range(3):
            for replica in ("one", "two"):
                applied = PolicyApplied(run="r", replica=replica, url=f"http://{replica}", serial=serial)
                await bus.publish(POLICIES_APPLIED, replica, applied)
            await bus.publish(RUNS_COMMANDS, "r", RunCommand(run="r", action="pause"))
        for _ in range(2):
            late = bus.deliveries([POLICIES_APPLIED], None, 10)
            last = [(await anext(late)).message for _ in range(count(path, "policies.applied"))][-2:]
            assert [(message.replica, message.serial) for message in last] == [("one", 2), ("two", 2)]
            await anext(bus.deliveries([RUNS_COMMANDS], None, 10))
            age(path, 7200)
            await bus.purge()
        assert (count(path, "policies.applied"), count(path, "runs.commands")) == (2, 3)
        await bus.close()

    run(scenario)


def test_what_was_purged_leaves_no_gap_that_stops_a_reader(tmp_path):
    async def scenario():
        path = tmp_path / "bus.db"
        bus = SqliteBus(path, client="x")
        for round_number in range(3):
            await bus.publish_many([(TOPIC, str(i), alert(f"{round_number}.{i}")) for i in range(10)])
            assert len(await read(bus, TOPIC, "g", 10)) == 10
            assert await bus.lag([TOPIC], "g") == {"t": 0}
            age(path, 7200)
            await bus.purge()
        assert count(path, "t") == 0
        await bus.close()
        again = SqliteBus(path, client="y")
        await again.publish(TOPIC, "k", alert("after"))
        assert await read(again, TOPIC, "g", 1) == ["after"]
        await again.close()

    run(scenario)


def test_a_locked_file_delays_a_publish_and_loses_nothing(tmp_path):
    async def scenario():
        path = tmp_path / "bus.db"
        bus = SqliteBus(path, client="x")
        lock = sqlite3.connect(path, isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        publish = asyncio.create_task(bus.publish(TOPIC, "k", alert(1)))
        await quiet(0.3, "a publish waits for the lock")
        assert not publish.done()  # and the event loop was never blocked
        lock.execute("ROLLBACK")
        await publish
        assert await read(bus, TOPIC, "g", 1) == ["1"]
        lock.close()
        await bus.close()

    run(scenario)


def test_an_error_of_the_file_reaches_the_publisher_and_the_bus_goes_on(tmp_path):
    async def scenario():
        path = tmp_path / "bus.db"
        bus = SqliteBus(path, client="x")
        with sqlite3.connect(path) as db:
            db.execute("ALTER TABLE messages RENAME TO elsewhere")
        with pytest.raises(BusUnavailable, match="no such table"):
            await bus.publish(TOPIC, "k", alert(1))
        with sqlite3.connect(path) as db:
            db.execute("ALTER TABLE elsewhere RENAME TO messages")
        db.close()
        await bus.publish(TOPIC, "k", alert(2))
        assert await read(bus, TOPIC, "g", 1) == ["2"]
        await bus.close()

    run(scenario)


def test_a_cancelled_publisher_does_not_disturb_the_others(tmp_path):
    async def scenario():
        bus = SqliteBus(tmp_path / "bus.db", client="x")
        tasks = [asyncio.create_task(bus.publish(TOPIC, "k", alert(i))) for i in range(50)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await bus.publish(TOPIC, "k", alert("end"))
        deliveries = bus.deliveries([TOPIC], "g", 100)
        seen = set()
        while "end" not in seen:
            seen.add((await anext(deliveries)).message.what)
        assert seen >= {str(i) for i in range(1, 50, 2)}
        await bus.close()

    run(scenario)


@pytest.mark.parametrize(
    ("url", "message"),
    [("mysql:x", "allowed: sqlite:PATH"), ("sqlite:/tmp/x?synchronous=off", "allowed: synchronous=full")],
)
def test_an_url_that_is_none_says_what_is_allowed(url, message):
    with pytest.raises(ValueError, match=message):
        connect(url, client="x")


def test_a_file_that_is_no_bus_is_refused_by_name(tmp_path):
    (tmp_path / "bus.db").write_bytes(b"something else, long enough to be no header of a database file")
    with pytest.raises(BusUnavailable, match=r"bus\.db"):
        connect(f"sqlite:{tmp_path / 'bus.db'}", client="x")


def test_a_bus_file_of_another_schema_is_refused(tmp_path):
    with sqlite3.connect(tmp_path / "bus.db") as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(BusUnavailable, match="schema 99"):
        connect(f"sqlite:{tmp_path / 'bus.db'}", client="x")


def without_sources(db):
    db.execute("DROP INDEX letters_by_source")
    db.execute("ALTER TABLE messages DROP COLUMN source")
    db.execute("ALTER TABLE topics DROP COLUMN compact_after_s")


def test_a_bus_file_of_the_first_schema_is_read_on_where_its_groups_stand(tmp_path):
    url = f"sqlite:{tmp_path / 'bus.db'}"

    async def before():
        bus = connect(url, client="old")
        await bus.publish_many([(TOPIC, "k", alert(i)) for i in range(4)])
        assert await read(bus, TOPIC, "g", 2) == ["0", "1"]
        assert (await bus.lag([TOPIC], "g"))["t"] == 2
        await bus.close()

    async def after():
        bus = connect(url, client="new")
        assert await read(bus, TOPIC, "g", 2) == ["2", "3"]
        await bus.close()

    run(before)
    with sqlite3.connect(tmp_path / "bus.db") as db:
        without_sources(db)
        db.execute("ALTER TABLE positions DROP COLUMN finished")
        db.execute("PRAGMA user_version=1")
    db.close()
    run(after)


async def buried(bus, number, first=0):
    """So many messages become dead letters of `TOPIC`."""
    raw = Topic(TOPIC.name, (Raw,), TOPIC.partitions)
    await bus.publish_many([(raw, str(i), Raw(b"%d" % i, {})) for i in range(first, first + number)])
    deliveries = bus.deliveries([TOPIC], "g", 100)
    while (await bus.lag([TOPIC], "g"))["t"]:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await deliveries.aclose()


def test_dead_letters_stay_a_year_whoever_has_acknowledged_them(tmp_path):
    async def scenario():
        path = tmp_path / "bus.db"
        bus = SqliteBus(path, client="x")
        await buried(bus, 3)
        letters = dead_letters(TOPIC)
        await bus.publish(letters, "k", Raw(b"of another program", {}))
        deliveries = bus.deliveries([letters], "dlq.replayed", 10)
        for _ in range(4):
            (await anext(deliveries)).done()
        assert await bus.lag([letters], "dlq.replayed") == {"t.dlq": 0}
        age(path, 364 * 86_400)
        await bus.purge()
        assert (count(path, "t"), count(path, "t.dlq")) == (0, 4)
        age(path, 2 * 86_400)
        await bus.purge()
        assert count(path, "t.dlq") == 0
        await bus.close()

    run(scenario)


def test_dead_letters_of_an_earlier_schema_stay_too_and_none_is_written_twice(tmp_path):
    path = tmp_path / "bus.db"

    async def before():
        bus = SqliteBus(path, client="old")
        await buried(bus, 3)
        deliveries = bus.deliveries([dead_letters(TOPIC)], "dlq.replayed", 10)
        for _ in range(3):
            (await anext(deliveries)).done()
        assert await bus.lag([dead_letters(TOPIC)], "dlq.replayed") == {"t.dlq": 0}
        await bus.close()

    async def after():
        bus = SqliteBus(path, client="new")
        age(path, 200 * 3600)
        await bus.purge()
        assert count(path, "t.dlq") == 3
        await bus.close()

    run(before)
    with sqlite3.connect(path) as db:
        without_sources(db)
        db.execute("UPDATE topics SET broadcast = 0, retention_s = 604800")
        db.execute("PRAGMA user_version=2")
    db.close()
    run(after)
    db = sqlite3.connect(path)
    assert db.execute("SELECT count(DISTINCT source) FROM messages WHERE topic = 't.dlq'").fetchone() == (3,)
    db.close()


def test_whether_a_letter_was_written_is_found_without_looking_at_the_others(tmp_path):
    store = Store(tmp_path / "bus.db")
    looked = []

    def had(number):
        with store.write():
            store.append([Row("t.dlq", 0, "k", b"", "{}", f"t/{i}/g") for i in range(number)])
        looked.clear()
        steps = lambda: looked.append(1)  # noqa: E731 called every ten steps of SQLite's machine
        store._db.set_progress_handler(steps, 10)
        assert (store.has_dead_letter("t.dlq", "t/7/g"), store.has_dead_letter("t.dlq", "t/-1/g")) == (True, False)
        store._db.set_progress_handler(None, 0)
        return len(looked)

    assert had(5000) <= had(10) + 10
    store.close()


def test_asking_how_far_a_group_is_behind_costs_nothing_for_what_it_has_left_behind(tmp_path):
    """The console asks for every group every few seconds, of topics that may keep a week."""
    store = Store(tmp_path / "bus.db")
    steps = 0

    def count_step() -> int:
        nonlocal steps
        steps += 1
        return 0

    def asked(behind: int, ahead: int) -> int:
        """The work of one question, in steps of SQLite's machine."""
        nonlocal steps
        rows = [Row("t", i % 4, "k", b"x", "{}") for i in range(behind + ahead)]
        with store.write():
            store.append(rows)
            tail = store.tail()
            store.take("g", "t", range(4), "m")
            store.commit("g", [("t", part, Position(tail - ahead + 1, "")) for part in range(4)], "m")
        store._db.set_progress_handler(count_step, 1)
        try:
            steps = 0
            assert store.lag("g", "t") == ahead
            return steps
        finally:
            store._db.set_progress_handler(None, 1)

    with store.write():
        store.know(TOPIC, keep=True)
    few = asked(behind=20, ahead=20)
    assert asked(behind=5000, ahead=20) <= 2 * few
    store.close()


def test_a_partition_that_a_group_never_read_counts_whole_however_far_the_others_are(tmp_path):
    store = Store(tmp_path / "bus.db")
    with store.write():
        store.know(TOPIC, keep=True)
        store.append([Row("t", i % 4, "k", b"x", "{}") for i in range(40)])
        store.take("g", "t", range(3), "m")
        store.commit("g", [("t", part, Position(41, "")) for part in range(3)], "m")
    assert store.lag("g", "t") == 10
    assert store.lag("another", "t") == 40
    store.close()


def test_what_a_consumer_leaves_behind_after_days_is_deleted_part_by_part_between_the_heartbeats(tmp_path, monkeypatch):
    """All at once took longer than a lease for a million messages: members counted as dead, and publishers waited."""
    monkeypatch.setattr(sqlite_worker, "PURGE_EVERY_S", 0.05)
    monkeypatch.setattr(sqlite_worker, "PURGE_REST_S", 0.01)
    monkeypatch.setattr(sqlite_worker, "PURGE_AT_ONCE", 1000)
    path = tmp_path / "bus.db"
    store = Store(path)
    with store.write():
        store.know(TOPIC, keep=False)
        store.join("m", "p", "g", ["t"], 0.0)
        store.append([Row("t", i % 4, "k", b"x", "{}") for i in range(4200)])
        store.take("g", "t", range(4), "m")
        store.commit("g", [("t", part, Position(store.tail() + 1, "")) for part in range(4)], "m")
    store.close()
    age(path, 7200)

    async def scenario():
        with structlog.testing.capture_logs() as logs:
            bus = SqliteBus(path, client="a")
            while count(path, "t"):  # noqa: ASYNC110 the thread of the bus sets no event
                await asyncio.sleep(0.02)
            await bus.close()
        assert [line["messages"] for line in logs if line["event"] == "bus.purged"] == [1000, 1000, 1000, 1000, 200]

    run(scenario)
