"""The whole path of an attempt, requested → trained, with a real scheduler and ledger and peers that do no work: what the
data plane alone adds to an attempt's life."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from shared import bus as buses
from shared import objects as stores
from shared.bus import Bus
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.ids import new_run_id
from shared.contracts.run import Ref, RunConfig, ScheduleConfig
from shared.settings import ServiceSettings

REF = Ref(key="k", size=1, checksum="c" * 32)
HEARD = (t.ROLLOUTS_REQUESTED, t.GROUPS_READY, t.RUNS_STATE)
PROBLEMS = 5_000
WITHIN_S = 300.0


class Peers:
    """Curator, worker, grader, engine and trainer at once: every answer is given when its question is heard."""

    def __init__(self, bus: Bus, config: RunConfig) -> None:
        self.bus, self.config, self.run = bus, config, config.run
        self.asked: dict[str, list[float]] = {}  # group -> when its attempts were heard of
        self.seconds: list[float] = []  # per trained attempt
        self.waiting: dict[str, m.GroupReady] = {}
        self.step = 0

    async def begin(self, config: Ref) -> None:
        problems = {f"p{i}": ("debugging", f"cell{i}") for i in range(PROBLEMS)}
        names = list(problems)
        admitted = [
            m.ProblemAdmitted(run=self.run, pack=REF, pack_hidden=REF, problems={n: problems[n] for n in names[i::10]})
            for i in range(10)
        ]
        start = m.RunCommand(run=self.run, action="start", config=config)
        incarnation = m.IncarnationStarted(run=self.run, incarnation=0, step=0, parent=-1)
        await self.bus.publish_many(
            [
                *((t.PROBLEMS_ADMITTED, self.run, one) for one in admitted),
                (t.RUNS_COMMANDS, self.run, start),
                (t.STEPS_COMMITTED, self.run, incarnation),
                *self._publication(0),
            ]
        )

    def _publication(self, serial: int) -> list[tuple[t.Topic, str, Any]]:
        published = m.PolicyPublished(run=self.run, serial=serial, incarnation=0, step=serial, parent=-1, manifest=REF)
        applied = m.PolicyApplied(run=self.run, replica="i", url="", serial=serial)
        return [(t.POLICIES_PUBLISHED, self.run, published), (t.POLICIES_APPLIED, "i", applied)]

    async def live(self, attempts: int) -> None:
        """Until so many attempts are trained."""
        async for delivery in self.bus.deliveries(HEARD, group=None, max_in_flight=1024):
            match delivery.message:
                case m.RolloutRequested() as request if request.run == self.run:
                    self.asked.setdefault(request.key.group, []).append(time.perf_counter())
                    await self._answer(request)
                case m.GroupReady() as ready if ready.run == self.run and ready.group in self.asked:
                    self.waiting[ready.group] = ready
                    await self._train()
            delivery.done()
            if len(self.seconds) >= attempts:
                return

    async def _answer(self, request: m.RolloutRequested) -> None:
        common: dict[str, Any] = {
            "run": self.run, "key": request.key, "trajectory": REF, "effort": m.Effort(turns=1),
            "stop": m.StopReason.submitted, "oldest_version": request.policy_floor, "reward_config": request.reward_config,
        }  # fmt: skip
        finished = m.RolloutFinished(
            **common, pack_hidden=REF, oldest_kv_version=0, newest_version=self.step, worker="w", seconds=0.0
        )
        scored = m.RolloutScored(**common, verdict=m.Verdict(solved=True, passed=1, total=1), reward=1.0, terms={})
        name = request.key.attempt
        claimed = m.AttemptClaimed(run=self.run, key=request.key, worker="w")
        await self.bus.publish(t.ATTEMPTS_PROGRESS, name, claimed)  # one after the other, as the services do
        await self.bus.publish(t.ROLLOUTS_FINISHED, name, finished)
        await self.bus.publish(t.ROLLOUTS_SCORED, name, scored)

    async def _train(self) -> None:
        size = self.config.schedule.groups_per_step
        batch = sorted(self.waiting.values(), key=lambda group: group.sequence)[:size]
        if len(batch) < size:
            return
        self.step += 1
        ages = {g.group: self.step - 1 - min(x.oldest_version for x in g.members) for g in batch}
        step = m.StepCommitted(run=self.run, incarnation=0, step=self.step, serial=self.step, groups=ages)
        await self.bus.publish_many([*self._publication(self.step), (t.STEPS_COMMITTED, self.run, step)])
        now = time.perf_counter()
        for group in batch:
            del self.waiting[group.group]
            self.seconds += [now - asked for asked in self.asked.pop(group.group)]


def milliseconds(state: Path, variables: dict[str, str], attempts: int) -> list[float]:
    """From the request in a worker's hand to the durable commit of the step that trained it, per attempt. `variables`: the
    servers' settings; none: the embedded adapters below `state`."""
    environment = {
        **os.environ,
        **variables,
        "ETUDE_STATE": str(state),
        "ETUDE_PORT": "0",
        "ETUDE_LOG_LEVEL": "WARNING",
    }
    state.mkdir(parents=True, exist_ok=True)
    with (state / "scheduler.log").open("wb") as log:
        scheduler = subprocess.Popen(
            [sys.executable, "-m", "services.scheduler"], env=environment, stdout=log, stderr=log
        )
        try:
            return asyncio.run(_measure(state, variables, attempts))
        finally:
            scheduler.send_signal(signal.SIGKILL)
            scheduler.wait()


async def _measure(state: Path, variables: dict[str, str], attempts: int) -> list[float]:
    os.environ.update(variables)  # the object store's credentials are read from there
    settings = ServiceSettings(state=state)
    bus = buses.connect(settings.bus_url, client="bench")
    schedule = ScheduleConfig(group_size=2, group_min=2, groups_per_step=2, minutes=0)
    config = RunConfig(run=new_run_id(), base=REF, pack=REF, pack_hidden=REF, schedule=schedule)
    peers = Peers(bus, config)
    try:
        stored = stores.connect(settings.objects_url).put(f"runs/{config.run}/config.json", msgspec.json.encode(config))
        await peers.begin(stored)
        async with asyncio.timeout(WITHIN_S):
            await peers.live(attempts)
    finally:
        with contextlib.suppress(buses.BusUnavailable):
            await bus.publish(t.RUNS_COMMANDS, config.run, m.RunCommand(run=config.run, action="stop"))
        await bus.close()
        for name in variables:
            os.environ.pop(name, None)
    return [1000 * seconds for seconds in peers.seconds]
