"""Several runs on one platform: the scheduler as a process, on a real bus and a real ledger, divides the workers' slots.

The workers, trainers and engines are simulated in this process. They speak over the bus as the real ones do.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.scheduler.audit import audit
from shared import bus as buses
from shared import ledger
from shared import objects as stores
from shared.bus import Bus
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.run import RunConfig, ScheduleConfig
from shared.settings import ServiceSettings
from tests.patience import eventually
from tests.unit.scheduler.test_scheduler_processes import Scheduler
from tests.unit.scheduler.world import REF

A, B, C = "r-a", "r-b", "r-c"
HEARD = (t.ROLLOUTS_REQUESTED, t.GROUPS_READY, t.RUNS_STATE)
SLOTS, GROUPS_PER_STEP, PROBLEMS = 16, 4, 3000
WINDOW = 300  # attempts that a share is measured over
WITHIN = 0.05


class Platform:
    """All but the scheduler. `used`: slot-seconds by run, of attempts that ended since `measure` was called."""

    def __init__(self, settings: ServiceSettings, bus: Bus) -> None:
        self.settings, self.bus, self.random = settings, bus, random.Random(0)
        self.queue: deque[m.RolloutRequested] = deque()
        self.holding: set[asyncio.Task[None]] = set()
        self.ready: dict[str, dict[str, None]] = {}
        self.steps: Counter[str] = Counter()
        self.states: dict[str, str] = {}
        self.used: defaultdict[str, float] = defaultdict(float)
        self.ended = 0

    async def join(self, run: str, share: float) -> None:
        # Samples may grow old here: a gate that closes would leave its run's slots to the others.
        schedule = ScheduleConfig(
            group_size=2,
            group_min=2,
            groups_per_step=GROUPS_PER_STEP,
            max_staleness=128,
            lease_s=60.0,
            share=share,
        )
        config = RunConfig(run=run, base=REF, pack=REF, pack_hidden=REF, schedule=schedule)
        objects = stores.connect(self.settings.objects_url)
        ref = await asyncio.to_thread(objects.put, f"runs/{run}/config.json", msgspec.json.encode(config))
        names = [f"{run}-p{number}" for number in range(PROBLEMS)]
        parts = [{name: ("debugging", "cell") for name in names[at : at + 500]} for at in range(0, PROBLEMS, 500)]
        await self.bus.publish_many(
            [
                *(
                    (t.PROBLEMS_ADMITTED, run, m.ProblemAdmitted(run=run, pack=REF, pack_hidden=REF, problems=part))
                    for part in parts
                ),
                (t.STEPS_COMMITTED, run, m.IncarnationStarted(run=run, incarnation=0, step=0, parent=-1)),
                *self._version(run),
                (t.RUNS_COMMANDS, run, m.RunCommand(run=run, action="start", config=ref, beside=True)),
            ]
        )

    async def leave(self, run: str) -> None:
        await self.bus.publish(t.RUNS_COMMANDS, run, m.RunCommand(run=run, action="stop", by="ann"))
        await eventually(lambda: self.states.get(run) == "finished", f"the end of {run}")

    async def measure(self, settle: int = 4 * SLOTS) -> dict[str, float]:
        """Return each run's part of the slot-seconds of WINDOW attempts. `settle`: attempts that end before and do not count."""
        await self._end(settle)
        self.used.clear()
        await self._end(WINDOW)
        whole = sum(self.used.values())
        return {run: used / whole for run, used in self.used.items()}

    async def _end(self, count: int) -> None:
        until = self.ended + count
        await eventually(lambda: self.ended >= until, f"the end of {count} attempts", 120.0)

    async def live(self) -> None:
        async for delivery in self.bus.deliveries(HEARD, group=None, max_in_flight=1024):
            match delivery.message:
                case m.RolloutRequested() as request:
                    self.queue.append(request)
                    self._take()
                case m.GroupReady() as ready:
                    self.ready.setdefault(ready.run, {})[ready.group] = None
                    await self._train(ready.run)
                case m.RunStatus() as status:
                    self.states[status.run] = status.state
            delivery.done()

    def _take(self) -> None:
        while self.queue and len(self.holding) < SLOTS:
            work = asyncio.create_task(self._attempt(self.queue.popleft()))
            self.holding.add(work)
            work.add_done_callback(self._over)

    def _over(self, work: asyncio.Task[None]) -> None:
        self.holding.discard(work)
        if not work.cancelled():
            work.result()
            self._take()

    async def _attempt(self, request: m.RolloutRequested) -> None:
        run, began = request.run, asyncio.get_running_loop().time()
        name = request.key.attempt
        await self.bus.publish(t.ATTEMPTS_PROGRESS, name, m.AttemptClaimed(run=run, key=request.key, worker="w"))
        await asyncio.sleep(self.random.uniform(0.15, 0.3))
        common: dict[str, Any] = {
            "run": run, "key": request.key, "trajectory": REF, "effort": m.Effort(turns=1), "stop": m.StopReason.submitted,
            "oldest_version": self.steps[run], "newest_version": self.steps[run], "reward_config": request.reward_config,
        }  # fmt: skip
        solved = self.random.random() < 0.4
        verdict = m.Verdict(solved=solved, passed=int(solved), total=1)
        finished = m.RolloutFinished(
            **common, pack_hidden=REF, oldest_kv_version=self.steps[run], worker="w", seconds=0.2
        )
        scored = m.RolloutScored(**common, verdict=verdict, reward=float(solved), terms={})
        await self.bus.publish_many([(t.ROLLOUTS_FINISHED, name, finished), (t.ROLLOUTS_SCORED, name, scored)])
        self.used[run] += asyncio.get_running_loop().time() - began
        self.ended += 1

    async def _train(self, run: str) -> None:
        while len(ready := self.ready[run]) >= GROUPS_PER_STEP:
            groups = dict.fromkeys(list(ready)[:GROUPS_PER_STEP], 0)
            for group in groups:
                del ready[group]
            self.steps[run] += 1
            step = self.steps[run]
            committed = m.StepCommitted(run=run, incarnation=0, step=step, serial=step, groups=groups)
            await self.bus.publish_many([*self._version(run), (t.STEPS_COMMITTED, run, committed)])

    def _version(self, run: str) -> list[tuple[t.Topic, str, Any]]:
        """A published version, which the run's engine serves at once."""
        step = self.steps[run]
        published = m.PolicyPublished(run=run, serial=step, incarnation=0, step=step, parent=step - 1, manifest=REF)
        applied = m.PolicyApplied(run=run, replica=f"engine-{run}", url=f"http://{run}", serial=step)
        return [(t.POLICIES_PUBLISHED, run, published), (t.POLICIES_APPLIED, f"engine-{run}", applied)]


