"""Who may train a run, and what a trainer does that may not: it stays up, says why, and leaves the run to others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from synthetic import RUN, group, put_config, run_config

from services.trainer import checkpoints, service
from services.trainer.checkpoints import Resume
from services.trainer.config import TrainerSettings
from services.trainer.service import CHECKPOINTS, TAKEN, Service
from shared import bus as buses
from shared.bus import Bus
from shared.contracts.messages import Rollback
from shared.contracts.run import RunConfig
from shared.contracts.topics import GROUPS_READY, RUNS_STATE
from shared.objects import Objects
from shared.telemetry import Health
from tests.patience import eventually
from tests.ruling import status

PATIENCE_S = 120


@pytest.fixture
def config(objects: Objects, tmp_path: Path) -> RunConfig:
    return run_config(objects, tmp_path / "base")


async def until(condition: Callable[[], object]) -> None:
    await eventually(condition, seconds=PATIENCE_S)


def waits(trainer: Service) -> set[str]:
    return set(trainer.health._waits)


@asynccontextmanager
async def serving(objects: Objects, tmp_path: Path, bound: str = "") -> AsyncIterator[tuple[Service, Bus]]:
    """A trainer, and a bus of somebody else's. At the end it is told to stop, and does. `bound`: to this run; empty: to none."""
    settings = TrainerSettings(state=tmp_path, trainer_run=bound)
    clients = (f"trainer{bound}", f"test{bound}")
    own, other = (buses.connect(f"sqlite:{tmp_path / 'bus.db'}", client=client) for client in clients)
    stop = asyncio.Event()
    trainer = Service(settings, own, objects, Health("trainer", settings), stop)
    task = asyncio.create_task(trainer.serve())
    try:
        yield trainer, other
        stop.set()
        await asyncio.wait_for(task, PATIENCE_S)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await own.close()
        await other.close()


