"""Reward and graders as processes of their own: what is finished gets scored, whoever dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from services.reward.config import GraderSettings, RewardSettings
from services.reward.grade import Grader
from services.reward.grader import Worker
from services.reward.graders import CeleryJobs
from services.reward.jobs import Graded
from services.reward.service import serve
from shared import bus as buses
from shared.bus import Bus
from shared.contracts import topics
from shared.contracts.ids import attempt_prefix
from shared.contracts.messages import (
    AttemptKey,
    Effort,
    RolloutFailed,
    RolloutFinished,
    RolloutScored,
    RunControl,
    StopReason,
    Verdict,
)
from shared.contracts.run import Purpose, Ref, RewardConfig, RunConfig
from shared.contracts.trajectory import Segment, Span, Trajectory, pack
from shared.objects import connect as connect_objects
from shared.problems import Case, Hidden, Limits, Problem
from shared.problems.pack import write
from shared.problems.values import encode
from shared.sandbox import connect as connect_sandbox
from shared.telemetry import Health

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bwrap is not installed")

FUNCTIONS = connect_sandbox("bubblewrap", workers=1)
RUN = "r-test"
RIGHT = "def f(x):\n    return x + 1\n"
WRONG = "def f(x):\n    return x - 1\n"
SLOW = "import time\ndef f(x):\n    time.sleep(0.2)\n    return x + 1\n"


def case(x: int) -> Case:
    return Case(args=encode([x]), expected=encode(x + 1))


PROBLEM = Problem(
    id="p", files={"main.py": WRONG}, entry="f", visible=[case(1)], origin="dist:origin:f", limits=Limits(time_s=20.0)
)
HIDDEN = Hidden(id="p", cases=[case(2), case(3)], solution={"main.py": RIGHT})


class Platform:
    """The stores of one machine, and a test's hands on them."""

    def __init__(self, state: Path, patience_s: float) -> None:
        self.state = state
        self.settings = RewardSettings(
            state=state, name="reward", reward_patience_s=patience_s, reward_linger_s=0.05, reward_tries=2
        )
        self.objects = connect_objects(self.settings.objects_url)
        self.bus: Bus = buses.connect(self.settings.bus_url, client="test")
        self.pack = self.lines("packs/public", PROBLEM)
        self.pack_hidden = self.lines("packs/hidden", HIDDEN)
        self.config = RunConfig(
            run=RUN,
            base=Ref(key="base", size=0, checksum=""),
            pack=self.pack,
            pack_hidden=self.pack_hidden,
            reward=RewardConfig(id="default", length=None, behaviour={"no_submit": -0.25}, behaviour_apply="all"),
        )
        self.outcomes: dict[str, list[RolloutScored | RolloutFailed]] = {}

    def lines(self, key: str, *entries: msgspec.Struct) -> Ref:
        return self.objects.put(f"{key}.jsonl.zst", write(entries))

    async def announce(self) -> None:
        ref = self.objects.put(f"runs/{RUN}/config.json", msgspec.json.encode(self.config))
        await self.bus.publish(topics.RUNS_CONTROL, RUN, RunControl(run=RUN, action="start", config=ref))

    async def finish(self, name: str, source: str, *, epoch: int = 0, **fields: object) -> RolloutFinished:
        """Publishes an attempt that ended with `source`."""
        key = AttemptKey(
            attempt=name, epoch=epoch, group="g", problem="p", purpose=fields.pop("purpose", Purpose.train)
        )  # type: ignore[arg-type]
        stop = fields.pop("stop", StopReason.submitted)
        first = fields.pop("first_edit", None)
        trajectory = Trajectory(
            key=key,
            stop=stop,  # type: ignore[arg-type]
            temperature=1.0,
            effort=Effort(),
            segments=[
                Segment(
                    tokens=np.arange(4, dtype=np.int32),
                    loss_mask=np.array([False, False, True, True]),
                    logprobs=np.zeros(4, dtype=np.float32),
                    versions=np.array([-1, -1, 0, 0], dtype=np.int32),
                    oldest_kv_version=0,
                    spans=[Span(start=2, end=4, role="tool_call", tool="edit")],
                )
            ],
            files={"main.py": source},
            first_edit_files={"main.py": str(first)} if first else None,
        )
        values = {
            "trajectory": self.objects.put(f"{attempt_prefix(RUN, name, epoch)}/trajectory", pack(trajectory)),
            "pack": self.pack,
            "pack_hidden": self.pack_hidden,
            "reward_config": "default",
        }
        message = RolloutFinished(
            run=RUN, key=key, stop=stop, effort=Effort(), oldest_version=0, oldest_kv_version=0, newest_version=0,  # type: ignore[arg-type]
            worker="w", seconds=1.0, **{**values, **fields},  # type: ignore[arg-type]
        )  # fmt: skip
        await self.bus.publish(topics.ROLLOUTS_FINISHED, name, message)
        return message

    async def listen(self) -> None:
        async for delivery in self.bus.deliveries([topics.ROLLOUTS_SCORED], None, 100):
            self.outcomes.setdefault(delivery.message.key.attempt, []).append(delivery.message)
            delivery.done()

    async def outcome(self, name: str, seconds: float = 240.0) -> RolloutScored | RolloutFailed:
        await self.until(lambda: name in self.outcomes, seconds)
        return self.outcomes[name][0]

    async def until(self, condition: Callable[[], bool], seconds: float = 240.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 what other processes do sets no event
                await asyncio.sleep(0.02)

    async def until_acknowledged(self) -> None:
        async with asyncio.timeout(30):
            while (await self.bus.lag([topics.ROLLOUTS_FINISHED], "reward"))["rollouts.finished"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    @contextlib.contextmanager
    def grader(self, name: str = "grader") -> Iterator[subprocess.Popen[bytes]]:
        environment = {**os.environ, "ETUDE_STATE": str(self.state), "ETUDE_NAME": name, "ETUDE_GRADER_SANDBOXES": "1"}
        with (self.state / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", "services.reward.grader"], env=environment, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    @contextlib.asynccontextmanager
    async def grader_here(self) -> AsyncIterator[None]:
        """The same worker in this process: it starts at once. For what needs no signal."""
        worker = Worker(GraderSettings(state=self.state), Grader(self.objects, FUNCTIONS, "here"))
        worker.start()
        try:
            yield
        finally:
            await worker.stop()

    @contextlib.asynccontextmanager
    async def service(self) -> AsyncIterator[Health]:
        stop = asyncio.Event()
        bus = buses.connect(self.settings.bus_url, client="reward")
        jobs = CeleryJobs(self.settings.jobs_url)
        async with Health("reward", self.settings) as health:
            running = asyncio.create_task(serve(self.settings, bus, self.objects, jobs, health, stop))
            try:
                yield health
            finally:
                stop.set()
                await running
                await jobs.close()
                await bus.close()


@pytest.fixture(scope="module", autouse=True)
def _close_sandboxes() -> Iterator[None]:
    yield
    FUNCTIONS.close_sync()


@contextlib.asynccontextmanager
async def platform(state: Path, patience_s: float = 4.0) -> AsyncIterator[Platform]:
    p = Platform(state, patience_s)
    listening = asyncio.create_task(p.listen())
    try:
        yield p
    finally:
        listening.cancel()
        await p.bus.close()


@pytest.mark.usefixtures("platform_stores")
def test_right_wrong_and_hopeless_attempts_are_scored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            async with p.grader_here():
                await p.finish("right", RIGHT)
                await p.finish("wrong", WRONG, stop=StopReason.deadline)
                await p.finish("syntax", "def f(x) return")
                await p.finish("endless", "def f(x):\n    while True: pass")
                await p.finish("exit", "import os\ndef f(x): os._exit(0)")
                await p.finish("copied", "import origin\ndef f(x): return origin.f(x)")
                await p.finish("evaluated", WRONG, purpose=Purpose.evaluate, first_edit=RIGHT)
                await p.finish("same", RIGHT, purpose=Purpose.evaluate, first_edit=RIGHT)
                right, wrong, syntax = [await p.outcome(n) for n in ("right", "wrong", "syntax")]
                assert isinstance(right, RolloutScored)
                assert right.verdict == Verdict(solved=True, passed=3, total=3)
                assert right.reward == 1.0
                assert right.terms == {"solved": 1.0, "no_submit": 0.0}
                assert isinstance(wrong, RolloutScored)
                assert wrong.verdict == Verdict(solved=False, passed=0, total=3)
                assert wrong.reward == -0.25
                assert isinstance(syntax, RolloutScored)
                assert (syntax.verdict.error, syntax.reward) == ("SyntaxError", 0.0)
                for name, error in (("endless", "Timeout"), ("exit", "Died"), ("copied", "ModuleNotFoundError")):
                    hopeless = await p.outcome(name)
                    assert isinstance(hopeless, RolloutScored)
                    assert hopeless.verdict == Verdict(solved=False, passed=0, total=3, error=error)
                evaluated, same = await p.outcome("evaluated"), await p.outcome("same")
                assert isinstance(evaluated, RolloutScored)
                assert (evaluated.verdict.solved, evaluated.verdict.first_edit_solved) == (False, True)
                assert isinstance(same, RolloutScored)
                assert same.verdict == Verdict(solved=True, passed=3, total=3, first_edit_solved=True)
            assert list(p.objects.list("grading/")) == []

    asyncio.run(scenario())


def test_what_cannot_be_graded_fails_and_is_never_a_reward(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            missing = Ref(key="runs/none", size=1, checksum="0" * 32)
            damaged = p.objects.put("damaged", b"no trajectory")
            async with p.grader_here():
                await p.finish("missing", RIGHT, trajectory=missing)
                await p.finish("damaged", RIGHT, trajectory=damaged)
                await p.finish("unknown", RIGHT, pack_hidden=p.lines("packs/other", Hidden(id="q", cases=[case(1)])))
                await p.finish("fine", RIGHT)
                for name, reason in (
                    ("missing", "ObjectMissing"),
                    ("damaged", "not a traj"),
                    ("unknown", "no problem 'p'"),
                ):
                    failed = await p.outcome(name)
                    assert isinstance(failed, RolloutFailed)
                    assert reason in failed.reason
                assert isinstance(await p.outcome("fine"), RolloutScored)

    asyncio.run(scenario())


def test_a_failed_rollout_passes_by(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            key = AttemptKey(attempt="lost", epoch=0, group="g", problem="p")
            await p.bus.publish(
                topics.ROLLOUTS_FINISHED, "lost", RolloutFailed(run=RUN, key=key, reason="x", worker="w")
            )
            async with p.grader_here():
                await p.finish("fine", RIGHT)
                await p.outcome("fine")
            assert "lost" not in p.outcomes
            await p.until_acknowledged()

    asyncio.run(scenario())


@pytest.mark.usefixtures("platform_stores")
def test_a_grader_killed_in_mid_batch_loses_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            names = [f"a{i}" for i in range(6)]
            with p.grader("first") as first:
                await p.finish("warm", RIGHT)
                await p.outcome("warm")
                for name in names:
                    await p.finish(name, SLOW)
                await asyncio.sleep(1.0)  # in the middle of some seconds' work
                assert not any(name in p.outcomes for name in names)
                first.send_signal(signal.SIGKILL)
            async with p.grader_here():
                outcomes = [await p.outcome(name) for name in names]
            assert all(isinstance(o, RolloutScored) and o.verdict.solved for o in outcomes)
            assert all(len(p.outcomes[name]) == 1 for name in names)

    asyncio.run(scenario())


def test_the_first_verdict_wins(tmp_path: Path) -> None:
    """An attempt that comes again, to another grader, keeps the verdict that was written first."""

    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            earlier = Graded(verdict=Verdict(solved=False, passed=1, total=3), grader="earlier")
            p.objects.put_if_absent(f"{attempt_prefix(RUN, 'a', 0)}/verdict.json", msgspec.json.encode(earlier))
            async with p.grader_here():
                await p.finish("a", RIGHT)
                first = await p.outcome("a")
                await p.finish("a", RIGHT)
                await p.until(lambda: len(p.outcomes["a"]) == 2)
                await p.finish("a", RIGHT, epoch=1)
                await p.until(lambda: len(p.outcomes["a"]) == 3)
            verdicts = [o.verdict for o in p.outcomes["a"] if isinstance(o, RolloutScored)]
            assert isinstance(first, RolloutScored)
            assert verdicts[:2] == [earlier.verdict] * 2
            assert verdicts[2].solved

    asyncio.run(scenario())


def test_a_service_that_restarts_takes_up_what_was_not_scored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p:
            await p.announce()
            async with p.service():
                for i in range(5):
                    await p.finish(f"a{i}", RIGHT)
                await asyncio.sleep(0.5)
            assert p.outcomes == {}
            async with p.service():
                async with p.grader_here():
                    for i in range(5):
                        assert isinstance(await p.outcome(f"a{i}"), RolloutScored)

    asyncio.run(scenario())


def test_attempts_wait_for_graders_that_are_away_and_the_service_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path, patience_s=0.5) as p, p.service() as health:
            await p.announce()
            await p.finish("a", RIGHT)
            await p.until(lambda: not health.ready)
            assert "graders" in health._waits
            await asyncio.sleep(2.0)  # silence alone is no failure
            assert p.outcomes == {}
            async with p.grader_here():
                assert isinstance(await p.outcome("a"), RolloutScored)
            assert health.ready

    asyncio.run(scenario())


def test_a_new_reward_configuration_in_mid_run_counts_for_its_attempts_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            async with p.grader_here():
                await p.finish("early", RIGHT, reward_config="double")  # before it was announced
                await p.finish("old", RIGHT)
                await p.outcome("old")
                reward = RewardConfig(id="double", solved=2.0, length=None, behaviour={})
                changed = msgspec.structs.replace(p.config, reward=reward)
                ref = p.objects.put(f"runs/{RUN}/config-2.json", msgspec.json.encode(changed))
                await p.bus.publish(topics.RUNS_CONTROL, RUN, RunControl(run=RUN, action="reconfigure", config=ref))
                await p.finish("old again", RIGHT)
                scores = [await p.outcome(name) for name in ("early", "old again")]
            assert [(s.reward, s.reward_config) for s in scores if isinstance(s, RolloutScored)] == [
                (2.0, "double"),
                (1.0, "default"),
            ]

    asyncio.run(scenario())


def test_an_unusable_reward_configuration_fails_its_attempts_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            p.config = msgspec.structs.replace(p.config, reward=RewardConfig(id="default", behaviour={"charm": 1.0}))
            await p.announce()
            await p.finish("a", RIGHT)
            failed = await p.outcome("a")
            assert isinstance(failed, RolloutFailed)
            assert "reward.behaviour: found 'charm'; allowed: broken_tool_call" in failed.reason

    asyncio.run(scenario())


@pytest.mark.usefixtures("platform_stores")
def test_a_grader_that_is_told_to_stop_finishes_its_job(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with platform(tmp_path) as p, p.service():
            await p.announce()
            with p.grader() as process:
                await p.finish("warm", RIGHT)
                await p.outcome("warm")
                await p.finish("a", SLOW)
                await asyncio.sleep(0.5)
                process.send_signal(signal.SIGTERM)
                assert isinstance(await p.outcome("a"), RolloutScored)
                assert await asyncio.to_thread(process.wait, 30) == 0

    asyncio.run(scenario())