@contextlib.asynccontextmanager
async def platform(state: Path) -> AsyncIterator[Platform]:
    settings = ServiceSettings(state=state)
    bus = buses.connect(settings.bus_url, client="others")
    one = Platform(settings, bus)
    scheduler = Scheduler(state, "scheduler")
    living = asyncio.create_task(one.live())
    try:
        yield one
        if living.done():
            living.result()
        assert scheduler.stop() == 0
    finally:
        working = [living, *one.holding]
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await bus.close()
        if not scheduler.ended():
            scheduler.kill()
        scheduler.log.close()
        Scheduler.alive.remove(scheduler)


@pytest.mark.nightly
@pytest.mark.timeout(300)  # half a minute on a free machine: shares show over many attempts alone
def test_two_runs_share_the_slots_as_they_are_told_to_while_a_third_joins_and_leaves(tmp_path: Path) -> None:
    async def story() -> None:
        async with platform(tmp_path) as here:
            await here.join(A, 7)
            await here.join(B, 3)
            found = await here.measure(8 * SLOTS)
            assert found[A] == pytest.approx(0.7, abs=WITHIN)
            await here.join(C, 10)
            await eventually(lambda: here.steps[C] > 0, "the third run's first step")
            found = await here.measure()
            assert [found[run] for run in (A, B, C)] == pytest.approx([0.35, 0.15, 0.5], abs=WITHIN)
            await here.leave(C)
            found = await here.measure()
            assert found.get(C, 0.0) == 0.0
            assert found[A] == pytest.approx(0.7, abs=WITHIN)
            assert found[A] + found[B] == pytest.approx(1.0)

    asyncio.run(story())
    engine = ledger.connect(ServiceSettings(state=tmp_path).ledger_url, read_only=True)
    for run in (A, B, C):
        assert audit(engine, run, max_staleness=128).findings == []
    engine.dispose()