def test_a_superseded_trainer_stays_up_leaves_the_groups_to_its_heir_and_trains_the_next_run(
    objects: Objects, config: RunConfig, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with serving(objects, tmp_path) as (trainer, bus):
            start = status(RUN, "running", put_config(objects, config))
            await bus.publish(RUNS_STATE, RUN, start)
            await until(lambda: trainer.training)
            heir = checkpoints.claim(objects, RUN, "heir", Resume(None, None, frozenset()))
            ready = msgspec.structs.replace(group(objects, 0), incarnation=heir.incarnation)
            await bus.publish(GROUPS_READY, RUN, ready)
            await until(lambda: waits(trainer) == {TAKEN})
            async with asyncio.timeout(PATIENCE_S):
                async for delivery in bus.deliveries([GROUPS_READY], group="trainer", max_in_flight=1):
                    assert delivery.message.group == ready.group
                    delivery.done()
                    break
            await bus.publish(RUNS_STATE, RUN, status(RUN, "paused"))
            await bus.publish(RUNS_STATE, RUN, status(RUN, "running"))
            other = objects.put(
                "runs/other/config.json", msgspec.json.encode(msgspec.structs.replace(config, run="other"))
            )
            await bus.publish(RUNS_STATE, "other", status("other", "running", other))
            await until(lambda: trainer.training and trainer.training.run == "other")
            assert TAKEN not in waits(trainer)
            assert len(checkpoints.read_incarnations(objects, RUN)) == 2  # it never claimed the run again

    asyncio.run(scenario())


def test_a_run_that_is_started_beside_another_is_trained_by_the_trainer_alone_that_is_bound_to_it(
    objects: Objects, config: RunConfig, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with serving(objects, tmp_path) as (free, bus), serving(objects, tmp_path, bound="other") as (bound, _):
            await bus.publish(RUNS_STATE, RUN, status(RUN, "running", put_config(objects, config)))
            beside = objects.put(
                "runs/other/config.json", msgspec.json.encode(msgspec.structs.replace(config, run="other"))
            )
            await bus.publish(RUNS_STATE, "other", status("other", "running", beside, beside=True))
            await until(lambda: free.training and bound.training)
            assert free.training
            assert bound.training
            assert (free.training.run, bound.training.run) == (RUN, "other")
            for number in (0, 1):
                ready = group(objects, number)
                await bus.publish(GROUPS_READY, RUN, ready)
                await bus.publish(GROUPS_READY, "other", msgspec.structs.replace(ready, run="other"))
            await until(lambda: free.training and bound.training and free.training.step == bound.training.step == 1)
            assert free.early == bound.early == {}  # neither keeps the other's groups
            for run in (RUN, "other"):
                assert len(checkpoints.read_incarnations(objects, run)) == 1

    asyncio.run(scenario())


def test_without_a_usable_checkpoint_the_trainer_waits_for_a_person_and_goes_back_when_told_to(
    objects: Objects, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        ref = put_config(objects, config)
        async with serving(objects, tmp_path / "first") as (trainer, bus):
            await bus.publish(RUNS_STATE, RUN, status(RUN, "running", ref))
            await until(lambda: trainer.training)
            for number in range(4):
                await bus.publish(GROUPS_READY, RUN, group(objects, number))
            await until(lambda: trainer.training and trainer.training.step == 2)
        keys = [key for _, _, key in checkpoints.found(objects, RUN)]
        for key in keys:
            objects.put(key, b"no manifest")
        async with serving(objects, tmp_path / "second") as (trainer, bus):
            await bus.publish(RUNS_STATE, RUN, status(RUN, "running", ref))
            await until(lambda: CHECKPOINTS in waits(trainer))
            assert len(checkpoints.read_incarnations(objects, RUN)) == 1
            await bus.publish(RUNS_STATE, RUN, status(RUN, rollback=Rollback(1, "back")))
            await until(lambda: trainer.training)
            assert trainer.training
            assert trainer.training.step == 1
            await until(lambda: CHECKPOINTS not in waits(trainer))

    for directory in ("first", "second"):
        (tmp_path / directory).mkdir()
    monkeypatch.setattr(service, "AGAIN_S", 3600.0)
    asyncio.run(scenario())


def test_what_is_announced_again_before_the_run_is_open_comes_in_the_order_of_the_later_announcement(
    objects: Objects, tmp_path: Path
) -> None:
    """A new incarnation is told of older groups, freed by the fork, before those that its predecessor was told of last."""

    async def scenario() -> None:
        async with serving(objects, tmp_path) as (trainer, bus):
            first, second = (group(objects, number) for number in (0, 1))
            for ready in (second, first, msgspec.structs.replace(second, incarnation=1)):
                await bus.publish(GROUPS_READY, RUN, ready)
            await until(lambda: list(trainer.early.get(RUN, ())) == [first.group, second.group])
            assert trainer.early[RUN][second.group].incarnation == 1

    asyncio.run(scenario())


def test_a_later_incarnation_passes_over_groups_that_were_announced_to_nobody_or_to_its_predecessor(
    objects: Objects, config: RunConfig, tmp_path: Path
) -> None:
    async def scenario() -> None:
        checkpoints.claim(objects, RUN, "predecessor", Resume(None, None, frozenset()))
        async with serving(objects, tmp_path) as (trainer, bus):
            start = status(RUN, "running", put_config(objects, config))
            await bus.publish(RUNS_STATE, RUN, start)
            await until(lambda: trainer.training)
            for number, incarnation in enumerate((-1, 0, 1)):
                ready = msgspec.structs.replace(group(objects, number), incarnation=incarnation)
                await bus.publish(GROUPS_READY, RUN, ready)
            await until(lambda: trainer.hand and group(objects, 2).group in trainer.hand)
            assert trainer.hand is not None
            assert not [n for n in (0, 1) if group(objects, n).group in trainer.hand]

    asyncio.run(scenario())
