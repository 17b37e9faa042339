"""The rollout service on the embedded bus and store, against an engine over HTTP that can die, stall and swap."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.rollout import runs
from services.rollout.attempt import Occupied
from services.rollout.config import RolloutSettings
from services.rollout.engine_client import EngineClient
from services.rollout.service import Worker
from shared import sandbox
from shared.contracts import topics
from shared.contracts.messages import (
    AttemptCancel,
    AttemptClaimed,
    AttemptHeartbeat,
    RolloutFailed,
    RolloutFinished,
    RolloutRequested,
    StopReason,
)
from shared.contracts.run import Purpose, Ref
from shared.contracts.trajectory import unpack, unpack_routing
from shared.environments import Places
from shared.objects.directory import DirectoryObjects
from shared.telemetry import Health
from tests.integration.rollout_platform import Engine, Platform, make_checkpoint, platform, routing_of
from tests.patience import eventually, quiet
from tests.ruling import status


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base") / "checkpoint"
    make_checkpoint(directory)
    return directory


@pytest.fixture
def run(tmp_path: Path, checkpoint: Path) -> Callable[[Callable[[Platform], Awaitable[None]]], None]:
    """Runs a scenario on a fresh platform."""

    def runner(scenario: Callable[[Platform], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with platform(tmp_path, checkpoint) as p:
                await scenario(p)

        asyncio.run(whole())

    return runner


Runner = Callable[[Callable[[Platform], Awaitable[None]]], None]


def test_attempts_are_claimed_run_recorded_and_finished(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        async with Engine(p.repairs, serial=3).running() as engine, p.worker():
            await p.announce(engine)
            keys = [await p.ask(p.request(f"p{1 + i % 6}")) for i in range(12)]
            finished: list[RolloutFinished] = await p.heard(topics.ROLLOUTS_FINISHED, 12)
            assert {f.key.attempt for f in finished} == {k.attempt for k in keys}
            claims = await p.heard(topics.ATTEMPTS_PROGRESS, 12, lambda m: isinstance(m, AttemptClaimed))
            assert {c.key.attempt for c in claims} == {k.attempt for k in keys}
            for one in finished:
                assert (one.stop, one.oldest_version, one.newest_version) == (StopReason.submitted, 3, 3)
                trajectory = unpack(p.objects.get(one.trajectory))
                assert one.trajectory.key.startswith(f"runs/r-test/attempts/{one.key.attempt}/0/")
                (segment,) = trajectory.segments
                number = int(one.key.problem[1:])
                assert trajectory.files == {"f.py": f"def f(a):\n    return a + {number}\n"}
                assert trajectory.routing is not None
                (rows,) = unpack_routing(p.objects.get(trajectory.routing))
                np.testing.assert_array_equal(rows, routing_of(segment.tokens.tolist()))
                assert one.effort.sampled_tokens == segment.loss_mask.sum()
                assert trajectory.first_edit_files is None
            assert {r.get("extra_key") for r in engine.requests} == {None, "@3"}
            await p.acknowledged(topics.ROLLOUTS_REQUESTED, "rollout")

    run(scenario)


def test_the_request_is_acknowledged_once_the_claim_is_durable_not_when_the_work_is_done(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        async with Engine(p.repairs).running() as engine, p.worker():
            engine.free.clear()
            await p.announce(engine)
            key = await p.ask(p.request())
            await p.heard(topics.ATTEMPTS_PROGRESS, 1, lambda m: isinstance(m, AttemptClaimed))
            await p.acknowledged(topics.ROLLOUTS_REQUESTED, "rollout")
            (beat,) = await p.heard(topics.ATTEMPTS_PROGRESS, 1, lambda m: isinstance(m, AttemptHeartbeat))
            assert beat.attempts == {key.attempt: (0, -1)}
            engine.free.set()
            await p.heard(topics.ROLLOUTS_FINISHED, 1)

    run(scenario)


def test_a_generation_lost_with_its_engine_is_asked_for_again_from_the_recorded_tokens(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        async with Engine(p.repairs).running() as engine, p.worker():
            engine.failing = 2
            await p.announce(engine)
            await p.ask(p.request())
            (finished,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
            assert finished.stop is StopReason.submitted
            sent = [r["input_ids"] for r in engine.requests]
            assert sent[0] == sent[1] == sent[2] != sent[3]
            assert len({r["rid"] for r in engine.requests}) == 4
            (segment,) = unpack(p.objects.get(finished.trajectory)).segments
            assert segment.loss_mask.sum() == finished.effort.sampled_tokens

    run(scenario)


def test_without_a_usable_engine_attempts_wait_and_the_service_says_so(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        async with p.worker() as health:
            await eventually(lambda: not health.ready)
            async with Engine(p.repairs).running() as engine:
                await p.announce(engine)
                await eventually(lambda: health.ready)
                engine.dead = True  # as after SIGSTOP: connections are taken, nothing is answered
                await eventually(lambda: not health.ready)
                await p.ask(p.request())
                await p.heard(
                    topics.ATTEMPTS_PROGRESS, 5, lambda m: isinstance(m, AttemptHeartbeat) and bool(m.attempts)
                )
                engine.dead = False
                await eventually(lambda: health.ready)
                (finished,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
                assert isinstance(finished, RolloutFinished)

    run(scenario)


def test_an_engine_that_died_is_replaced_by_another_one_in_mid_attempt(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        async with Engine(p.repairs, serial=2, name="second").running() as second, p.worker():
            async with Engine(p.repairs, serial=1, name="first").running() as first:
                first.free.clear()
                await p.announce(first)
                await p.ask(p.request())
                await eventually(lambda: first.waiting == 1)
                first.failing = 1
            await p.announce(second)
            (finished,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
            assert (finished.stop, finished.oldest_version) == (StopReason.submitted, 2)
            assert [r.get("extra_key") for r in second.requests] == [None, "@2"]  # its KV begins anew there

    run(scenario)


def test_a_version_below_the_floor_serves_nothing_even_if_its_replica_says_otherwise(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        async with Engine(p.repairs, serial=5).running() as engine, p.worker():
            await p.announce(engine)
            engine.serial = 1  # started again, and not yet where it was
            await p.ask(p.request(policy_floor=4))
            await eventually(lambda: len(engine.requests) == 1)
            await quiet(0.3, "the replica is asked again although its version is below the floor")
            assert len(engine.requests) == 1
            engine.serial = 6
            await p.announce(engine)
            (finished,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
            assert finished.oldest_version == 6

    run(scenario)


def test_a_pinned_attempt_is_served_by_its_version_or_fails_as_infrastructure(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        rollout, evaluation = Engine(p.repairs, serial=4), Engine(p.repairs, serial=3, name="e", pool="evaluation")
        async with rollout.running(), evaluation.running(), p.worker(rollout_pin_wait_s=0.3):
            await p.announce(rollout, evaluation)
            await eventually(lambda: rollout.probes and evaluation.probes)
            served = await p.ask(p.request(pinned=3, purpose=Purpose.evaluate))
            missing = await p.ask(p.request(pinned=9, purpose=Purpose.evaluate))
            results = {m.key.attempt: m for m in await p.heard(topics.ROLLOUTS_FINISHED, 2)}
            assert results[served.attempt].oldest_version == results[served.attempt].newest_version == 3
            trajectory = unpack(p.objects.get(results[served.attempt].trajectory))
            assert trajectory.first_edit_files == trajectory.files
            assert isinstance(results[missing.attempt], RolloutFailed)
            assert "version 9" in results[missing.attempt].reason
            assert not rollout.requests

    run(scenario)


def test_evaluations_of_a_version_that_nobody_serves_take_no_place_from_training(run: Runner) -> None:
    """Two places. One evaluation begins and another waits when the engine goes on to the next version; both come to their end
    when an engine for evaluations serves theirs."""

    async def scenario(p: Platform) -> None:
        async with (
            Engine(p.repairs, serial=1).running() as engine,
            Engine(p.repairs, serial=1, name="spare", pool="evaluation").running() as spare,
            p.worker(rollout_concurrency=2, rollout_pin_wait_s=60.0),
        ):
            await p.announce(engine)
            engine.free.clear()
            begun = await p.ask(p.request(pinned=1, purpose=Purpose.evaluate))
            await eventually(lambda: engine.waiting == 1)
            engine.serial = 2
            await p.announce(engine)
            engine.free.set()
            for _ in range(3):
                await p.ask(p.request(pinned=1, purpose=Purpose.evaluate))
            trained = [await p.ask(p.request(policy_floor=2)) for _ in range(3)]
            finished = await p.heard(topics.ROLLOUTS_FINISHED, 3)
            assert {m.key.attempt for m in finished} == {key.attempt for key in trained}
            await p.announce(spare)
            finished = await p.heard(topics.ROLLOUTS_FINISHED, 7)
            assert all(isinstance(m, RolloutFinished) for m in finished)
            assert begun.attempt in {m.key.attempt for m in finished}
            trained = [await p.ask(p.request(policy_floor=2)) for _ in range(3)]  # every place is there again
            await p.heard(topics.ROLLOUTS_FINISHED, 10)

    run(scenario)


def test_a_worker_that_holds_nothing_says_which_replica_answers_nothing(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        async with Engine(p.repairs).running() as engine, p.worker():
            await p.announce(engine)
            await p.ask(p.request())
            await p.heard(topics.ROLLOUTS_FINISHED, 1)
            engine.dead = True
            beat, *_ = await p.heard(topics.ATTEMPTS_PROGRESS, 1, lambda m: bool(getattr(m, "silent", [])))
            assert (beat.silent, beat.attempts) == ([engine.name], {})

    run(scenario)


def test_cancel_submits_the_work_as_it_is_or_drops_it(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        engine = Engine(p.repairs, held=lambda prompt: p.chat.obs in prompt)  # after the edit and its test
        engine.free.clear()
        async with engine.running(), p.worker():
            await p.announce(engine)
            submitted, dropped = await p.ask(p.request()), await p.ask(p.request())
            await eventually(lambda: engine.waiting == 2)
            for key, mode in ((dropped, "drop"), (submitted, "submit")):
                cancel = AttemptCancel(run="r-test", attempt=key.attempt, mode=mode)  # type: ignore[arg-type]
                await p.bus.publish(topics.ATTEMPTS_CANCEL, key.attempt, cancel)
            (finished,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
            assert (finished.key, finished.stop) == (submitted, StopReason.deadline)
            trajectory = unpack(p.objects.get(finished.trajectory))
            assert trajectory.files == {"f.py": "def f(a):\n    return a + 1\n"}
            assert trajectory.segments[0].loss_mask[-1]
            last = await p.ask(p.request("no such problem"))
            results = {m.key.attempt: m for m in await p.heard(topics.ROLLOUTS_FINISHED, 2)}
            assert set(results) == {submitted.attempt, last.attempt}
            assert "no such problem" in results[last.attempt].reason

    run(scenario)


def test_a_cancel_of_an_earlier_epoch_ends_nothing(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        engine = Engine(p.repairs, held=lambda prompt: p.chat.obs in prompt)
        engine.free.clear()
        async with engine.running(), p.worker():
            await p.announce(engine)
            again, other = await p.ask(p.request(epoch=1)), await p.ask(p.request())
            await eventually(lambda: engine.waiting == 2)
            for key in (again, other):  # both are read when the second one has worked
                cancel = AttemptCancel(run="r-test", attempt=key.attempt, epoch=0)
                await p.bus.publish(topics.ATTEMPTS_CANCEL, key.attempt, cancel)
            (ended,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
            assert (ended.key, ended.stop) == (other, StopReason.deadline)
            engine.free.set()
            results = {m.key.attempt: m for m in await p.heard(topics.ROLLOUTS_FINISHED, 2)}
            assert results[again.attempt].stop is StopReason.submitted

    run(scenario)


def test_a_deadline_before_the_first_token_is_infrastructure(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        async with Engine(p.repairs, slow=True).running() as engine, p.worker():
            engine.free.clear()
            await p.announce(engine)
            key = await p.ask(p.request())
            await eventually(lambda: engine.waiting == 1)
            await p.bus.publish(topics.ATTEMPTS_CANCEL, "x", AttemptCancel(run="r-test", attempt=key.attempt))
            (failed,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
            assert isinstance(failed, RolloutFailed)
            assert "before the first token" in failed.reason

    run(scenario)


def test_a_newer_epoch_replaces_an_older_one_and_a_zombie_request_is_ignored(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        async with Engine(p.repairs).running() as engine, p.worker():
            engine.free.clear()
            await p.announce(engine)
            for epoch in (0, 1, 0):
                await p.ask(p.request(attempt="a-same", epoch=epoch))
                await p.acknowledged(topics.ROLLOUTS_REQUESTED, "rollout")
            engine.free.set()
            await p.heard(topics.ROLLOUTS_FINISHED, 1)
            await p.ask(p.request())
            results = await p.heard(topics.ROLLOUTS_FINISHED, 2)
            assert [m.key.epoch for m in results if m.key.attempt == "a-same"] == [1]
            assert results[0].trajectory.key.startswith("runs/r-test/attempts/a-same/1/")

    run(scenario)


def test_a_worker_that_drains_finishes_what_it_holds(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        async with Engine(p.repairs).running() as engine:
            async with p.worker():
                await p.announce(engine)
                engine.free.clear()
                key = await p.ask(p.request())
                await eventually(lambda: engine.waiting == 1)
                asyncio.get_running_loop().call_later(0.3, engine.free.set)
            (finished,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
            assert isinstance(finished, RolloutFinished)
            assert finished.key == key

    run(scenario)


def test_a_worker_that_must_leave_gives_back_what_it_holds(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        async with Engine(p.repairs).running() as engine:
            async with p.worker(rollout_drain_s=0.1):
                await p.announce(engine)
                engine.free.clear()
                key = await p.ask(p.request())
                await eventually(lambda: engine.waiting == 1)
            (failed,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
            assert isinstance(failed, RolloutFailed)
            assert failed.key == key

    run(scenario)


def test_a_paused_run_gets_no_new_attempts_but_evaluations_go_on(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        await p.bus.publish(topics.RUNS_STATE, "r-test", status("r-test", "paused"))
        async with Engine(p.repairs, serial=0).running() as engine, p.worker():
            await p.announce(engine)
            await p.knows("held")
            trained = await p.ask(p.request())
            evaluated = await p.ask(p.request(pinned=0, purpose=Purpose.evaluate))
            (first,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
            assert first.key.attempt == evaluated.attempt
            await p.bus.publish(topics.RUNS_STATE, "r-test", status("r-test", "running"))
            results = await p.heard(topics.ROLLOUTS_FINISHED, 2)
            assert results[1].key.attempt == trained.attempt

    run(scenario)


def test_requests_that_come_before_the_runs_objects_wait_for_them(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        config_key = "runs/r-test/config.json"
        config = p.objects.get(p.objects.head(config_key))
        p.objects.delete(config_key)
        looked, head = [], p.objects.head
        p.objects.head = lambda key: looked.append(key) or head(key)  # type: ignore[func-returns-value, method-assign]
        async with Engine(p.repairs).running() as engine, p.worker():
            await p.announce(engine)
            await p.ask(p.request())
            await eventually(lambda: config_key in looked)
            p.objects.put(config_key, config)
            (finished,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
            assert isinstance(finished, RolloutFinished)
            assert msgspec.json.decode(config)["run"] == "r-test"

    run(scenario)


def test_what_can_never_be_prepared_fails_instead_of_waiting_for_ever(run: Runner) -> None:
    async def scenario(p: Platform) -> None:
        p.objects.delete("runs/r-test/config.json")
        p.objects.put("runs/r-test/config.json", b"no configuration")
        async with Engine(p.repairs).running() as engine, p.worker():
            await p.announce(engine)
            await p.ask(p.request())
            (failed,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
            assert isinstance(failed, RolloutFailed)

    run(scenario)


def test_old_words_about_a_run_that_goes_on_lose_no_request(run: Runner) -> None:
    """Who has just begun to listen hears that the run was finished, then that it was resumed."""

    async def scenario(p: Platform) -> None:
        await p.bus.publish(topics.RUNS_STATE, "r-test", status("r-test", "finished"))
        async with Engine(p.repairs, serial=0).running() as engine, p.worker():
            await p.announce(engine)
            await p.knows("held")
            looked, state = [], p.runs.state
            p.runs.state = lambda run: looked.append(run) or state(run)
            asked = await p.ask(p.request())
            await eventually(lambda: looked, "the request to be held")
            await p.bus.publish(topics.RUNS_STATE, "r-test", status("r-test", "running"))
            (finished,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
            assert finished.key.attempt == asked.attempt

    run(scenario)


def test_a_request_to_a_run_that_seems_finished_is_given_back_not_dropped(
    run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run may have been resumed; that word comes on another topic, and may come later."""
    monkeypatch.setattr(runs, "SURE_AFTER_S", 0.0)

    async def scenario(p: Platform) -> None:
        await p.bus.publish(topics.RUNS_STATE, "r-test", status("r-test", "finished"))
        async with Engine(p.repairs, serial=0).running() as engine, p.worker():
            await p.announce(engine)
            await p.knows("finished")
            asked = await p.ask(p.request())
            (failed,) = await p.heard(topics.ROLLOUTS_FINISHED, 1)
            assert isinstance(failed, RolloutFailed)
            assert failed.key == asked
            await p.acknowledged(topics.ROLLOUTS_REQUESTED, "rollout")

    run(scenario)


