"""What a leading scheduler does with objects by itself: what nobody needs goes, quotas hold, and scheduling is not disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY
from sqlalchemy import Engine, insert, text, update

from services.scheduler import service
from services.scheduler.config import SchedulerConfig
from services.scheduler.desk import KEEP_FINISHED_S
from services.scheduler.housekeeping import Housekeeping
from services.scheduler.store import LEASE
from shared import bus as buses
from shared import ledger
from shared.bus import Bus
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.ids import attempt_prefix, checkpoint_prefix, policy_prefix
from shared.contracts.run import Ref, RunConfig
from shared.ledger.models import Attempt, Event, LeaseRow, Policy, Run
from shared.objects import ObjectsUnavailable
from shared.objects.directory import DirectoryObjects
from shared.telemetry import Health
from tests.patience import patient, quiet
from tests.unit.scheduler.test_scheduler_processes import others, until
from tests.unit.scheduler.test_scheduler_retention import checkpoint, told
from tests.unit.scheduler.world import REF, RUN, config

__all__ = ["told"]
OFTEN_S = 0.05
ENDS_WITHIN_S = patient(10.0)


def metric(name: str, /, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def taken(run: str) -> dict[str, float]:
    kinds = ("trajectories", "routing", "weights", "checkpoints", "other")
    return {kind: metric("etude_scheduler_run_objects_bytes", run=run, kind=kind) for kind in kinds}


# By itself, on a ledger that was told a story (test_scheduler_retention)


@contextlib.asynccontextmanager
async def keeping(
    state: Path, objects: DirectoryObjects, run_config: RunConfig | None = None, *, term: int = 1
) -> AsyncIterator[asyncio.Task[None]]:
    """The housekeeping of a scheduler that leads in term 1, or did."""
    settings = SchedulerConfig(state=state, sweep_every_s=OFTEN_S)
    bus = buses.connect(settings.bus_url, client="scheduler")
    housekeeping = Housekeeping(settings, objects, bus, lambda ref: run_config or config(), term)
    task = asyncio.create_task(housekeeping.run())
    try:
        async with asyncio.timeout(60):
            yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bus.close()


def lead(engine: Engine, term: int) -> None:
    with engine.begin() as connection:
        connection.execute(insert(LeaseRow).values(name=LEASE, holder="", term=term, renewals=0))


async def rounds(objects: Counting, number: int = 2) -> None:
    """So many whole rounds from now on."""
    after = objects.listed + number + 1
    await until(lambda: objects.listed >= after, "rounds")


class Counting(DirectoryObjects):
    listed = 0

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        self.listed += 1
        return super().sizes(prefix)


@pytest.fixture
def objects(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "objects")


def put(objects: DirectoryObjects, *keys: str) -> set[str]:
    for key in keys:
        objects.put(key, b"x" * 10)
    return set(keys)


@pytest.mark.parametrize("at_a_time", [2, 2000])
def test_what_was_given_up_and_trained_routing_go_by_themselves_and_what_is_needed_stays(
    told: Engine, tmp_path: Path, objects: Counting, at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.scheduler.sweep.CHUNK", at_a_time)
    trained, waits = attempt_prefix("r", "a-g1", 1), attempt_prefix("r", "a-waits", 0)
    stay = put(
        objects, f"{trained}/trajectory-1.zst", f"{trained}/verdict.json", f"{waits}/routing-1.zst", checkpoint(1, 5),
        attempt_prefix("r", "a-unheard-of", 0) + "/routing-1.zst", *(f"{policy_prefix('r', n)}/0-0.bin" for n in range(3)),
    )  # fmt: skip
    gone = put(objects, f"{trained}/routing-1.zst", attempt_prefix("r", "a-g1", 0) + "/trajectory-0.zst")
    with told.begin() as connection:
        kept = Ref(key=f"{trained}/trajectory-1.zst", size=10, checksum="c" * 32)
        connection.execute(update(Attempt).where(Attempt.attempt_id == "a-g1").values(epoch=1, trajectory=kept))
    lead(told, 1)
    before = metric("etude_scheduler_deleted_bytes_total", run="r", kind="routing")

    async def story() -> None:
        async with keeping(tmp_path, objects):
            await until(lambda: not gone & set(objects.list("")), "sweep")
            await rounds(objects)
            assert set(objects.list("")) == stay
            assert taken("r") == {"trajectories": 10, "routing": 20, "weights": 30, "checkpoints": 10, "other": 10}
            assert metric("etude_scheduler_deleted_bytes_total", run="r", kind="routing") - before == 10
        assert not any(taken("r").values())  # whoever leads next says what is

    asyncio.run(story())


def test_of_a_run_that_keeps_so_many_versions_the_weights_of_older_ones_go(
    told: Engine, tmp_path: Path, objects: Counting
) -> None:
    with told.begin() as connection:
        for serial in range(4):
            row = {"run_id": "r", "serial": serial, "incarnation": 0, "step": serial, "published_at": 0.0}
            connection.execute(insert(Policy).values(row | {"parent": -1, "manifest": REF}))
    lead(told, 1)
    weights = [f"{policy_prefix('r', serial)}/0000-0000.bin" for serial in range(4)]
    put(objects, *weights)
    manifests = put(objects, *(f"{policy_prefix('r', serial)}/manifest.json" for serial in range(4)))

    async def story() -> None:
        async with keeping(tmp_path, objects, config(keep_versions=2)):
            await until(lambda: set(objects.list("")) == {*weights[2:], *manifests}, "sweep")
            await rounds(objects)
            assert set(objects.list("")) == {*weights[2:], *manifests}

    asyncio.run(story())


def test_a_run_that_is_finished_is_gone_through_once(told: Engine, tmp_path: Path, objects: Counting) -> None:
    def finish(seconds_ago: float) -> None:
        with told.begin() as connection:
            connection.execute(update(Run).values(state="finished", finished_at=time.time() - seconds_ago))

    lead(told, 1)
    late = attempt_prefix("r", "a-dropped", 0) + "/routing-1.zst"
    put(objects, late)

    async def story() -> None:
        finish(KEEP_FINISHED_S - 30)
        async with keeping(tmp_path, objects):
            await quiet(20 * OFTEN_S, "a run that has just finished is not gone through yet")
            assert objects.listed == 0  # its last words may still be on their way
            finish(KEEP_FINISHED_S + 30)
            await until(lambda: objects.listed, "last round")
            await quiet(20 * OFTEN_S, "a run that is finished is gone through no second time")
        assert objects.listed == 1
        assert list(objects.list("")) == []

    asyncio.run(story())


def test_a_run_that_was_resumed_and_has_finished_once_more_is_gone_through_once_more(
    told: Engine, tmp_path: Path, objects: Counting
) -> None:
    def finish(seconds_ago: float) -> None:
        with told.begin() as connection:
            connection.execute(update(Run).values(state="finished", finished_at=time.time() - seconds_ago))

    lead(told, 1)

    async def story() -> None:
        finish(KEEP_FINISHED_S + 60)
        async with keeping(tmp_path, objects):
            await until(lambda: objects.listed, "last round")
            late = put(objects, attempt_prefix("r", "a-dropped", 0) + "/routing-1.zst")
            await quiet(20 * OFTEN_S, "a run that is finished is gone through no second time")
            assert (objects.listed, set(objects.list(""))) == (1, late)
            finish(KEEP_FINISHED_S + 30)  # both words between two looks
            await until(lambda: not list(objects.list("")), "the round after its second end")

    asyncio.run(story())


def test_a_run_that_is_resumed_while_it_is_counted_is_not_paused_for_what_made_room_for_it(
    told: Engine, tmp_path: Path
) -> None:
    class Clearing(Counting):
        def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
            found = list(super().sizes(prefix))
            if self.listed == 1:
                for key, _ in found:
                    self.delete(key)
                running(told, time.time())
            yield from found

    def running(engine: Engine, at: float) -> None:
        once = {"run_id": "r", "kind": "run.running", "subject": "", "data": {}, "at": at}
        with engine.begin() as connection:
            number = connection.execute(text("SELECT COUNT(*) FROM events")).scalar_one()
            connection.execute(insert(Event).values(once | {"sequence": number, "epoch": number}))

    objects = Clearing(tmp_path / "objects")
    put(objects, "runs/r/base/model")
    running(told, time.time() - 60)
    lead(told, 1)

    async def story() -> None:
        bus, said = buses.connect(SchedulerConfig(state=tmp_path).bus_url, client="test"), list[str]()

        async def hear() -> None:
            async for delivery in bus.deliveries([t.ALERTS], None, 8):
                said.append(delivery.message.name)
                delivery.done()

        hearing = asyncio.create_task(hear())
        async with keeping(tmp_path, objects, config(quota_gb=5e-9)):
            await rounds(objects, 3)
            await bus.publish(t.ALERTS, "r", m.Alert(run="r", name="heard so far", severity="info", what=""))
            await until(lambda: said == ["heard so far"], "the alerts so far")
            put(objects, "runs/r/base/model")  # now it is more than it may be
            await until(lambda: said[1:] == ["quota_exceeded"], "the alert")
        hearing.cancel()
        await bus.close()

    asyncio.run(story())


# The term


def test_a_scheduler_that_was_fenced_deletes_nothing(told: Engine, tmp_path: Path, objects: Counting) -> None:
    keys = put(objects, attempt_prefix("r", "a-dropped", 0) + "/routing-1.zst")
    lead(told, 2)

    async def story() -> None:
        async with keeping(tmp_path, objects, term=1) as task:
            await task  # it ends by itself
        assert set(objects.list("")) == keys

    asyncio.run(story())


def test_nor_does_one_that_is_fenced_between_looking_and_deleting(told: Engine, tmp_path: Path) -> None:
    class Fencing(DirectoryObjects):
        def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
            yield from super().sizes(prefix)
            with told.begin() as connection:
                connection.execute(update(LeaseRow).values(term=2))

    objects = Fencing(tmp_path / "objects")
    keys = put(objects, attempt_prefix("r", "a-dropped", 0) + "/routing-1.zst")
    lead(told, 1)

    async def story() -> None:
        async with keeping(tmp_path, objects) as task:
            await task
        assert set(objects.list("")) == keys

    asyncio.run(story())


# With a scheduler around it


@contextlib.asynccontextmanager
async def scheduling(state: Path, objects: DirectoryObjects) -> AsyncIterator[None]:
    """A scheduler that looks at objects all the time. It ends promptly, whatever they do."""
    settings = SchedulerConfig(state=state, batch_linger_s=0.02, sweep_every_s=OFTEN_S)
    engine, stop = ledger.connect(settings.ledger_url), asyncio.Event()
    ledger.upgrade(engine)
    bus = buses.connect(settings.bus_url, client="scheduler")
    async with Health("scheduler", settings) as health:
        serving = asyncio.create_task(service.serve(settings, engine, bus, objects, health, stop))
        try:
            yield
        finally:
            stop.set()
            async with asyncio.timeout(ENDS_WITHIN_S):
                await serving
            await bus.close()
            engine.dispose()


async def say(bus: Bus, action: Any, ref: Ref | None = None) -> None:
    await bus.publish(t.RUNS_COMMANDS, RUN, m.RunCommand(run=RUN, action=action, config=ref, by="alice"))


def reason(state: Path) -> tuple[str, str]:
    engine = ledger.connect(SchedulerConfig(state=state).ledger_url, read_only=True)
    with engine.begin() as connection:
        row = connection.execute(text("SELECT state, reason FROM runs")).one()
    engine.dispose()
    return row.state, row.reason


def test_a_run_above_its_quota_is_paused_with_the_reason_and_goes_on_once_the_quota_was_raised(
    tmp_path: Path, objects: Counting
) -> None:
    objects.put(f"runs/{RUN}/base/model", b"x" * 2_000_000)

    def alerts() -> float:
        return metric("etude_scheduler_alerts_total", run=RUN, name="quota_exceeded", severity="critical")

    async def story() -> None:
        before = alerts()
        async with others(tmp_path, config(quota_gb=0.001)) as peers, scheduling(tmp_path, objects):
            await until(lambda: peers.states.count("paused") == 1, "pause")
            state, why = reason(tmp_path)
            assert state == "paused"
            for said in ("quota_exceeded", "other 0.002", "schedule.quota_gb allows 0.001", f"etude resume {RUN}"):
                assert said in why
            await rounds(objects, 5)
            assert peers.states.count("paused") == alerts() - before == 1
            await say(peers.bus, "resume")
            await until(lambda: peers.states.count("paused") == 2, "pause of a run that is still above its quota")
            larger = msgspec.json.encode(config(quota_gb=1.0, max_steps=1))
            await say(peers.bus, "reconfigure", objects.put(f"runs/{RUN}/larger.json", larger))
            await say(peers.bus, "resume")
            await until(lambda: "finished" in peers.states, "end of the run")
            assert alerts() - before == 2
            assert peers.states.count("paused") == 3  # once more in answer to the new configuration

    asyncio.run(story())


def test_a_store_that_fails_disturbs_no_scheduling_and_is_asked_again(tmp_path: Path) -> None:
    class Failing(Counting):
        away = True

        def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
            found = super().sizes(prefix)
            if self.away:
                raise ObjectsUnavailable("no answer")
            return found

    objects = Failing(tmp_path / "objects")

    async def story() -> None:
        async with others(tmp_path, config()) as peers, scheduling(tmp_path, objects):
            await until(lambda: peers.step >= 3 and objects.listed >= 3, "steps while the store fails")
            attempt = next(iter(peers.requests))[0]
            stays = {f"runs/{RUN}/config.json", *put(objects, f"{checkpoint_prefix(RUN, 0, 3)}/manifest.json")}
            put(objects, attempt_prefix(RUN, attempt, 0) + "/routing-1.zst")  # of the first group: step 1 trained it
            objects.away = False
            await until(lambda: set(objects.list("")) == stays, "sweep")
            await say(peers.bus, "stop")
            await until(lambda: "finished" in peers.states, "end of the run")

    asyncio.run(story())


def test_one_that_hangs_holds_up_neither_scheduling_nor_the_end_and_nothing_is_deleted_after_it(tmp_path: Path) -> None:
    class Hanging(Counting):
        answers = threading.Event()
        answered = False

        def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
            found = super().sizes(prefix)
            self.answers.wait(60)
            yield from found
            self.answered = True

    objects = Hanging(tmp_path / "objects")

    async def story() -> None:
        async with others(tmp_path, config(max_steps=300)) as peers:
            async with scheduling(tmp_path, objects):
                await until(lambda: objects.listed, "look at the objects that hangs")
                step = peers.step
                await until(lambda: peers.step > step + 2, "steps meanwhile")
                await say(peers.bus, "stop")
                await until(lambda: "finished" in peers.states, "end of the run")
                put(objects, f"{checkpoint_prefix(RUN, 0, 5)}/manifest.json")
                put(objects, *(attempt_prefix(RUN, attempt, 0) + "/routing-1.zst" for attempt, _ in peers.requests))
            there = set(objects.list(""))
            objects.answers.set()
            await asyncio.to_thread(ended, "housekeeping")
            assert objects.listed == 1
            assert not objects.answered  # the first key already was too late
            assert set(objects.list("")) == there

    asyncio.run(story())


def ended(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(60)


def test_a_finished_run_is_gone_through_until_all_that_nobody_needs_is_gone(told: Engine, tmp_path: Path) -> None:
    class Hiccup(Counting):
        refused = 0

        def delete(self, key: str) -> None:
            self.refused += 1
            if self.refused < 3:
                raise ObjectsUnavailable("503")
            super().delete(key)

    objects = Hiccup(tmp_path / "objects")
    put(objects, attempt_prefix("r", "a-dropped", 0) + "/routing-1.zst")
    lead(told, 1)
    with told.begin() as connection:
        connection.execute(update(Run).values(state="finished", finished_at=time.time() - KEEP_FINISHED_S - 30))

    async def story() -> None:
        async with keeping(tmp_path, objects):
            await until(lambda: not list(objects.list("")), "the last round")

    asyncio.run(story())


def test_what_may_not_be_deleted_is_counted_and_held_against_the_quota(tmp_path: Path) -> None:
    class Refusing(Counting):
        def delete(self, key: str) -> None:
            raise ObjectsUnavailable("AccessDenied")

    objects = Refusing(tmp_path / "objects")

    async def story() -> None:
        async with others(tmp_path, config(quota_gb=0.001)) as peers, scheduling(tmp_path, objects):
            await until(lambda: peers.step >= 3, "steps")
            objects.put(f"{checkpoint_prefix(RUN, 0, 3)}/manifest.json", b"{}")
            attempt = next(iter(peers.requests))[0]
            objects.put(attempt_prefix(RUN, attempt, 0) + "/routing-1.zst", b"x" * 2_000_000)
            await until(lambda: "paused" in peers.states, "pause")
            assert "routing 0.002" in reason(tmp_path)[1]

    asyncio.run(story())


def test_told_not_to_a_scheduler_looks_at_no_object(told: Engine, tmp_path: Path, objects: Counting) -> None:
    keys = put(objects, attempt_prefix("r", "a-dropped", 0) + "/routing-1.zst")
    lead(told, 1)

    async def story() -> None:
        settings = SchedulerConfig(state=tmp_path, sweep_every_s=0)
        bus = buses.connect(settings.bus_url, client="scheduler")
        await Housekeeping(settings, objects, bus, lambda ref: config(), 1).run()  # returns at once
        await bus.close()

    asyncio.run(story())
    assert (objects.listed, set(objects.list(""))) == (0, keys)
