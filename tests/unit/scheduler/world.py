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
from services.scheduler.recovery import Checkpointed
from services.scheduler.store import Store
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.life import RunState
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
    probed: dict[str, tuple[int, int]] = field(default_factory=dict)  # problems that a probe tried -> attempts, solved
    capacity: int = 24  # attempts at a time
    duration: tuple[int, int] = (1, 4)  # ticks of an attempt
    slow: dict[int, int] = field(default_factory=dict)  # the how-manieth claimed attempt -> its ticks
    checkpoint_every: int = 2  # steps: what a dying trainer loses
    step_s: float = 0.0  # how long a step takes from the moment when its groups are there

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
        self.claims: list[m.IncarnationStarted] = []  # of trainers
        self.desk = self.new_desk()
        # The trainer.
        self.incarnation, self.step, self.serial, self.served = -1, 0, 0, 0
        self.groups: dict[str, m.GroupReady] = {}
        self.trained: dict[str, int] = {}  # in the trainer's present lineage -> step
        self.saved: tuple[int, dict[str, int]] = (0, {})
        self.saved_by = -1  # the incarnation that wrote it
        self.practised: dict[str, str] = {}  # problems, trained -> by which group
        self.aside: set[str] = set()  # what it cannot train
        self.looked_at: set[str] = set()  # groups of which it decided whether it can
        self.ages: list[int] = []
        self.steps_of: dict[int, int] = {}  # serial -> step, this lineage only
        self.begun: float | None = None  # when the step in hand began
        self.mended = -1  # the last version that it published again
        self.over = False  # the run is finished, as far as the trainer heard

    # Lives

    def new_desk(self) -> Desk:
        return Desk(Store(self.engine), lambda ref: self.run_config, **self.object_store())

    def object_store(self) -> dict[str, Any]:
        """What a desk reads there."""
        return {
            "read_checkpoint": lambda run: self.checkpoint(),
            "read_begun": lambda run, after: [one for one in self.claims if one.incarnation > after],
            "read_newest": lambda run, known: max(known, self.serial - 1),
        }

    def checkpoint(self) -> Checkpointed | None:
        """What the object store holds."""
        step, groups = self.saved
        serial = max((s for s, p in self.steps_of.items() if p <= step), default=0)
        return Checkpointed(self.saved_by, step, serial, frozenset(groups)) if step else None

    def start(self) -> None:
        packs = {f"p{i}": ("debugging", f"cell{i % 17}") for i in range(self.problems)}
        for part in range(0, self.problems, 100):
            some = dict(list(packs.items())[part : part + 100])
            tried = {name: self.probed[name] for name in some if name in self.probed}
            admitted = m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems=some, probed=tried)
            self.send(t.PROBLEMS_ADMITTED, admitted)
        self.send(t.RUNS_COMMANDS, m.RunCommand(run=RUN, action="start", config=REF))
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
        self.send(t.RUNS_COMMANDS, m.RunCommand(run=RUN, action="pause", by="alice"))

    def resume(self) -> None:
        self.held = False
        self.send(t.RUNS_COMMANDS, m.RunCommand(run=RUN, action="resume", by="alice"))

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
                case m.RolloutFinished():  # to be graded again
                    self.send(t.ROLLOUTS_FINISHED, one.message)
                    self.grade(one.message)
                case m.RunStatus():
                    self.over = one.message.state is RunState.finished
                    if one.message.damaged > self.mended:
                        self.mended = one.message.damaged
                        self.publish_policy()  # the same weights, as a base
                case m.GroupReady() if one.message.incarnation >= self.incarnation:
                    self.groups[one.message.group] = one.message
                    if one.message.group in self.aside:
                        self.say_aside(one.message.group)  # as the real one does: the ledger has lost that it said so
                case m.AttemptCancel(attempt=name, mode="drop"):
                    for held in [held for held in self.running if held.partition("#")[0] == name]:
                        del self.running[held]
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
        finished = m.RolloutFinished(
            run=RUN,
            key=key,
            stop=m.StopReason.submitted,
            trajectory=REF,
            effort=m.Effort(thinking_tokens=10, turns=2),
            reward_config=running.request.reward_config,
            pack_hidden=REF,
            oldest_version=oldest,
            oldest_kv_version=oldest,
            newest_version=max(running.versions),
            worker="w",
            seconds=1.0,
        )
        self.send(t.ROLLOUTS_FINISHED, finished)
        self.grade(finished)

    def grade(self, finished: m.RolloutFinished) -> None:
        if self.random.random() < self.trouble.grading_fails:
            failed = m.RolloutFailed(
                run=RUN,
                key=finished.key,
                reason="no sandbox",
                worker="g",
                trajectory=finished.trajectory,
                again=self.random.choice(["sample", "grade"]),
            )
            self.send(t.ROLLOUTS_SCORED, failed)
            return
        reward = self.verdict(finished)
        scored = m.RolloutScored(
            run=RUN,
            key=finished.key,
            verdict=m.Verdict(solved=reward > 0, passed=int(reward), total=1),
            reward=reward,
            terms={},
            reward_config=finished.reward_config,
            trajectory=finished.trajectory,
            effort=finished.effort,
            stop=finished.stop,
            oldest_version=finished.oldest_version,
            newest_version=finished.newest_version,
        )
        self.send(t.ROLLOUTS_SCORED, scored)

    def verdict(self, finished: m.RolloutFinished) -> float:
        return float(self.random.random() < 0.4)

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
        self.aside.clear()
        self.looked_at.clear()
        self.practised = {p: g for p, g in self.practised.items() if g in self.trained}
        self.begun = None
        self.groups.clear()  # it reads what is announced to it
        began = m.IncarnationStarted(run=RUN, incarnation=self.incarnation, step=self.step, parent=parent)
        self.claims.append(began)
        self.send(t.STEPS_COMMITTED, began)
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
        for name in sorted(self.groups.keys() - self.looked_at):  # once for each: else a slow world never fills a step
            self.looked_at.add(name)
            if name not in self.trained and self.random.random() < self.trouble.quarantines:
                self.quarantine(name)
        for ready in sorted(self.groups.values(), key=lambda g: g.sequence):
            if self.practised.get(ready.problem, ready.group) != ready.group:
                self.quarantine(ready.group)  # as the real one does
        done = self.trained.keys() | self.aside
        waiting = sorted((g for g in self.groups.values() if g.group not in done), key=lambda g: g.sequence)
        size = self.run_config.schedule.groups_per_step
        if self.begun is None and (len(waiting) < size or (self.over and self.step_s)):
            return
        self.begun = self.now if self.begun is None else self.begun
        if self.now - self.begun < self.step_s:
            return
        self.begun = None
        if len(waiting) < size:
            return
        self.step += 1
        batch = waiting[:size]
        self.ages.append(max(self.age(member.oldest_version) for group in batch for member in group.members))
        for group in batch:
            self.trained[group.group] = self.step
            self.practised[group.problem] = group.group
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
            self.saved, self.saved_by = (self.step, dict(self.trained)), self.incarnation

    def quarantine(self, group: str) -> None:
        if group and group not in self.aside:
            self.aside.add(group)
            self.say_aside(group)

    def say_aside(self, group: str) -> None:
        word = m.GroupQuarantined(run=RUN, group=group, reason="not finite", incarnation=self.incarnation)
        self.offsets += 1
        self.delayed.append(Sent(t.GROUPS_QUARANTINED, word, self.offsets))

    def age(self, version: int) -> int:
        """Of a token on this lineage, for the step in hand; dead versions are the audit's to judge."""
        return self.step - 1 - self.steps_of.get(version, self.step - 1)