@dataclass
class Handed:
    """A delivery by hand, and the worker's answer to it."""

    message: RolloutRequested
    topic: topics.Topic = topics.ROLLOUTS_REQUESTED
    key: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    offset: int = 0
    answer: str = ""

    def done(self) -> None:
        self.answer = self.answer or "done"

    def retry(self, after_s: float) -> None:
        self.answer = self.answer or "retry"

    def bury(self, reason: str) -> None:
        self.answer = self.answer or "buried"


class Hanging(DirectoryObjects):
    """A store that hangs until `on` is set, and then `fails` or not."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked, self.on, self.fails = threading.Event(), threading.Event(), True

    def head(self, key: str) -> Ref:
        self.asked.set()
        self.on.wait(20)
        if self.fails:
            raise OSError("away")
        return super().head(key)


def test_a_request_that_comes_again_before_its_claim_is_not_acknowledged(run: Runner) -> None:
    """A rebalance takes it away and hands it to the same worker again: only the second delivery counts then."""

    async def scenario(p: Platform) -> None:
        objects = Hanging(p.state / "objects")
        config = RolloutSettings(state=p.state, name="w")
        async with EngineClient(probe_s=1.0) as client:
            functions = sandbox.connect("process", 1)
            worker = Worker(config, p.bus, objects, Places(functions=functions), Health("rollout", config), client)
            request, places = p.request(), asyncio.Semaphore(4)
            first, second, third, fourth = (Handed(request) for _ in range(4))
            preparing = asyncio.create_task(worker.attempt(first, Occupied(places)))
            await asyncio.to_thread(objects.asked.wait, 20)
            await worker.attempt(second, Occupied(places))
            assert (first.answer, second.answer) == ("", "retry")
            objects.on.set()
            await preparing  # it failed: had the second been acknowledged, nobody would ask again
            assert first.answer == "retry"

            objects.fails = False
            running = asyncio.create_task(worker.attempt(third, Occupied(places)))
            await eventually(lambda: third.answer == "done")
            claims = await p.heard(topics.ATTEMPTS_PROGRESS, 1)
            assert [c.key for c in claims] == [request.key]
            await worker.attempt(fourth, Occupied(places))
            assert fourth.answer == "done"  # the claim is durable
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await functions.close()

    run(scenario)
