"""One run in memory: what is unfinished, and the counters that decisions need. A cache of the ledger, never the truth.

Complete, trained and dropped groups are not kept, only counted. Every change marks what it touched in `changes`, and the
desk writes that in one transaction; after a failure the working set is thrown away and loaded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from services.scheduler import hardness, rotation
from services.scheduler.catalogue import Catalogue
from services.scheduler.gate import Gate
from services.scheduler.records import Attempt, Changes, Group, Head, Message, ReplicaState, returns
from shared.contracts.lineage import Lineage
from shared.contracts.messages import BY_SCHEDULER, Alert, GroupMember, RunControl
from shared.contracts.run import Ref, RunConfig
from shared.contracts.topics import ALERTS, RUNS_CONTROL, Topic
from shared.ledger.transitions import ENDS, AttemptState, RunState

FORGOTTEN = -2  # announced, but to nobody who would remember: older than every incarnation
# Of an alert: examples, characters of each, characters of what it says. Whatever is put in, it fits the bus.
EXAMPLES, QUOTED, SAID = 8, 300, 2000
AGAIN_S = 600.0  # between two alerts that say the same
WORDS: dict[RunState, Literal["resume", "pause", "stop", "finished"]] = {  # of runs.control, that lead to a state
    RunState.running: "resume",
    RunState.paused: "pause",
    RunState.stopping: "stop",
    RunState.finished: "finished",
}


class WorkingSet:
    """See the module. `now` is passed to whatever needs a time; nothing here reads a clock."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.config: RunConfig | None = None
        self.catalogue = Catalogue()
        self.packs: dict[str, tuple[Ref, Ref]] = {}
        self.hardness = hardness.Hardness()
        self.open: dict[str, Group] = {}
        self.attempts: dict[str, Attempt] = {}  # of open groups
        self.waiting: dict[str, Group] = {}  # ready and untrained, in the ledger's order
        self.announced: dict[str, str] = {}  # groups that were ever ready -> their problem
        self.trained: set[str] = set()  # groups, in the surviving lineage
        self.steps: dict[tuple[int, int], int] = {}  # (incarnation, step) -> serial, of every lineage
        self.commits: list[float] = []  # times of the steps of the surviving lineage, in order
        self.tip = 0  # its newest step
        self.lineage = Lineage()
        self.policies: dict[int, tuple[int, int, float]] = {}  # serial -> (incarnation, step, published at)
        self.replicas: dict[str, ReplicaState] = {}
        self.spoken = 0  # number of our last word on runs.control, as far as the ledger says
        self.last_work_at = 0.0  # when there was something to do; in memory only
        self.reconciled_at = 0.0  # in memory only
        self.scored_at = 0.0  # when the last verdict came; in memory only
        self.taken_at = 0.0  # when a worker last took up what it was asked for
        self.resumed_at = 0.0  # since when workers may take up requests, as far as this scheduler saw; in memory only
        self.alerted: dict[tuple[str, ...], float] = {}  # what was said lately -> when
        self.lagging: frozenset[str] = frozenset()  # replicas of which it was said; in memory only
        self.forked = False  # the lineage changed: this must be written and loaded again before anything else
        self.changes = Changes()

    @property
    def id(self) -> str:
        return self.head.run_id

    # What decisions need to know

    @property
    def schedule_gate(self) -> Gate:
        assert self.config
        return Gate(self.config.schedule.max_staleness, self.config.schedule.groups_per_step)

    def position(self, serial: int) -> int:
        """A serial in steps of the surviving lineage. One whose publication was not heard of yet counts as the newest
        known before it: older than it is, so that the gate errs on the safe side."""
        known = self.policies.get(serial)
        if known is None:
            earlier = [s for s in self.policies if s < serial]
            if not earlier:
                return 0
            known = self.policies[max(earlier)]
        return self.lineage.position(known[0], known[1])

    @property
    def slots(self) -> int:
        """Places used in the surviving lineage. A step that trained fewer groups than it may has used all its places."""
        assert self.config
        return max(len(self.trained), self.tip * self.config.schedule.groups_per_step)

    @property
    def accepted(self) -> int:
        return self.slots + len(self.waiting)

    def rotation(self, now: float, patience_s: float) -> dict[str, ReplicaState]:
        return rotation.rotation(self.replicas, self.policies, now, patience_s)

    def forget_replica(self, name: str, now: float, why: str) -> None:
        serial = self.replicas.pop(name).serial
        self.changes.replicas.add(name)
        self.event(now, "replica.forgotten", name, serial, reason=why)

    def oldest(self) -> int | None:
        """The oldest version of any attempt of an open group, in steps of the surviving lineage. A ready group has its
        place in the ledger's order, in which the trainer trains: nothing asked for later can delay it."""
        serials = {a.standing for a in self.attempts.values() if a.state not in ENDS}
        return min((self.position(serial) for serial in serials), default=None)

    def clock(self, now: float) -> float:
        """Seconds on the budget's clock."""
        started = self.head.clock_started_at
        return self.head.spent_s + (max(0.0, now - started) if started is not None else 0.0)

    def members(self, group: Group) -> list[GroupMember]:
        survivors = [a for a in group.attempts if a.state in (AttemptState.scored, AttemptState.grouped)]
        return [
            GroupMember(
                attempt=a.id,
                epoch=a.epoch,
                trajectory=a.trajectory,
                reward=a.reward,
                oldest_version=a.standing,
                solved=a.solved,
            )
            for a in sorted(survivors, key=lambda a: a.place)
            if a.trajectory is not None and a.reward is not None
        ]

    def live(self) -> Iterator[Attempt]:
        return (a for a in self.attempts.values() if a.state not in ENDS)

    # Noting what changed

    def event(self, now: float, kind: str, subject: str, epoch: int = 0, **data: Any) -> None:
        self.head.last_event += 1
        self.changes.events.append(
            {
                "run_id": self.id,
                "sequence": self.head.last_event,
                "at": now,
                "kind": kind,
                "subject": subject,
                "epoch": epoch,
                "data": data,
            }
        )

    def say(self, topic: Topic, key: str, message: msgspec.Struct) -> None:
        self.head.last_message += 1
        self.changes.outbox.append(Message(self.head.last_message, topic, key, message))

    def say_state(self, now: float, *, by: str = BY_SCHEDULER) -> None:
        """Which state the run is in, as the word that leads there, with the configuration that holds. `by`: whose word it was.
        Its number is the time in milliseconds, or more: it grows also where the ledger is an older one that was restored
        beside a newer bus."""
        self.spoken = max(int(now * 1000), self.spoken + 1)
        word = RunControl(
            run=self.id,
            action=WORDS[self.head.state],
            config=self.head.config,
            reason=self.head.reason,
            drain=self.head.drain,
            by=by,
            number=self.spoken,
        )
        self.say(RUNS_CONTROL, self.id, word)

    def enter(self, state: RunState, now: float, reason: str, *, by: str = BY_SCHEDULER, drain: bool = True) -> None:
        """The budget's clock stands unless the run is running; the first request of a stretch starts it. `by`: whose word.
        `drain`: of a pause."""
        head = self.head
        if head.clock_started_at is not None and state is not RunState.running:
            head.spent_s, head.clock_started_at = self.clock(now), None
        match state:
            case RunState.running:
                head.stopped_at = head.finished_at = None
            case RunState.stopping:
                head.stopped_at = now
            case RunState.finished:
                head.finished_at = now
        head.state, head.reason, head.drain = state, reason, drain
        self.last_work_at = self.resumed_at = now
        self.event(now, f"run.{state.value}", "", head.last_event, reason=reason, by=by)

    def row(self, table: str, **values: Any) -> None:
        self.changes.rows.setdefault(table, []).append({"run_id": self.id, **values})

    def touch(self, changed: Attempt | Group) -> None:
        if isinstance(changed, Attempt):
            self.changes.attempts[changed.id] = changed
        else:
            self.changes.groups[changed.id] = changed

    def alert(
        self, now: float, name: str, severity: Literal["info", "warning", "critical"], what: str, examples: list[str]
    ) -> None:
        """Unless the same was said within the last AGAIN_S. A critical one is another where its examples are others."""
        quoted = [example[:QUOTED] for example in examples[:EXAMPLES]]
        alert = Alert(run=self.id, name=name, severity=severity, what=what[:SAID], examples=quoted)
        self.alerted = {said: at for said, at in self.alerted.items() if now - at < AGAIN_S}
        if meaning(alert) not in self.alerted:
            self.alerted[meaning(alert)] = now
            self.say(ALERTS, self.id, alert)

    def release(self, group: Group) -> None:
        """The problem of a group that was not trained may return, unless it keeps coming back, or the group was announced
        and then given up: a trainer may still hold it."""
        if returns(group.state, group.announced, group.number):
            self.catalogue.give_back(group.problem)


def meaning(alert: Alert) -> tuple[str, ...]:
    """Two alerts with the same one say the same."""
    return (alert.name, alert.what, *(alert.examples if alert.severity == "critical" else ()))
