"""A world of several runs around one scheduler: shared workers with so many slots, a trainer and an engine for each run.

As in `world` everything is deterministic under a seed, time is a number and the ledger is a real one. Trainers take no time, so
that slots alone are scarce. The scheduler may be killed, before or after its commit.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Engine

from services.scheduler.desk import Desk
from services.scheduler.store import Store
from services.scheduler.working_set import WorkingSet
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.run import Ref, RunConfig, ScheduleConfig
from tests.unit.scheduler.world import REF, Sent

Lasts = Callable[[random.Random], float]
GROUPS_PER_STEP = 4


@dataclass
class Taken:
    request: m.RolloutRequested
    oldest: int
    left: int  # ticks


@dataclass
class Trainer:
    step: int = 0
    served: int = 0


def share_of(run: str, share: float) -> RunConfig:
    # Samples may grow old here: a gate that closes would leave its run's slots to the others.
    schedule = ScheduleConfig(
        group_size=4, group_min=2, groups_per_step=GROUPS_PER_STEP, max_staleness=128, lease_s=60.0, share=share
    )
    return RunConfig(run=run, base=REF, pack=REF, pack_hidden=REF, schedule=schedule)


class Several:
    """`lasts`: run -> the ticks of one of its attempts."""

    def __init__(self, engine: Engine, lasts: dict[str, Lasts], *, slots: int = 24, seed: int = 0) -> None:
        self.engine, self.lasts, self.slots, self.random = engine, lasts, slots, random.Random(seed)
        self.configs: dict[str, RunConfig] = {}
        self.trainers: dict[str, Trainer] = {}
        self.now, self.offsets = 1000.0, 0
        self.inbox: deque[Sent] = deque()
        self.queue: deque[m.RolloutRequested] = deque()
        self.taken: dict[str, Taken] = {}
        self.heard: set[Any] = set()  # requests and announcements: a scheduler that was killed says some twice
        self.ready: dict[str, list[str]] = {}
        self.marks: dict[str, int] = {}
        self.used: Counter[str] = Counter()  # slot-seconds by run
        self.begin_again()

    def begin_again(self) -> None:
        """A scheduler that knows what the ledger knows."""
        self.desk = Desk(Store(self.engine), lambda ref: self.configs[ref.key])
        self.marks = {}
        self._publish([one for _, one in self.desk.store.pending()])

    def join(self, run: str, share: float, problems: int = 3000) -> None:
        self.configs[run] = share_of(run, share)
        self.trainers[run] = Trainer()
        packs = {f"{run}-p{i}": ("debugging", f"cell{i % 17}") for i in range(problems)}
        names = list(packs)
        for part in range(0, problems, 500):
            some = {name: packs[name] for name in names[part : part + 500]}
            self.say(t.PROBLEMS_ADMITTED, m.ProblemAdmitted(run=run, pack=REF, pack_hidden=REF, problems=some))
        self.say(t.STEPS_COMMITTED, m.IncarnationStarted(run=run, incarnation=0, step=0, parent=-1))
        self._version(run)
        self.say(t.RUNS_COMMANDS, m.RunCommand(run=run, action="start", config=self._ref(run), beside=True))

    def change(self, run: str, share: float) -> None:
        self.configs[run] = share_of(run, share)
        word = m.RunCommand(run=run, action="reconfigure", config=self._ref(run), by="ann")
        self.say(t.RUNS_COMMANDS, word)

    def leave(self, run: str) -> None:
        self.say(t.RUNS_COMMANDS, m.RunCommand(run=run, action="stop", by="ann"))

    def working(self, run: str) -> WorkingSet:
        return self.desk.sets[run]

    def shares(self, *runs: str) -> dict[str, float]:
        total = sum(self.used[run] for run in runs) or 1
        return {run: self.used[run] / total for run in runs}

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            self.tick()

    def settle(self, ticks: int) -> None:
        """Run on, and count slot-seconds from then on."""
        self.run(ticks)
        self.used.clear()

    def tick(self) -> None:
        self.now += 1.0
        batch: list[Any] = list(self.inbox)
        result = self.desk.handle(batch, self.now, self.marks)
        assert not result.refused, result.refused
        self.inbox.clear()
        self._publish([one for _, one in result.outbox])
        self._work()
        self._train()
        for taken in self.taken.values():
            self.used[taken.request.run] += 1

    def kill(self, *, after_commit: bool) -> None:
        """The scheduler dies in the middle of a batch."""
        if after_commit:
            self.now += 1.0
            batch: list[Any] = list(self.inbox)
            self.desk.handle(batch, self.now, self.marks)
        self.begin_again()

    def say(self, topic: t.Topic, message: Any) -> None:
        self.offsets += 1
        self.inbox.append(Sent(topic, message, self.offsets))

    def _ref(self, run: str) -> Ref:
        return msgspec.structs.replace(REF, key=run)

    def _publish(self, messages: list[Any]) -> None:
        for one in messages:
            message = one.message
            self.marks[message.run] = max(self.marks.get(message.run, 0), one.sequence)
            match message:
                case m.RolloutRequested() if (message.key.attempt, message.key.epoch) not in self.heard:
                    self.heard.add((message.key.attempt, message.key.epoch))
                    self.queue.append(message)
                case m.GroupReady() if message.group not in self.heard:
                    self.heard.add(message.group)
                    self.ready.setdefault(message.run, []).append(message.group)
                case m.AttemptCancel(mode="drop"):
                    self.taken.pop(str(message.attempt), None)
                    self.queue = deque(one for one in self.queue if one.key.attempt != message.attempt)

    def _work(self) -> None:
        for name, taken in list(self.taken.items()):
            taken.left -= 1
            if taken.left <= 0:
                del self.taken[name]
                self._finish(taken)
        while self.queue and len(self.taken) < self.slots:
            request = self.queue.popleft()
            ticks = max(1, round(self.lasts[request.run](self.random)))
            self.taken[request.key.attempt] = Taken(request, self.trainers[request.run].served, ticks)
            self.say(t.ATTEMPTS_PROGRESS, m.AttemptClaimed(run=request.run, key=request.key, worker="w"))
        for run in self.trainers:
            held = {name: one for name, one in self.taken.items() if one.request.run == run}
            beat = {name: (one.request.key.epoch, one.oldest) for name, one in held.items()}
            if beat and self.now % 5 == 0:
                self.say(t.ATTEMPTS_PROGRESS, m.AttemptHeartbeat(run=run, worker="w", attempts=beat))

    def _finish(self, taken: Taken) -> None:
        request, solved = taken.request, self.random.random() < 0.4
        common: dict[str, Any] = {
            "run": request.run,
            "key": request.key,
            "stop": m.StopReason.submitted,
            "trajectory": REF,
            "effort": m.Effort(turns=2),
            "reward_config": request.reward_config,
            "oldest_version": taken.oldest,
            "newest_version": self.trainers[request.run].served,
        }
        finished = m.RolloutFinished(**common, pack_hidden=REF, oldest_kv_version=taken.oldest, worker="w", seconds=1.0)
        self.say(t.ROLLOUTS_FINISHED, finished)
        verdict = m.Verdict(solved=solved, passed=int(solved), total=1)
        self.say(t.ROLLOUTS_SCORED, m.RolloutScored(**common, verdict=verdict, reward=float(solved), terms={}))

    def _train(self) -> None:
        for run, trainer in self.trainers.items():
            ready = self.ready.get(run, [])
            while len(ready) >= GROUPS_PER_STEP:
                groups, ready[:GROUPS_PER_STEP] = dict.fromkeys(ready[:GROUPS_PER_STEP], 0), []
                trainer.step += 1
                self._version(run)
                committed = m.StepCommitted(
                    run=run, incarnation=0, step=trainer.step, serial=trainer.step, groups=groups
                )
                self.say(t.STEPS_COMMITTED, committed)

    def _version(self, run: str) -> None:
        """The trainer publishes, and the run's engine serves it at once."""
        trainer = self.trainers[run]
        trainer.served = trainer.step
        published = m.PolicyPublished(
            run=run, serial=trainer.step, incarnation=0, step=trainer.step, parent=trainer.step - 1, manifest=REF
        )
        self.say(t.POLICIES_PUBLISHED, published)
        applied = m.PolicyApplied(run=run, replica=f"engine-{run}", url=f"http://{run}", serial=trainer.step)
        self.say(t.POLICIES_APPLIED, applied)
