"""The scheduler as a real process on a real bus and a real ledger, killed and doubled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import psutil
import pytest
from sqlalchemy import text

from services.scheduler.audit import audit, counts
from shared import bus as buses
from shared import ledger
from shared import objects as stores
from shared.bus import Bus
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.run import RunConfig
from shared.settings import ServiceSettings
from tests.patience import eventually, patient
from tests.unit.scheduler.ledgers import ledger_url
from tests.unit.scheduler.world import REF, RUN, config

ROOT = Path(__file__).parents[3]
HEARD = (t.ROLLOUTS_REQUESTED, t.GROUPS_READY, t.RUNS_STATE)


@pytest.fixture(autouse=True)
def no_orphans(platform_stores: None) -> Iterator[None]:
    """Whatever becomes of a test, its processes end with it, before their stores do."""
    yield
    for scheduler in Scheduler.alive:
        if not scheduler.ended():
            scheduler.kill()
        scheduler.log.close()
    Scheduler.alive.clear()


class Scheduler:
    """A process. `name` tells two of them apart."""

    alive: ClassVar[list[Scheduler]] = []

    def __init__(self, state: Path, name: str, **environment: str) -> None:
        self.state, self.name = state, name
        self.log = (state / f"{name}.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.scheduler.scheduler_process"],
            cwd=ROOT,
            env={
                **os.environ,
                "ETUDE_STATE": str(state),
                "ETUDE_NAME": name,
                "ETUDE_LEADERSHIP_S": "2",
                "ETUDE_BATCH_LINGER_S": "0.02",
                **environment,
            },
            stdout=self.log,
            stderr=self.log,
        )
        self.alive.append(self)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def frozen(self) -> bool:
        return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(patient(10))

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(patient(30))

    def waits(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError, OSError):
            url = json.loads((self.state / "run" / f"{self.name}.json").read_text())["url"]
            try:
                body = urllib.request.urlopen(f"{url}/readyz").read()
            except urllib.error.HTTPError as error:
                body = error.read()
            return [wait["waits_on"] for wait in json.loads(body)["waits"]]
        return ["it to start"]


class Others:
    """Everybody else: a worker that finishes what is asked for at once, a trainer that trains whatever is ready."""

    def __init__(self, bus: Bus, run_config: RunConfig) -> None:
        self.bus, self.config = bus, run_config
        self.requests: Counter[tuple[str, int]] = Counter()
        self.ready: Counter[str] = Counter()
        self.waiting: dict[str, m.GroupReady] = {}
        self.trained: set[str] = set()
        self.step = 0
        self.states: list[str] = []

    async def start(self) -> None:
        problems = {f"p{i}": ("debugging", f"cell{i % 5}") for i in range(1000)}
        ref = stores.connect(self.objects).put(f"runs/{RUN}/config.json", msgspec.json.encode(self.config))
        await self.bus.publish_many(
            [
                (t.PROBLEMS_ADMITTED, RUN, m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems=problems)),
                (t.RUNS_COMMANDS, RUN, m.RunCommand(run=RUN, action="start", config=ref)),
                (t.STEPS_COMMITTED, RUN, m.IncarnationStarted(run=RUN, incarnation=0, step=0, parent=-1)),
                *self.publication(0),
            ]
        )

    objects: str

    def publication(self, serial: int) -> list[tuple[t.Topic, str, Any]]:
        published = m.PolicyPublished(run=RUN, serial=serial, incarnation=0, step=serial, parent=-1, manifest=REF)
        applied = m.PolicyApplied(run=RUN, replica="i", url="", serial=serial)
        return [(t.POLICIES_PUBLISHED, RUN, published), (t.POLICIES_APPLIED, "i", applied)]

    async def live(self) -> None:
        async for delivery in self.bus.deliveries(HEARD, group=None, max_in_flight=1024):
            match delivery.message:
                case m.RolloutRequested() as request:
                    self.requests[request.key.attempt, request.key.epoch] += 1
                    await self.answer(request)
                case m.GroupReady() as ready:
                    self.ready[ready.group] += 1
                    if ready.group not in self.trained:
                        self.waiting[ready.group] = ready
                    await self.train()
                case m.RunStatus() as status:
                    self.states.append(status.state)
            delivery.done()

    async def answer(self, request: m.RolloutRequested) -> None:
        common: dict[str, Any] = {
            "run": RUN, "key": request.key, "trajectory": REF, "effort": m.Effort(turns=1), "stop": m.StopReason.submitted,
            "oldest_version": request.policy_floor, "reward_config": request.reward_config,
        }  # fmt: skip
        finished = m.RolloutFinished(
            **common, pack_hidden=REF, oldest_kv_version=0, newest_version=self.step, worker="w", seconds=0.1
        )
        scored = m.RolloutScored(**common, verdict=m.Verdict(solved=True, passed=1, total=1), reward=1.0, terms={})
        name = request.key.attempt
        await self.bus.publish_many(
            [
                (t.ATTEMPTS_PROGRESS, name, m.AttemptClaimed(run=RUN, key=request.key, worker="w")),
                (t.ROLLOUTS_FINISHED, name, finished),
                (t.ROLLOUTS_SCORED, name, scored),
            ]
        )

    async def train(self) -> None:
        size = self.config.schedule.groups_per_step
        batch = sorted(self.waiting.values(), key=lambda g: g.sequence)[:size]
        if len(batch) < size:
            return
        self.step += 1
        for group in batch:
            del self.waiting[group.group]
            self.trained.add(group.group)
        ages = {g.group: self.step - 1 - min(x.oldest_version for x in g.members) for g in batch}
        step = m.StepCommitted(run=RUN, incarnation=0, step=self.step, serial=self.step, groups=ages)
        await self.bus.publish_many([*self.publication(self.step), (t.STEPS_COMMITTED, RUN, step)])


@contextlib.asynccontextmanager
async def others(state: Path, run_config: RunConfig) -> AsyncIterator[Others]:
    settings = ServiceSettings(state=state)
    bus = buses.connect(settings.bus_url, client="others")
    peers = Others(bus, run_config)
    peers.objects = settings.objects_url
    living = asyncio.create_task(peers.live())
    try:
        await peers.start()
        yield peers
        if living.done():
            living.result()
    finally:
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        await bus.close()


async def until(there: Callable[[], Any], what: str, seconds: float = 120.0) -> None:
    await eventually(lambda: asyncio.to_thread(there), what, seconds, every=0.05)


def assert_kept(state: Path, peers: Others) -> None:
    """Every promise, and what the bus saw is what the ledger knows."""
    engine = ledger.connect(ServiceSettings(state=state).ledger_url, read_only=True)
    report = audit(engine, RUN, max_staleness=2)
    assert report.findings == []
    known = counts(engine, RUN)
    assert known["rollouts.requested"] == len(peers.requests)
    assert known["groups.ready"] == len(peers.ready)
    assert set(peers.ready) >= peers.trained
    assert max(epoch for _, epoch in peers.requests) == 0  # nothing was asked for a second time under a new epoch
    engine.dispose()


def test_kill_9_between_commit_and_relay_loses_and_doubles_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with others(tmp_path, config(max_steps=8)) as peers:
            for moment in ("ETUDE_TEST_DIE_AT", "ETUDE_TEST_DIE_AFTER"):
                scheduler = Scheduler(tmp_path, "scheduler", **{moment: "2"})
                await until(scheduler.ended, "death")
                assert scheduler.process.returncode == -signal.SIGKILL
            assert "finished" not in peers.states
            scheduler = Scheduler(tmp_path, "scheduler")
            await until(lambda: "finished" in peers.states, "end of the run")
            assert scheduler.stop() == 0
            assert peers.step == 8
            assert_kept(tmp_path, peers)

    asyncio.run(story())


def test_a_second_scheduler_waits_and_takes_over_when_the_first_is_killed(tmp_path: Path) -> None:
    async def story() -> None:
        async with others(tmp_path, config(max_steps=300)) as peers:
            first, second = Scheduler(tmp_path, "first"), Scheduler(tmp_path, "second")
            await until(lambda: peers.step >= 1, "first step")
            both = {"first": first, "second": second}
            await until(
                lambda: any("its turn to lead" in w for s in both.values() for w in s.waits()), "waiting scheduler"
            )
            waiting = next(s for s in both.values() if any("its turn to lead" in w for w in s.waits()))
            (first if waiting is second else second).kill()
            step = peers.step
            await until(lambda: peers.step > step + 1, "step under the other")
            await peers.bus.publish(t.RUNS_COMMANDS, RUN, m.RunCommand(run=RUN, action="stop"))
            await until(lambda: "finished" in peers.states, "end of the run")
            assert waiting.stop() == 0
            assert_kept(tmp_path, peers)

    asyncio.run(story())


@pytest.mark.parametrize("kind", ["postgresql", pytest.param("pooled", marks=pytest.mark.nightly)])
def test_a_leader_frozen_with_the_lease_locked_is_replaced_and_fenced_when_it_wakes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ledger_url(kind, tmp_path) as url:
        monkeypatch.setenv("ETUDE_LEDGER", url)
        engine = ledger.connect(url, read_only=True)

        def leader() -> tuple[int, str]:
            with engine.begin() as connection:
                row = connection.execute(text("SELECT term, holder FROM lease")).one()
            return row.term, json.loads(row.holder)["name"]

        async def story() -> None:
            async with others(tmp_path, config(max_steps=300)) as peers:
                lease = {"ETUDE_LEADERSHIP_S": "6"}  # as it is outside of tests
                first = Scheduler(tmp_path, "first", **lease, ETUDE_TEST_FREEZE_AT="8")
                await until(first.frozen, "leader that stands still")
                second = Scheduler(tmp_path, "second", **lease)
                await until(
                    lambda: any("first" in wait for wait in second.waits()), "scheduler that waits for the first"
                )
                await until(lambda: leader() == (2, "second"), "successor")
                first.process.send_signal(signal.SIGCONT)
                await until(lambda: any("second" in wait for wait in first.waits()), "old leader that waits its turn")
                step = peers.step
                await until(lambda: peers.step > step + 1, "step under the other")
                await peers.bus.publish(t.RUNS_COMMANDS, RUN, m.RunCommand(run=RUN, action="stop"))
                await until(lambda: "finished" in peers.states, "end of the run")
                assert (first.stop(), second.stop()) == (0, 0)
                assert_kept(tmp_path, peers)

        try:
            asyncio.run(story())
        finally:
            engine.dispose()
