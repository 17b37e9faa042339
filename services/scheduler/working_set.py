"""One run in memory: what is unfinished, and the counters that decisions need. A cache of the ledger, never the truth.

Complete, trained and dropped groups are not kept, only counted. Every change marks what it touched in `changes`, and the
desk writes that in one transaction; after a failure the working set is thrown away and loaded again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from services.scheduler import hardness, pacing, rotation
from services.scheduler.catalogue import Catalogue
from services.scheduler.gate import Gate
from services.scheduler.records import (
    CONFIGURED,
    ROLLBACK,
    Attempt,
    Changes,
    Group,
    Head,
    Mending,
    Message,
    ReplicaState,
    returns,
)
from services.scheduler.shares import Use
from shared.contracts.life import RunState, moves
from shared.contracts.lineage import Lineage
from shared.contracts.messages import BY_SCHEDULER, Alert, GroupMember, Rollback, RunCommand, RunStatus
from shared.contracts.run import Ref, RunConfig
from shared.contracts.topics import ALERTS, RUNS_STATE, Topic
from shared.ledger.transitions import ENDS, AttemptState

FORGOTTEN = -2  # announced, but to nobody who would remember: older than every incarnation
# Of an alert: examples, characters of each, characters of what it says. Whatever is put in, it fits the bus.
EXAMPLES, QUOTED, SAID = 8, 300, 2000
HEARD_S = 10.0  # a worker that holds attempts, or misses a replica, says so every two seconds
FORK_UNREAD_S = 600.0  # at most between reading a trainer's publication and reading that it began: two topics
AGAIN_S = 600.0  # between two alerts that say the same
TRAINED = 8  # steps whose seconds are remembered
CONFIGS = 50  # in a status: the first and the newest ones


class WorkingSet:
    """See the module. `now` is passed to whatever needs a time; nothing here reads a clock."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.config: RunConfig | None = None
        self.catalogue = Catalogue()
        self.packs: dict[str, tuple[Ref, Ref]] = {}
        self.hardness = hardness.Hardness()
        self.probed: dict[str, tuple[int, int]] = {}  # problems that a probe tried before the run -> attempts, solved
        self.open: dict[str, Group] = {}
        self.attempts: dict[str, Attempt] = {}  # of open groups
        self.waiting: dict[str, Group] = {}  # ready and untrained, in the ledger's order
        self.announced: dict[str, str] = {}  # groups that were ever ready -> their problem
        self.trained: set[str] = set()  # groups, in the surviving lineage
        self.steps: dict[tuple[int, int], int] = {}  # (incarnation, step) -> serial, of every lineage
        self.commits: list[float] = []  # times of the steps of the surviving lineage, in order
        self.trained_s: deque[float] = deque(maxlen=TRAINED)  # what the trainer said that its last steps took
        # From asking for a group to its last verdict, of those completed last. After a load: to its place in the order.
        self.latencies_s: deque[float] = deque(maxlen=pacing.LATENCIES)
        self.tip = 0  # its newest step
        self.trained_upto = 0  # the last place in the ledger's order that it trained; 0: none
        self.behind = False  # the ledger has lost commits, as far as this scheduler saw; in memory only
        # Groups that trainers named and the ledger never announced -> their problem, None: no problem gives that name. Forgotten
        # with every load, as is that a search through the catalogue has found none of the names it looked for.
        self.unheard: dict[str, str | None] = {}
        self.searched_in_vain = False
        self.lineage = Lineage()
        self.policies: dict[int, tuple[int, int, float]] = {}  # serial -> (incarnation, step, published at)
        self.base = -1  # the newest serial that was published as a full base; -1: none
        self.replicas: dict[str, ReplicaState] = {}
        self.spoken = 0  # number of our last status, as far as the ledger says
        self.configs: list[Ref] = []  # that were taken, in their order; the last holds
        self.started = 0.0  # when the first was; 0.0: none was
        self.beside = False  # it was started beside others (`RunCommand`)
        self.by = BY_SCHEDULER  # whose command or decision led to the state
        self.rollback: Rollback | None = None  # the last one asked for
        self.damaged = -1  # the version that the trainer is to publish again; -1: none; in memory only
        self.admissions: list[float] = []  # when problems came, the last few
        self.complete = False  # no more problems will come, as the curator said
        self.loaded_at = 0.0  # in memory only
        self.evident = -1  # the newest version in the object store when this was loaded; in memory only
        self.unheard_since: float | None = None  # see `mending`; in memory only
        self.last_work_at = 0.0  # when there was something to do
        self.reconciled_at = 0.0  # in memory only
        self.scored_at = 0.0  # when the last verdict came
        self.graded_upto = 0.0  # when the rollout finished that finished last of those with a verdict
        self.quiet_at = 0.0  # when we last asked for a verdict because none at all had come; in memory only
        self.taken_at = 0.0  # when a worker last took up what it was asked for
        self.resumed_at = 0.0  # since when the run is in its state: workers may take up requests while it is running
        self.alerted: dict[tuple[str, ...], float] = {}  # what was said lately -> when
        self.gate: dict[str, int] = {}  # the gate's numbers when it was asked last (`requesting`); in memory only
        self.use: Use | None = (
            None  # of the slots, where several run (`shares`); None: it runs alone, or not; in memory only
        )
        self.held: list[str] = []  # complete groups that wait for their place (`decisions`); in memory only
        self.workers: dict[
            str, tuple[float, frozenset[str]]
        ] = {}  # when heard, which replicas are silent; in memory only
        self.lagging: frozenset[str] = frozenset()  # replicas of which it was said; in memory only
        self.mending = Mending()  # in memory only
        self.forked = False  # the lineage changed: this must be written and loaded again before anything else
        self.changes = Changes()

    @property
    def id(self) -> str:
        return self.head.run_id

    def remember(self, before: WorkingSet) -> None:
        """Take over what only memory holds, from the same run before it was loaded again: a fork is no silence."""
        for name, attempt in self.attempts.items():
            if name in before.attempts:
                attempt.remember(before.attempts[name])
        self.scored_at, self.graded_upto, self.workers = before.scored_at, before.graded_upto, before.workers
        self.admissions, self.complete = before.admissions, before.complete
        self.latencies_s = before.latencies_s
        self.behind = self.behind or before.behind
        self.damaged, self.spoken = before.damaged, max(self.spoken, before.spoken)
        self.loaded_at, self.evident, self.unheard_since = before.loaded_at, before.evident, before.unheard_since

    # What decisions need to know

    @property
    def schedule_gate(self) -> Gate:
        assert self.config
        return Gate(self.config.schedule.max_staleness, self.config.schedule.groups_per_step)

    def position(self, serial: int) -> int:
        """Return a serial's place in steps of the surviving lineage.

        The publication of a serial may not have been read yet. Then it counts as the oldest that it can be, so that the gate
        errs on the safe side. On our own line that is the newest one known before it. On a branch that was cut off, a version
        is the farther the newer it is, and it may be as many steps newer as its serial is greater."""
        known = self.policies.get(serial)
        if known is not None:
            return self.lineage.position(known[0], known[1])
        earlier = max((s for s in self.policies if s < serial), default=None)
        if earlier is None:
            return 0
        incarnation, step, _ = self.policies[earlier]
        newer = self.lineage.position(incarnation, step + serial - earlier)
        return min(self.lineage.position(incarnation, step), newer)

    def forking(self, now: float) -> bool:
        """Return whether a newer trainer has published although we have not read yet that it began. Until then nobody knows how
        old its versions are, and whatever is announced would be announced to a trainer that is gone."""
        unread = (at for incarnation, _, at in self.policies.values() if incarnation > self.lineage.current)
        return now - max(unread, default=float("-inf")) < FORK_UNREAD_S

    @property
    def slots(self) -> int:
        """Places used in the surviving lineage. A step that trained fewer groups than it may has used all its places."""
        assert self.config
        return max(len(self.trained), self.tip * self.config.schedule.groups_per_step)

    @property
    def accepted(self) -> int:
        return self.slots + len(self.waiting)

    def rotation(self, now: float, patience_s: float) -> dict[str, ReplicaState]:
        return rotation.rotation(self.replicas, self.policies, now, patience_s, self.silent(now))

    def silent(self, now: float) -> frozenset[str]:
        """Replicas that answer none of the workers that were heard lately; empty where none was."""
        self.workers = {worker: (at, names) for worker, (at, names) in self.workers.items() if now - at <= HEARD_S}
        found = [names for _, names in self.workers.values()]
        return frozenset.intersection(*found) if found else frozenset()

    def forget_replica(self, name: str, now: float, why: str) -> None:
        serial = self.replicas.pop(name).serial
        self.changes.replicas.add(name)
        self.event(now, "replica.forgotten", name, serial, reason=why)

    @property
    def lead(self) -> int:
        """See `pacing.lead`."""
        assert self.config
        schedule = self.config.schedule
        return pacing.lead(
            self.latencies_s,
            pacing.training_seconds(self.trained_s, self.commits),
            groups_per_step=schedule.groups_per_step,
            max_staleness=schedule.max_staleness,
        )

    def standing(self) -> dict[str, int]:
        """Return the oldest version of each open group, in steps of the surviving lineage; the oldest first, then the group that
        was asked for first. A ready group has its place in the ledger's order, in which the trainer trains."""
        forked = len(self.lineage.forks) > 1  # on one line a newer version is never farther than an older one
        positions: dict[int, int] = {}
        found = []
        for group in self.open.values():
            serials: set[int] = set()
            for attempt in group.attempts:
                if attempt.state not in ENDS:
                    serials.update(attempt.versions if forked else (attempt.standing,))
            for serial in serials - positions.keys():
                positions[serial] = self.position(serial)
            if serials:
                found.append((min(positions[serial] for serial in serials), group.draw, group.id))
        return {name: oldest for oldest, _, name in sorted(found)}

    def may_stand_on(self, group: str, version: int) -> bool:
        """Return whether the gate still has the places that it needs if an attempt of this open group stands on `version`, in
        steps of the surviving lineage."""
        standing = self.standing()
        standing[group] = min(version, standing.get(group, version))
        return self.schedule_gate.fits(sorted(standing.values()), accepted=self.accepted)

    def note_seconds(self, metrics: Mapping[str, Any]) -> None:
        """Remember what a step of the surviving lineage took, if its trainer said so."""
        seconds = metrics.get("seconds_step")
        if isinstance(seconds, int | float) and 0 < seconds < math.inf:
            self.trained_s.append(float(seconds))

    def clock(self, now: float) -> float:
        """Seconds on the budget's clock."""
        started = self.head.clock_started_at
        return self.head.spent_s + (max(0.0, now - started) if started is not None else 0.0)

    def members(self, group: Group) -> list[GroupMember]:
        survivors = [a for a in group.attempts if a.state in (AttemptState.scored, AttemptState.grouped)]
        return [
            GroupMember(
                attempt=a.id,
                epoch=a.rolled_out,
                trajectory=a.trajectory,
                reward=a.reward,
                oldest_version=a.standing,
                solved=a.solved,
                steps=a.steps,
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

    def configure(self, config: RunConfig, ref: Ref, now: float, command: RunCommand) -> None:
        """Take a configuration over. The first starts the run."""
        self.config, self.head.config, self.head.pack_hash = config, ref, config.pack.checksum
        if not self.started:
            self.started, self.beside = now, command.beside
        if ref not in self.configs[-1:]:
            self.configs.append(ref)
        said = {"reason": command.reason[:2000], "by": command.by[:200]}
        of = {"config": ref.key, "size": ref.size, "checksum": ref.checksum, "beside": self.beside}
        self.event(now, CONFIGURED, "", self.head.last_event, **of, **said)

    def go_back(self, rollback: Rollback, now: float, command: RunCommand) -> None:
        """Ask the trainer to go on from an earlier version."""
        self.rollback = rollback
        said = {"reason": command.reason[:2000], "by": command.by[:200]}
        self.event(now, ROLLBACK, "", self.head.last_event, serial=rollback.serial, id=rollback.id, **said)

    def tell_damaged(self, serial: int, now: float) -> None:
        """Have the trainer publish this version again."""
        self.damaged = serial
        self.say_state(now)

    def say_state(self, now: float, *, answers: str = "") -> None:
        """Announce how the run stands, to everybody. `answers`: id of a command; "": none.

        Its number is the time in milliseconds, or more: it grows also if the ledger is an older one that was restored while the
        bus went on."""
        self.spoken = max(int(now * 1000), self.spoken + 1)
        status = RunStatus(
            run=self.id,
            state=self.head.state,
            number=self.spoken,
            configs=[*self.configs[:1], *self.configs[1:][1 - CONFIGS :]],
            started=self.started,
            beside=self.beside,
            since=self.resumed_at,
            reason=self.head.reason,
            by=self.by,
            drain=self.head.drain,
            admitted=self.complete,
            rollback=self.rollback,
            damaged=self.damaged,
            answers=answers,
        )
        self.say(RUNS_STATE, self.id, status)

    def enter(self, state: RunState, now: float, reason: str, *, by: str = BY_SCHEDULER, drain: bool = True) -> None:
        """The budget's clock stands unless the run is running; the first request of a stretch starts it. `by`: whose command.
        `drain`: of a pause. Raises ValueError for a move that no run makes."""
        head = self.head
        if state not in (allowed := moves(head.state)):
            names = ", ".join(sorted(allowed))
            raise ValueError(f"run {self.id!r} cannot go from {head.state} to {state}; allowed: {names}")
        if head.clock_started_at is not None and state is not RunState.running:
            head.spent_s, head.clock_started_at = self.clock(now), None
        match state:
            case RunState.running:
                head.stopped_at = head.finished_at = None
            case RunState.stopping:
                head.stopped_at = now
            case RunState.finished:
                head.finished_at = now
        head.state, head.reason, head.drain, self.by = state, reason, drain, by
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
        if returns(group.state, group.announced, self.catalogue.count(group.problem)):
            self.catalogue.give_back(group.problem)


def meaning(alert: Alert) -> tuple[str, ...]:
    """Two alerts with the same one say the same."""
    return (alert.name, alert.what, *(alert.examples if alert.severity == "critical" else ()))
