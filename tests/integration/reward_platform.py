"""The platform that the tests of the reward service stand on: one machine's stores, a grader, and a test's hands on them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from services.reward.config import GraderSettings, RewardSettings
from services.reward.grade import Grader
from services.reward.grader import Worker, sandbox_ready
from services.reward.graders import CeleryJobs
from services.reward.jobs import QUEUE, Job
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
    StopReason,
)
from shared.contracts.run import Purpose, Ref, RewardConfig, RunConfig
from shared.contracts.trajectory import Segment, Span, Trajectory, pack
from shared.environments import Places
from shared.environments.registry import Environments
from shared.objects import connect as connect_objects
from shared.problems import Case, FunctionHidden, FunctionProblem, Limits
from shared.problems.pack import write
from shared.problems.values import encode
from shared.sandbox import SandboxUnavailable, process
from shared.sandbox import connect as connect_sandbox
from shared.sandbox.pool import FunctionPool
from shared.sandbox.slot import Nursery, Slot
from shared.telemetry import Health
from tests.patience import eventually
from tests.ruling import status

FUNCTIONS = connect_sandbox("bubblewrap", workers=1)
RUN = "r-test"
RIGHT = "def f(x):\n    return x + 1\n"
WRONG = "def f(x):\n    return x - 1\n"
SLOW = "import time\ndef f(x):\n    time.sleep(0.2)\n    return x + 1\n"


def key_of(name: str, epoch: int = 0, purpose: Purpose = Purpose.train) -> AttemptKey:
    return AttemptKey(attempt=name, epoch=epoch, group="g", problem="p", purpose=purpose)


class Breakable:
    """Sandboxes (bare processes) that die and do not start again while `broken`."""

    def __init__(self) -> None:
        self.broken = False
        self.started: list[Nursery] = []
        self.functions = FunctionPool(lambda _: Slot(self.start, lambda top: ()), workers=1)

    def start(self) -> Nursery:
        if self.broken:
            raise SandboxUnavailable("somebody changed the machine")
        self.started.append(process.start())
        return self.started[-1]

    def break_down(self) -> None:
        self.broken = True
        for nursery in self.started:
            nursery.process.kill()


def case(x: int) -> Case:
    return Case(args=encode([x]), expected=encode(x + 1))


PROBLEM = FunctionProblem(
    id="p", files={"main.py": WRONG}, entry="f", visible=[case(1)], origin="dist:origin:f", limits=Limits(time_s=20.0)
)
HIDDEN = FunctionHidden(id="p", cases=[case(2), case(3)], solution={"main.py": RIGHT})


class Sending(CeleryJobs):
    """The queue of jobs. `sent`: those that are in it, or were."""

    def __init__(self, url: str, sent: list[Job]) -> None:
        super().__init__(url)
        self._sent = sent

    async def send(self, job: Job) -> None:
        await super().send(job)
        self._sent.append(job)


class Platform:
    """The stores of one machine, and a test's hands on them. `sent`: the jobs that its services gave to graders."""

    def __init__(self, state: Path, patience_s: float) -> None:
        self.state = state
        self.sent: list[Job] = []
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
        await self.bus.publish(topics.RUNS_STATE, RUN, status(RUN, "running", ref))

    async def finish(self, name: str, source: str, *, epoch: int = 0, **fields: object) -> RolloutFinished:
        """Publishes an attempt that ended with `source`."""
        key = key_of(name, epoch, fields.pop("purpose", Purpose.train))  # type: ignore[arg-type]
        stop = fields.pop("stop", StopReason.submitted)
        first = fields.pop("first_edit", None)
        values = {
            "trajectory": self.keep(key, source, stop=stop, first_edit=first),  # type: ignore[arg-type]
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

    def keep(
        self,
        key: AttemptKey,
        source: str,
        *,
        stop: StopReason = StopReason.submitted,
        first_edit: str | None = None,
    ) -> Ref:
        """Store a trajectory that ended with `source`, under a name that its content gives it."""
        trajectory = Trajectory(
            key=key,
            stop=stop,
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
            first_edit_files={"main.py": str(first_edit)} if first_edit else None,
        )
        data = pack(trajectory)
        prefix = attempt_prefix(RUN, key.attempt, key.epoch)
        return self.objects.put(f"{prefix}/trajectory-{xxhash.xxh3_64_hexdigest(data)}", data)

    async def listen(self) -> None:
        async for delivery in self.bus.deliveries([topics.ROLLOUTS_SCORED], None, 100):
            self.outcomes.setdefault(delivery.message.key.attempt, []).append(delivery.message)
            delivery.done()

    async def outcome(self, name: str, seconds: float = 120.0) -> RolloutScored | RolloutFailed:
        await eventually(lambda: name in self.outcomes, f"the outcome of {name}", seconds)
        return self.outcomes[name][0]

    async def until_begun(self, attempt: str, grader: str = "grader") -> None:
        """Wait until the grader process has begun a job with the attempt in it."""
        log = self.state / f"{grader}.log"

        def begun() -> bool:
            jobs = [line for line in log.read_text().splitlines() if "job_begun" in line]
            return any(f'"{attempt}"' in line for line in jobs)

        await eventually(begun, f"{grader} to begin {attempt}")

    async def until_sent(self, attempts: int) -> None:
        """Wait until the services gave so many attempts to graders."""
        await eventually(lambda: sum(len(job.items) for job in self.sent) >= attempts, f"{attempts} attempts in jobs")

    async def until_acknowledged(self) -> None:
        async def none_left() -> bool:
            return not (await self.bus.lag([topics.ROLLOUTS_FINISHED], "reward"))["rollouts.finished"]

        await eventually(none_left, "reward to acknowledge all of rollouts.finished")

    @contextlib.contextmanager
    def grader(self, name: str = "grader") -> Iterator[subprocess.Popen[bytes]]:
        environment = {**os.environ, "ETUDE_STATE": str(self.state), "ETUDE_NAME": name, "ETUDE_GRADER_SANDBOXES": "1"}
        environment["ETUDE_LOG_LEVEL"] = "DEBUG"
        with (self.state / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", "services.reward.grader"], env=environment, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    @contextlib.asynccontextmanager
    async def grader_here(
        self,
        functions: FunctionPool = FUNCTIONS,
        queues: Sequence[str] = (QUEUE,),
        environments: Callable[[Places], Environments] = Environments,
    ) -> AsyncIterator[Health]:
        """The same workers in this process, one for each queue: they start at once. For what needs no signal."""
        settings, stop = GraderSettings(state=self.state), asyncio.Event()
        health = Health("grader", settings)
        workers = []
        for queue in queues:
            made = environments(Places(functions=functions, objects=self.objects))
            ready = partial(sandbox_ready, made, health, stop)
            workers.append(Worker(settings, Grader(self.objects, made, "here"), ready, queue))
            workers[-1].start()
        try:
            yield health
        finally:
            stop.set()
            for worker in workers:
                await worker.stop()

    @contextlib.asynccontextmanager
    async def service(self) -> AsyncIterator[Health]:
        stop = asyncio.Event()
        bus = buses.connect(self.settings.bus_url, client="reward")
        jobs = Sending(self.settings.jobs_url, self.sent)
        async with Health("reward", self.settings) as health:
            running = asyncio.create_task(serve(self.settings, bus, self.objects, jobs, health, stop))
            try:
                yield health
            finally:
                stop.set()
                await running
                await jobs.close()
                await bus.close()


@contextlib.asynccontextmanager
async def platform(state: Path, patience_s: float = 4.0) -> AsyncIterator[Platform]:
    p = Platform(state, patience_s)
    listening = asyncio.create_task(p.listen())
    try:
        yield p
    finally:
        listening.cancel()
        await p.bus.close()
