"""Worlds by the thousand: the scheduler's own rules on a run in memory, among several workers, replicas and lagging topics.

What needs a ledger (forks, restarts) is in `world`. Here every rollout has a trajectory and a reward of its own, and the
true age of every token that is trained is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.scheduler import decisions, intake
from services.scheduler.control import Refused
from services.scheduler.decisions import Limits
from services.scheduler.desk import Result
from services.scheduler.listening import Listening
from services.scheduler.records import Changes, Head
from services.scheduler.working_set import WorkingSet
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.run import Ref, RunConfig, ScheduleConfig
from tests.unit.scheduler.world import REF, RUN, Running, Sent, World

FROM_WORKERS = (t.ATTEMPTS_PROGRESS, t.ROLLOUTS_FINISHED, t.ROLLOUTS_SCORED)


class MemoryDesk:
    """As `Desk`, for one run that is never written down."""

    def __init__(self, config: RunConfig) -> None:
        self.ws = WorkingSet(Head(run_id=RUN))
        self.config = config
        self.sets = {RUN: self.ws}
        self.listening = Listening()
        self.known: dict[str, int] = {}
        self.events: list[dict[str, Any]] = []
        self.upto: float | None = None

    def handle(self, batch: Sequence[Sent], now: float, published: Any = None) -> Result:
        result = Result()
        self.listening.batch(now, heard=True, upto=self.upto)
        for index, sent in enumerate(batch):
            message = sent.message
            try:
                intake.apply(
                    self.ws, message, now, gone=self.known, read_config=lambda ref: self.config, topic=sent.topic
                )
            except Refused as why:
                result.refused[index] = str(why)
            assert not self.ws.forked or self.ws.lineage.current == 0
            self.ws.forked = False
        limits = Limits(900.0, 600.0, 60.0, listening=self.listening)
        result.waits = decisions.decide(self.ws, now, limits)
        self.known |= {name: attempt.epoch for name, attempt in self.ws.attempts.items()}
        self.events += self.ws.changes.events
        result.outbox = [(RUN, one) for one in self.ws.changes.outbox]
        self.ws.changes = Changes()
        return result


@dataclass
class Truth:
    attempt: str
    epoch: int
    versions: list[int]
    reward: float


@dataclass
class Replica:
    serial: int = -1
    due: deque[tuple[float, int]] = field(default_factory=deque)  # when it will serve what


@dataclass
class QuickWorld(World):
    """`lag`: topic -> most seconds that its words come late, in their order. `spread`: most seconds until a replica serves a
    version. `twice`: chance that a request goes to two workers. `workers`: how many there are."""

    lag: dict[str, float] = field(default_factory=dict)
    spread: float = 0.0
    twice: float = 0.0
    workers: int = 3

    def __post_init__(self) -> None:
        self.replicas = [Replica(), Replica()]
        self.served_by: dict[str, Replica] = {}
        self.late: dict[str, deque[tuple[float, Sent]]] = {}
        self.said_at: dict[int, float] = {}  # offset -> when
        self.true: dict[str, Truth] = {}
        self.true_ages: list[int] = []
        self.mixed: list[str] = []
        self.trained_problems: list[str] = []
        super().__post_init__()

    def new_desk(self) -> Any:
        return MemoryDesk(self.run_config)

    def send(self, topic: t.Topic, message: Any) -> None:
        if isinstance(message, m.PolicyApplied) and message.replica == "inference":
            for replica in self.replicas:
                replica.due.append((self.now + self.random.uniform(0, self.spread), message.serial))
            return
        self.said_at[self.offsets + 1] = self.now
        if not (most := self.lag.get(topic.name, 0.0)):
            return super().send(topic, message)
        self.offsets += 1
        queue = self.late.setdefault(topic.name, deque())
        due = max(queue[-1][0] if queue else 0.0, self.now + self.random.uniform(0, most))
        queue.append((due, Sent(topic, message, self.offsets)))

    def tick(self, seconds: float = 1.0) -> None:
        for queue in self.late.values():
            while queue and queue[0][0] <= self.now:
                self.inbox.append(queue.popleft()[1])
        for number, replica in enumerate(self.replicas):
            while replica.due and replica.due[0][0] <= self.now:
                replica.serial = replica.due.popleft()[1]
                word = m.PolicyApplied(run=RUN, replica=f"e{number}", url=f"http://e{number}", serial=replica.serial)
                self.send(t.POLICIES_APPLIED, word)
        unread = [*self.inbox, *self.delayed, *(sent for queue in self.late.values() for _, sent in queue)]
        said = [self.said_at[sent.offset] for sent in unread if sent.topic in FROM_WORKERS]
        self.desk.upto = min(said, default=self.now)  # type: ignore[attr-defined]
        super().tick(seconds)

    def publish(self, messages: list[Any]) -> None:
        doubled = []
        for one in messages:
            doubled.append(one)
            if isinstance(one.message, m.RolloutRequested) and self.random.random() < self.twice:
                doubled.append(one)
        super().publish(doubled)

    def work(self) -> None:
        waiting: deque[m.RolloutRequested] = deque()
        while self.queue and len(self.running) < self.capacity and not self.held:
            request = self.queue.popleft()
            fit = [replica for replica in self.replicas if replica.serial >= request.policy_floor]
            worker = self.random.randrange(self.workers)
            name = f"{request.key.attempt}#{worker}"
            if not fit or name in self.running:
                waiting.append(request)
                continue
            self.claimed += 1
            ticks = self.slow.get(self.claimed, self.random.randint(*self.duration))
            self.running[name], self.served_by[name] = Running(request, [], ticks), self.random.choice(fit)
            claim = m.AttemptClaimed(run=RUN, key=request.key, worker=f"w{worker}")
            self.send(t.ATTEMPTS_PROGRESS, claim)
            if len(waiting) > 50:
                break
        self.queue.extendleft(reversed(waiting))
        for name, running in list(self.running.items()):
            running.versions.append(self.served_by[name].serial)
            running.left -= 1
            if self.random.random() < self.trouble.worker_dies:
                del self.running[name]
            elif running.left <= 0:
                del self.running[name]
                self.finish(running)
        for worker in range(self.workers):
            held = {n: r for n, r in self.running.items() if n.endswith(f"#{worker}")}
            beat = {n.partition("#")[0]: (r.request.key.epoch, min(r.versions, default=-1)) for n, r in held.items()}
            if beat:
                self.send(t.ATTEMPTS_PROGRESS, m.AttemptHeartbeat(run=RUN, worker=f"w{worker}", attempts=beat))

    def finish(self, running: Running) -> None:
        key, name = running.request.key, f"t{len(self.true)}"
        reward = float(self.random.random() < 0.4)
        self.true[name] = Truth(key.attempt, key.epoch, list(running.versions), reward)
        finished = m.RolloutFinished(
            run=RUN,
            key=key,
            stop=m.StopReason.submitted,
            trajectory=Ref(key=name, size=1, checksum=name.rjust(32, "0")),
            effort=m.Effort(turns=2),
            reward_config=running.request.reward_config,
            pack_hidden=REF,
            oldest_version=min(running.versions),
            oldest_kv_version=0,
            newest_version=max(running.versions),
            worker="w",
            seconds=1.0,
        )
        self.send(t.ROLLOUTS_FINISHED, finished)
        self.grade(finished)

    def verdict(self, finished: m.RolloutFinished) -> float:
        return self.true[finished.trajectory.key].reward

    def train(self) -> None:
        before = set(self.trained)
        super().train()
        for name in self.trained.keys() - before:
            self.trained_problems.append(self.groups[name].problem)
            for member in self.groups[name].members:
                truth = self.true[member.trajectory.key]
                if (truth.attempt, truth.epoch, truth.reward) != (member.attempt, member.epoch, member.reward):
                    self.mixed.append(member.attempt)
                self.true_ages += [self.step - 1 - self.steps_of[version] for version in truth.versions]


def quick(seed: int, trouble: Any, **changed: Any) -> QuickWorld:
    defaults: dict[str, Any] = {"max_steps": 6, "group_size": 2, "group_min": 2, "groups_per_step": 2, "lease_s": 5.0}
    schedule = {**defaults, **{k: changed.pop(k) for k in list(changed) if k in ScheduleConfig.__struct_fields__}}
    config = RunConfig(run=RUN, base=REF, pack=REF, pack_hidden=REF, schedule=ScheduleConfig(**schedule))
    return QuickWorld(None, config, seed=seed, trouble=trouble, problems=100, capacity=12, **changed)  # type: ignore[arg-type]
