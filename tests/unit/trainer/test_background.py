"""Publishing in the background: the same numbers, the same order of durability, and no failure that nobody hears of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import RUN, SHAPE, group, put_config, run_config
from test_standing_aside import PATIENCE_S, serving, until

from services.trainer import checkpoints, groups, masters
from services.trainer.publishing import Made
from services.trainer.ranks import Options
from services.trainer.shares import PHASES, Shares, shares
from services.trainer.training import TrainingRun
from shared import weights
from shared.bus import Bus
from shared.contracts.ids import policy_prefix
from shared.contracts.messages import PolicyPublished, StepCommitted
from shared.contracts.run import TrainConfig
from shared.contracts.topics import GROUPS_READY, POLICIES_PUBLISHED, RUNS_STATE, STEPS_COMMITTED
from shared.objects import Objects, connect
from tests.ruling import status

TRAIN = TrainConfig(learning_rate=1e-2, checkpoint_every=1, base_every=3, norm_tokens=8.0)
Open = Callable[..., TrainingRun]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """Opens a run as a fresh process would, in a store of this name."""

    def open_run(store: str = "objects") -> TrainingRun:
        objects = connect(f"file:{tmp_path / store}")
        config = run_config(objects, tmp_path / "base", TRAIN)
        return TrainingRun(objects, config, trainer="t", cache=tmp_path / "cache", options=Options(mtp_stride=1))

    return open_run


@pytest.fixture
def publisher() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def batch(objects: Objects, step: int) -> list[groups.LoadedGroup]:
    return [groups.load(objects, group(objects, 2 * step + i), SHAPE, TRAIN) for i in (0, 1)]


def train(training: TrainingRun, step: int) -> Made:
    made = training.train(batch(training.objects, step)).made
    assert made is not None
    return made


def versions(training: TrainingRun, last: int) -> list[str]:
    refs = (training.objects.head(f"{policy_prefix(RUN, serial)}/manifest.json") for serial in range(last + 1))
    return [weights.read_manifest(training.objects, ref).checksum for ref in refs]


def state_of(training: TrainingRun) -> tuple[int, dict[str, bytes]]:
    manifest = next(checkpoints.manifests(training.objects, RUN))
    state = checkpoints.load_state(training.objects, manifest, training.cache)
    return manifest.step, {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def test_versions_and_checkpoints_are_those_of_a_trainer_that_waits(
    opened: Open, publisher: ThreadPoolExecutor
) -> None:
    waiting, going = opened("waiting"), opened("going")
    jobs: list[Future[Any]] = []
    for step in range(5):
        waiting.advance(batch(waiting.objects, step))
        waiting.checkpoint()
        jobs.append(publisher.submit(going.publish, train(going, step)))
    for job in jobs:
        job.result(PATIENCE_S)
    assert versions(going, 5) == versions(waiting, 5)
    assert state_of(going) == state_of(waiting)
    assert state_of(opened("going")) == state_of(waiting)


def test_the_next_step_computes_while_the_store_hangs_but_moves_nothing_that_a_checkpoint_still_reads(
    opened: Open, publisher: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = opened()
    moving, saved = threading.Event(), []

    def save(state: dict[str, Any], path: Path) -> None:
        assert moving.wait(PATIENCE_S), "the next step never came to its optimiser"
        saved.append({name: tensor.clone() for name, tensor in state.items()})
        real(state, path)

    real = checkpoints.save_file
    monkeypatch.setattr(checkpoints, "save_file", save)
    wait = training.engine.before_step

    def before_step() -> None:
        moving.set()
        wait()

    first = train(training, 0)
    after_first = training.engine.state()
    training.engine.before_step = before_step
    job = publisher.submit(training.publish, first)
    second = train(training, 1)  # it computes, then waits for `save`, then for all of the first step
    assert job.done()
    assert first.kept.done()
    assert {name: t.numpy().tobytes() for name, t in saved[0].items()} == {
        name: t.numpy().tobytes() for name, t in after_first.items()
    }
    assert weights.checksum(second.bits) == weights.checksum(masters.published_bits(training.engine.model))
    assert (second.step, second.serial, training.serial) == (2, 2, 2)
    seconds = training.spent
    assert sum(shares(seconds).values()) == pytest.approx(1)


def test_what_the_publication_fails_with_the_next_step_fails_with(opened: Open, publisher: ThreadPoolExecutor) -> None:
    training = opened()
    made = train(training, 0)
    training.objects.delete(f"{policy_prefix(RUN, 0)}/manifest.json")  # the parent's; a base is published in its place

    class Full(RuntimeError):
        pass

    def full(*_: object) -> None:
        raise Full

    training._versions._put = full  # type: ignore[method-assign,assignment]
    job = publisher.submit(training.publish, made)
    with pytest.raises(Full):
        train(training, 1)
    with pytest.raises(Full):
        job.result()
    with pytest.raises(Full):
        training.checkpoint()
    assert not list(checkpoints.manifests(training.objects, RUN))


class Gate:
    """A store in which objects under `/checkpoints/` wait, or whatever is put under `/policies/` fails."""

    def __init__(self, store: Objects) -> None:
        self._store, self.open, self.broken = store, threading.Event(), False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            if name.startswith("put") and "/checkpoints/" in arguments[0]:
                assert self.open.wait(PATIENCE_S)
            if name.startswith("put") and "/policies/" in arguments[0] and self.broken:
                raise RuntimeError("the store is broken")
            return method(*arguments)

        return call


def test_a_version_is_announced_after_its_checkpoint_in_order_and_a_broken_store_ends_the_trainer(
    objects: Objects, tmp_path: Path
) -> None:
    async def scenario() -> None:
        gate, heard = Gate(objects), []
        config = put_config(objects, run_config(objects, tmp_path / "base", TRAIN))

        async def listen(bus: Bus) -> None:
            async for delivery in bus.deliveries([POLICIES_PUBLISHED, STEPS_COMMITTED], group=None, max_in_flight=9):
                if isinstance(delivery.message, PolicyPublished | StepCommitted):
                    heard.append(delivery.message)
                delivery.done()

        async def announce(bus: Bus, step: int) -> None:
            for i in (0, 1):
                await bus.publish(GROUPS_READY, RUN, group(objects, 2 * step + i))

        async def until_it_breaks() -> None:
            async with serving(gate, tmp_path) as (trainer, bus):  # type: ignore[arg-type]
                listening = asyncio.create_task(listen(bus))
                await bus.publish(RUNS_STATE, RUN, status(RUN, "running", config))
                await until(lambda: trainer.training)
                await announce(bus, 0)
                manifest = f"{policy_prefix(RUN, 1)}/manifest.json"
                await until(lambda: manifest in set(objects.list(f"{policy_prefix(RUN, 1)}/")))
                assert [m.serial for m in heard] == [
                    0
                ]  # durable, and nobody may sample with it before its checkpoint is
                gate.open.set()
                await announce(bus, 1)
                await until(lambda: len(heard) == 5)
                kinds = [PolicyPublished, PolicyPublished, StepCommitted, PolicyPublished, StepCommitted]
                assert [type(message) for message in heard] == kinds
                gate.broken = True
                await announce(bus, 2)
                await until(lambda: trainer.training is None)
                listening.cancel()

        with pytest.raises(RuntimeError, match="the store is broken"):
            await until_it_breaks()
        assert [message.serial for message in heard][-1] == 2

    asyncio.run(scenario())


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.floats(0, 1e3), st.booleans()), max_size=30))
def test_every_moment_belongs_to_one_phase(laps: list[tuple[str, float, bool]]) -> None:
    now = 0.0
    clock = Shares(lambda: now)
    taken = reported = 0.0
    for phase, seconds, take in laps:
        now += seconds
        clock.lap(phase)
        clock.move(seconds / 3, phase, "packing")
        clock.move(1e9, "waiting", "waiting")
        if take:
            seconds_by_phase = clock.take()
            taken += sum(seconds_by_phase.values())
            assert sum(shares(seconds_by_phase).values()) == pytest.approx(1 if sum(seconds_by_phase.values()) else 0)
        else:
            reported += sum(clock.report().values())
    assert taken + sum(clock.take().values()) == pytest.approx(now)
    assert reported + sum(clock.report().values()) == pytest.approx(now)
