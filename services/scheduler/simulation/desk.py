"""The shipped scheduler as a rule of the simulated fleet: the service's own state machine on a ledger of its own.

Its messages are those of a run; only the workers, graders, trainer and engine that answer them are simulated.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.scheduler.desk import Desk
from services.scheduler.simulation.fleet import Attempt, Fleet, Group, View, What
from services.scheduler.store import Store
from shared import ledger
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.run import Ref, RunConfig, ScheduleConfig

RUN = "r-plan"
REF = Ref(key="simulated", size=1, checksum="0" * 32)
NEVER_S = 1e9  # nothing is lost here, so nothing is given up
LEASE_S = 86_400.0  # the longest that a run may be given; no attempt lasts as long
ADMITTED = 1000  # problems in one message


@dataclass(slots=True)
class Heard:
    topic: t.Topic
    message: Any
    offset: int


class Shipped:
    """`folder`: for the ledger, which must be empty. `problems`: more than groups will be asked for; each is practised once."""

    name = "étude"

    def __init__(self, fleet: Fleet, folder: Path, *, problems: int, seed: int = 0) -> None:
        self.engine = ledger.connect(f"sqlite:///{folder / 'ledger.db'}")
        ledger.upgrade(self.engine)
        schedule = ScheduleConfig(
            group_size=fleet.group_size,
            groups_per_step=fleet.groups_per_step,
            max_staleness=fleet.max_staleness,
            lease_s=LEASE_S,
        )
        config = RunConfig(run=RUN, base=REF, pack=REF, pack_hidden=REF, schedule=schedule, seed=seed)
        self.desk = Desk(
            Store(self.engine), lambda ref: config, attempt_s=NEVER_S, grading_s=NEVER_S, replica_patience_s=NEVER_S
        )
        self.fleet = fleet
        self.inbox: list[Heard] = []
        self.offsets = 0
        self.unopened: deque[m.RolloutRequested] = deque()  # group after group, each attempt by its place
        self.requests: dict[Attempt, m.RolloutRequested] = {}
        self.groups: dict[str, Group] = {}
        self.names: dict[Group, str] = {}
        self.ready: dict[str, Group] = {}  # announced and not trained, in order
        for first in range(0, problems, ADMITTED):
            some = {f"p{i}": ("simulated", f"cell{i % 64}") for i in range(first, min(problems, first + ADMITTED))}
            self.say(t.PROBLEMS_ADMITTED, m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems=some))
        self.say(t.RUNS_COMMANDS, m.RunCommand(run=RUN, action="start", config=REF))
        self.say(t.STEPS_COMMITTED, m.IncarnationStarted(run=RUN, incarnation=0, step=0, parent=-1))
        self.publish(0)
        self.serve(0)

    def close(self) -> None:
        self.engine.dispose()

    def say(self, topic: t.Topic, message: Any) -> None:
        self.offsets += 1
        self.inbox.append(Heard(topic, message, self.offsets))

    def publish(self, version: int) -> None:
        published = m.PolicyPublished(
            run=RUN, serial=version, incarnation=0, step=version, parent=version - 1, manifest=REF
        )
        self.say(t.POLICIES_PUBLISHED, published)

    def serve(self, version: int) -> None:
        self.say(t.POLICIES_APPLIED, m.PolicyApplied(run=RUN, replica="engines", url="", serial=version))

    # The rule

    def heard(self, view: View, attempt: Attempt, what: What) -> None:
        if what == "asked":
            self._ask(attempt)
            return
        request = self.requests[attempt]
        assert attempt.version is not None
        if what == "begun":
            self.say(t.ATTEMPTS_PROGRESS, m.AttemptClaimed(run=RUN, key=request.key, worker="w"))
            standing = {request.key.attempt: (request.key.epoch, attempt.version)}
            self.say(t.ATTEMPTS_PROGRESS, m.AttemptHeartbeat(run=RUN, worker="w", attempts=standing))
            return
        del self.requests[attempt]
        common: dict[str, Any] = {
            "run": RUN, "key": request.key, "stop": m.StopReason.submitted, "trajectory": REF, "effort": m.Effort(turns=1),
            "reward_config": request.reward_config, "oldest_version": attempt.version, "newest_version": view.version,
        }  # fmt: skip
        finished = m.RolloutFinished(
            **common, pack_hidden=REF, oldest_kv_version=attempt.version, worker="w", seconds=attempt.lasts_s
        )
        self.say(t.ROLLOUTS_FINISHED, finished)
        solved = attempt.place % 2 == 0
        verdict = m.Verdict(solved=solved, passed=int(solved), total=1)
        self.say(t.ROLLOUTS_SCORED, m.RolloutScored(**common, verdict=verdict, reward=float(solved), terms={}))

    def _ask(self, attempt: Attempt) -> None:
        request = self.requests[attempt] = self.unopened.popleft()
        assert request.key.index == attempt.place
        self.names[attempt.group], self.groups[request.key.group] = request.key.group, attempt.group

    def stepped(self, view: View, groups: list[Group]) -> None:
        ages = {self.names[group]: 0 for group in groups}
        self.publish(view.step)
        step = m.StepCommitted(
            run=RUN,
            incarnation=0,
            step=view.step,
            serial=view.step,
            groups=ages,
            metrics={"seconds_step": self.fleet.step_s},
        )
        self.say(t.STEPS_COMMITTED, step)

    def swapped(self, view: View) -> None:
        self.serve(view.version)

    def opens(self, view: View) -> int:
        self._decide(view)
        return len(self.unopened) // self.fleet.group_size

    def _decide(self, view: View) -> None:
        result = self.desk.handle(self.inbox, 1.0 + view.now)
        assert not result.refused, result.refused
        self.inbox = []
        for _, one in result.outbox:
            match one.message:
                case m.RolloutRequested() as request:
                    self.unopened.append(request)
                case m.GroupReady(group=name):
                    self.ready[name] = self.groups[name]

    def batch(self, view: View) -> tuple[list[Group], list[Group]]:
        if self.inbox:  # what has ended may complete the next step
            self._decide(view)
        size = self.fleet.groups_per_step
        if len(self.ready) < size:
            return [], []
        return [self.ready.pop(name) for name in list(self.ready)[:size]], []
