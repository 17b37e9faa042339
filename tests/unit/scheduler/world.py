"""A small world around the scheduler: workers, graders, a trainer and a replica that speak its messages.

Everything is deterministic under a seed. The world misbehaves on purpose: it delivers twice and out of order, loses
workers, kills trainers, and kills the scheduler before, after and in the middle of what it does. No clock, no network:
time is a number, the ledger is a real one.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Engine

from services.scheduler.desk import Desk
from services.scheduler.records import Message
from services.scheduler.store import Store
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.run import Ref, RunConfig, ScheduleConfig

RUN = "r-test"
REF = Ref(key="k", size=1, checksum="c" * 32)


@dataclass(frozen=True, slots=True)
class Sent:
    topic: t.Topic
    message: Any
    offset: int = 0


@dataclass(slots=True)
class Trouble:
    """Chances per event, 0 to 1."""

    duplicate: float = 0.0
    delay: float = 0.0  # a message is overtaken by later ones
    worker_dies: float = 0.0
    grading_fails: float = 0.0
    trainer_dies: float = 0.0
    quarantines: float = 0.0  # the trainer sets a group aside; its word is overtaken by others
    scheduler_dies: float = 0.0  # before its commit, or after it and before the relay


@dataclass(slots=True)
class Running:
    request: m.RolloutRequested
    versions: list[int]
    left: int  # ticks


def config(**schedule: Any) -> RunConfig:
    defaults: dict[str, Any] = {
        "group_size": 4,
        "group_min": 2,
        "groups_per_step": 3,
        "max_staleness": 2,
        "lease_s": 5.0,
    }
    return RunConfig(run=RUN, base=REF, pack=REF, pack_hidden=REF, schedule=ScheduleConfig(**{**defaults, **schedule}))


@dataclass
class World:
    engine: Engine
    run_config: RunConfig
    seed: int = 0
    trouble: Trouble = field(default_factory=Trouble)
    problems: int = 400
    capacity: int = 24  # attempts at a time
    duration: tuple[int, int] = (1, 4)  # ticks of an attempt
    slow: dict[int, int] = field(default_factory=dict)  # the how-manieth claimed attempt -> its ticks
    checkpoint_every: int = 2  # steps: what a dying trainer loses

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.now = 1000.0
        self.inbox: deque[Sent] = deque()
        self.delayed: list[Sent] = []
        self.queue: deque[m.RolloutRequested] = deque()
        self.running: dict[str, Running] = {}
        self.held = False  # the run is paused: workers claim nothing
        self.claimed = 0
        self.published: list[Message] = []  # all that reached the bus
        self.refused: list[str] = []
        self.marks: dict[str, int] = {}
        self.offsets = 0
        self.desk = self.new_desk()
        # The trainer.
        self.incarnation, self.step, self.serial, self.served = -1, 0, 0, 0
        self.groups: dict[str, m.GroupReady] = {}
        self.trained: dict[str, int] = {}  # in the trainer's present lineage -> step
        self.saved: tuple[int, dict[str, int]] = (0, {})
        self.ages: list[int] = []
        self.steps_of: dict[int, int] = {}  # serial -> step, this lineage only

    # Lives

    def new_desk(self) -> Desk:
        return Desk(Store(self.engine), lambda ref: self.run_config)

    def start(self) -> None:
        packs = {f"p{i}": ("debugging", f"cell{i % 17}") for i in range(self.problems)}
        for part in range(0, self.problems, 100):
            some = dict(list(packs.items())[part : part + 100])
            self.send(t.PROBLEMS_ADMITTED, m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems=some))
        self.send(t.RUNS_CONTROL, m.RunControl(run=RUN, action="start", config=REF))
        self.begin_incarnation()

    def send(self, topic: t.Topic, message: Any) -> None:
        self.offsets += 1
        sent = Sent(topic, message, self.offsets)
        ordered = topic.partitions == 1  # the order within a key holds
        if not ordered and self.random.random() < self.trouble.delay:
            self.delayed.append(sent)
        else:
            self.inbox.append(sent)
        if not ordered and self.random.random() < self.trouble.duplicate:
            self.delayed.append(sent)

    def pause(self) -> None:
        self.held = True
        self.send(t.RUNS_CONTROL, m.RunControl(run=RUN, action="pause", by="alice"))

    def resume(self) -> None:
        self.held = False
        self.send(t.RUNS_CONTROL, m.RunControl(run=RUN, action="resume", by="alice"))

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        if self.delayed and self.random.random() < 0.5:
            self.random.shuffle(self.delayed)
            self.inbox.extend(self.delayed)
            self.delayed.clear()
        self.schedule()
        self.work()
        self.train()

    # The scheduler's process

    def schedule(self) -> None:
        size = self.random.randint(1, 40)
        batch = [self.inbox[i] for i in range(min(size, len(self.inbox)))]
        dies = self.random.random() < self.trouble.scheduler_dies
        if dies and self.random.random() < 0.5:
            self.restart()  # it had read them and not committed: they come again
            return
        result = self.desk.handle(batch, self.now, self.marks)
        if dies:
            self.restart()  # committed; neither acknowledged nor relayed
            return
        for _ in batch:
            self.inbox.popleft()
        self.refused.extend(result.refused.values())
        self.publish([message for _, message in result.outbox])

    def restart(self) -> None:
        self.desk = self.new_desk()
        self.marks = {}
        self.publish([message for _, message in self.desk.store.pending()])

    def publish(self, messages: list[Message]) -> None:
        for one in messages:
            self.published.append(one)
            self.marks[RUN] = max(self.marks.get(RUN, 0), one.sequence)
            match one.message:
                case m.RolloutRequested():
                    self.queue.append(one.message)
                case m.GroupReady() if one.message.incarnation >= self.incarnation:
                    self.groups[one.message.group] = one.message
                case m.AttemptCancel(attempt=name, mode="drop"):
                    self.running.pop(str(name), None)
                    self.queue = deque(request for request in self.queue if request.key.attempt != name)
                case m.AttemptCancel(attempt=name):
                    if name in self.running:
                        self.running[str(name)].left = 0

    # Workers and graders

    def work(self) -> None:
        while self.queue and len(self.running) < self.capacity and not self.held:
            request = self.queue.popleft()
            if request.policy_floor > self.served:
                self.queue.append(request)
                break
            ticks = self.slow.get(self.claimed, self.random.randint(*self.duration))
            self.claimed += 1
            self.running[request.key.attempt] = Running(request, [], ticks)
            self.send(t.ATTEMPTS_PROGRESS, m.AttemptClaimed(run=RUN, key=request.key, worker="w"))
        for name, running in list(self.running.items()):
            running.versions.append(self.served)
            running.left -= 1
            if self.random.random() < self.trouble.worker_dies:
                del self.running[name]
                if self.random.random() < 0.5:
                    failed = m.RolloutFailed(run=RUN, key=running.request.key, reason="the sandbox died", worker="w")
                    self.send(t.ROLLOUTS_FINISHED, failed)
            elif running.left <= 0:
                del self.running[name]
                self.finish(running)
        beat = {n: (r.request.key.epoch, min(r.versions, default=-1)) for n, r in self.running.items()}
        if beat:
            self.send(t.ATTEMPTS_PROGRESS, m.AttemptHeartbeat(run=RUN, worker="w", attempts=beat))

    def finish(self, running: Running) -> None:
        key, oldest = running.request.key, min(running.versions)
        effort = m.Effort(thinking_tokens=10, turns=2)
        solved = self.random.random() < 0.4
        common: dict[str, Any] = {
            "trajectory": REF,
            "effort": effort,
            "stop": m.StopReason.submitted,
            "oldest_version": oldest,
        }
        reward_config = running.request.reward_config
        self.send(
            t.ROLLOUTS_FINISHED,
            m.RolloutFinished(
                run=RUN,
                key=key,
                reward_config=reward_config,
                pack_hidden=REF,
                oldest_kv_version=oldest,
                newest_version=max(running.versions),
                worker="w",
                seconds=1.0,
                **common,
            ),
        )
        if self.random.random() < self.trouble.grading_fails:
            self.send(t.ROLLOUTS_SCORED, m.RolloutFailed(run=RUN, key=key, reason="no sandbox", worker="g"))
            return
        verdict = m.Verdict(solved=solved, passed=int(solved), total=1)
        scored = m.RolloutScored(
            run=RUN, key=key, verdict=verdict, reward=float(solved), terms={}, reward_config=reward_config, **common
        )
        self.send(t.ROLLOUTS_SCORED, scored)

    # The trainer and the replica

    def run_until(self, state: str, ticks: int = 600) -> None:
        """Raises AssertionError when the run has not come so far after so many ticks."""
        for _ in range(ticks):
            self.tick()
            if self.state == state:
                return
        raise AssertionError(f"after {ticks} ticks the run is {self.state!r} at step {self.step}, expected {state!r}")

    @property
    def state(self) -> str:
        ws = self.desk.sets.get(RUN)
        return ws.head.state.value if ws else ""

    def begin_incarnation(self) -> None:
        parent = self.incarnation
        self.incarnation += 1
        self.step, self.trained = self.saved[0], dict(self.saved[1])
        self.steps_of = {s: p for s, p in self.steps_of.items() if p <= self.step}
        self.aside: set[str] = set()  # what it cannot train
        self.groups.clear()  # it reads what is announced to it
        self.send(
            t.STEPS_COMMITTED,
            m.IncarnationStarted(run=RUN, incarnation=self.incarnation, step=self.step, parent=parent),
        )
        self.publish_policy()

    def publish_policy(self) -> None:
        serial = self.serial if self.incarnation or self.step else 0
        self.steps_of[serial] = self.step
        self.send(
            t.POLICIES_PUBLISHED,
            m.PolicyPublished(
                run=RUN, serial=serial, incarnation=self.incarnation, step=self.step, parent=-1, manifest=REF
            ),
        )
        self.served = serial
        self.serial = serial + 1
        applied = m.PolicyApplied(run=RUN, replica="inference", url="http://x", serial=serial)
        self.send(t.POLICIES_APPLIED, applied)

    def train(self) -> None:
        if self.random.random() < self.trouble.trainer_dies:
            self.begin_incarnation()
            return
        if self.groups and self.random.random() < self.trouble.quarantines:
            self.quarantine(self.random.choice(sorted(self.groups.keys() - self.trained.keys()) or [""]))
        done = self.trained.keys() | self.aside
        waiting = sorted((g for g in self.groups.values() if g.group not in done), key=lambda g: g.sequence)
        size = self.run_config.schedule.groups_per_step
        if len(waiting) < size:
            return
        self.step += 1
        batch = waiting[:size]
        self.ages.append(max(self.age(member.oldest_version) for group in batch for member in group.members))
        for group in batch:
            self.trained[group.group] = self.step
        serial = self.serial
        self.publish_policy()
        self.send(
            t.STEPS_COMMITTED,
            m.StepCommitted(
                run=RUN,
                incarnation=self.incarnation,
                step=self.step,
                serial=serial,
                groups={g.group: self.ages[-1] for g in batch},
            ),
        )
        if self.step % self.checkpoint_every == 0:
            self.saved = (self.step, dict(self.trained))

    def quarantine(self, group: str) -> None:
        if group and group not in self.aside:
            self.aside.add(group)
            word = m.GroupQuarantined(run=RUN, group=group, reason="not finite", incarnation=self.incarnation)
            self.offsets += 1
            self.delayed.append(Sent(t.GROUPS_QUARANTINED, word, self.offsets))

    def age(self, version: int) -> int:
        """Of a token on this lineage, for the step in hand; dead versions are the audit's to judge."""
        return self.step - 1 - self.steps_of.get(version, self.step - 1)
