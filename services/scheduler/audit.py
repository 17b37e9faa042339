"""Checks a run from its ledger alone: are the promises kept? Read-only; one snapshot, so that a live run can be audited.

What is counted as a violation, and named with its rows:
- trained twice: a problem or a group that two steps of the surviving lineage trained;
- lost: a complete group that is neither trained, nor announced to the trainer that lives, nor given up with a reason;
- staleness: a step that trained a sample older than the bound allowed, on its own lineage, recomputed from the policies;
- attempts: a state that its events do not lead to, an epoch that skipped or went back, a verdict without a score or a
  score without a verdict, a group of the wrong size, a member without a trajectory;
- retention: messages that the bus deleted before their reader had acknowledged them, so that the ledger may lack them;
- record: numbers of a sequence that contradict each other, serials or steps that go back or are lost.

A ledger that lost its last commits has recorded which groups the checkpoints contain (`recovery`). These count as trained; that
the ledger lost steps is a violation of the record.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, Row, select

from services.scheduler.recovery import CONTAINS
from shared.contracts.life import RunState
from shared.contracts.lineage import Fork, Lineage, serials
from shared.contracts.messages import RECORDS_GONE
from shared.ledger import models
from shared.ledger.transitions import LIVE, AttemptState, GroupState, Place, settle

_tables: dict[str, Any] = models.Base.metadata.tables
# Kind of event -> topic and what makes one of its messages distinct.
TOPICS = {
    "attempt.requested": "rollouts.requested",  # attempt and epoch: asked for again counts again
    "attempt.finished": "rollouts.finished",  # attempt and epoch
    "attempt.scored": "rollouts.scored",  # attempt: the first verdict wins
    "group.announced": "groups.ready",  # group, however often it was announced
    "step.committed": "steps.committed",  # incarnation and step
}
_STATES = {
    "attempt.requested": AttemptState.requested,
    "attempt.claimed": AttemptState.claimed,
    "attempt.finished": AttemptState.finished,
    "attempt.lost": AttemptState.lost,
    "attempt.scored": AttemptState.scored,
    "attempt.failed": AttemptState.failed,
    "attempt.dropped": AttemptState.dropped,
}


class UnknownRun(LookupError):
    """The ledger has no such run; the text names those it has."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation. `rows`: what it is about, ids first."""

    check: str  # trained_twice | lost | staleness | attempts | retention | record
    what: str
    rows: list[str]


@dataclass(slots=True)
class Report:
    run: str
    state: str
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    # Why what was given up was given up: "attempts dropped" -> reason -> how many, the most frequent first.
    reasons: dict[str, dict[str, int]] = field(default_factory=dict)
    oldest_age: int = 0  # greatest age that was trained, steps

    def number(self, check: str) -> int:
        return sum(len(finding.rows) for finding in self.findings if finding.check == check)

    @property
    def sound(self) -> bool:
        return not self.findings

    def summary(self) -> str:
        return (
            f"{self.number('lost')} lost, {self.number('trained_twice')} trained twice, "
            f"{self.number('staleness')} staleness violations"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "state": self.state,
            "sound": self.sound,
            "lost": self.number("lost"),
            "trained_twice": self.number("trained_twice"),
            "staleness_violations": self.number("staleness"),
            "other_violations": sum(self.number(check) for check in ("attempts", "retention", "record")),
            "oldest_age": self.oldest_age,
            "counts": self.counts,
            "groups": self.groups,
            "attempts": self.attempts,
            "reasons": self.reasons,
            "findings": [msgspec.to_builtins(finding) for finding in self.findings],
        }


def named(engine: Engine, run: str) -> str:
    """The run of this name; of none: the one that was created last. Raises UnknownRun."""
    runs = _tables["runs"]
    with engine.begin() as connection:
        known = list(connection.execute(select(runs.c.run_id).order_by(runs.c.created_at)).scalars())
    if not known:
        raise UnknownRun("the ledger holds no run yet")
    if run and run not in known:
        raise _unknown(run, known)
    return run or known[-1]


def _unknown(run: str, known: Sequence[str]) -> UnknownRun:
    return UnknownRun(f"run {run!r}: not in this ledger; it has: {', '.join(known[-10:]) or 'none'}")


def counts(engine: Engine, run: str) -> dict[str, int]:
    """Distinct messages of a run per topic, as the ledger knows them; evaluations are not in it."""
    with engine.begin() as connection:
        return _counts(_rows(connection, "events", run, "sequence"))


def audit(engine: Engine, run: str, *, max_staleness: int | None) -> Report:
    """`max_staleness`: the bound in steps; None: it is not known, and ages are reported but not judged."""
    with engine.begin() as connection:
        ledger = _Ledger(connection, run)
    report = Report(run=run, state=ledger.run.state)
    report.counts = _counts(ledger.events)
    report.attempts = dict(sorted(Counter(a.state for a in ledger.attempts).items()))
    report.groups = dict(sorted(Counter(_group_word(ledger, g) for g in ledger.groups.values()).items()))
    report.reasons = _reasons(ledger)
    ages = list(_ages(ledger))
    report.oldest_age = max((age for _, age in ages), default=0)
    findings = [*_trained_twice(ledger), *_lost(ledger), *_attempts(ledger), *_retention(ledger), *_record(ledger)]
    if max_staleness is not None:
        findings.append(_too_old(ages, max_staleness))
    report.findings = [finding for finding in findings if finding.rows]
    return report


class _Ledger:
    """Everything of one run, in memory."""

    def __init__(self, connection: Connection, run: str) -> None:
        known = connection.execute(select(_tables["runs"]).order_by(_tables["runs"].c.created_at)).all()
        found = [row for row in known if row.run_id == run]
        if not found:
            raise _unknown(run, [row.run_id for row in known])
        self.run = found[0]
        self.groups = {g.group_id: g for g in _rows(connection, "groups", run, "requested_at")}
        self.attempts = _rows(connection, "attempts", run, "group_id", "place")
        self.verdicts = {v.attempt_id: v for v in _rows(connection, "verdicts", run)}
        self.policies = {p.serial: p for p in _rows(connection, "policies", run, "serial")}
        self.steps = _rows(connection, "steps", run, "incarnation", "step")
        self.trained = _rows(connection, "trained", run, "incarnation", "step")
        self.events = _rows(connection, "events", run, "sequence")
        self.lineage = Lineage(
            {row.incarnation: Fork(row.parent, row.step) for row in _rows(connection, "incarnations", run)}
        )
        self.surviving = [t for t in self.trained if self.lineage.survives(t.incarnation, t.step)]
        self.checkpoints = [
            (e.epoch, int(e.subject), e.data["groups"])
            for e in self.events
            if e.kind == CONTAINS and self.lineage.survives(e.epoch, int(e.subject))
        ]
        committed = {t.group_id for t in self.surviving}
        # Groups that only a checkpoint says to be trained -> its step.
        self.contained = {g: step for _, step, groups in self.checkpoints for g in groups if g not in committed}


def _rows(connection: Connection, table: str, run: str, *order: str) -> list[Row[Any]]:
    t = _tables[table]
    return list(connection.execute(select(t).where(t.c.run_id == run).order_by(*[t.c[name] for name in order])))


def _counts(events: list[Row[Any]]) -> dict[str, int]:
    seen: dict[str, set[tuple[str, int]]] = {topic: set() for topic in TOPICS.values()}
    for event in events:
        topic = TOPICS.get(event.kind)
        if topic:
            once = event.kind in ("attempt.scored", "group.announced")
            seen[topic].add((event.subject, 0 if once else event.epoch))
    return {topic: len(messages) for topic, messages in seen.items()}


def _group_word(ledger: _Ledger, group: Row[Any]) -> str:
    if group.state != GroupState.ready:
        return str(group.state)
    trained = group.group_id in ledger.contained or any(t.group_id == group.group_id for t in ledger.surviving)
    return "trained" if trained else "waiting"


def _reasons(ledger: _Ledger) -> dict[str, dict[str, int]]:
    given_up = [(f"attempts {a.state}", a.reason) for a in ledger.attempts if a.state in ("dropped", "failed")]
    given_up += [
        (f"groups {g.state}", g.reason) for g in ledger.groups.values() if g.state in ("dropped", "quarantined")
    ]
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for what, reason in given_up:
        first_line = reason.partition("\n")[0]  # an error's text may go on with a traceback
        found[what][first_line or "no reason recorded"] += 1
    return {what: dict(counter.most_common()) for what, counter in sorted(found.items())}


def _trained_twice(ledger: _Ledger) -> Iterator[Finding]:
    by_problem: dict[str, list[str]] = defaultdict(list)
    for fact in ledger.surviving:
        problem = ledger.groups[fact.group_id].problem_id
        by_problem[problem].append(f"{fact.group_id} at step {fact.step} of incarnation {fact.incarnation}")
    for group, step in ledger.contained.items():
        if group in ledger.groups:
            by_problem[ledger.groups[group].problem_id].append(f"{group} by step {step}, as its checkpoint says")
    rows = [f"{problem}: {'; '.join(facts)}" for problem, facts in sorted(by_problem.items()) if len(facts) > 1]
    # The table of facts keeps one per group and incarnation; the events keep what the trainer said.
    said: Counter[str] = Counter()
    for event in ledger.events:
        if event.kind == "step.committed" and ledger.lineage.survives(event.epoch, int(event.subject)):
            said.update(event.data["groups"].keys())
    rows += [f"{group}: named by {times} steps" for group, times in sorted(said.items()) if times > 1]
    yield Finding("trained_twice", "problems that two steps of the surviving lineage trained", rows)


def _lost(ledger: _Ledger) -> Iterator[Finding]:
    trained = {fact.group_id for fact in ledger.surviving}
    yield Finding(
        "lost",
        "ready groups, not trained, that the living trainer was never told of",
        [
            g.group_id
            for g in ledger.groups.values()
            if g.state == GroupState.ready
            and g.group_id not in trained
            and g.group_id not in ledger.contained
            and (g.announced is None or g.announced < ledger.run.incarnation)
        ],
    )
    members: dict[str, list[str]] = defaultdict(list)
    for attempt in ledger.attempts:
        members[attempt.group_id].append(attempt.state)
    yield Finding(
        "lost",
        "open groups of which nothing is missing",
        [
            g.group_id
            for g in ledger.groups.values()
            if g.state == GroupState.open
            and not any(s != AttemptState.scored and s in LIVE for s in members[g.group_id])
        ],
    )
    over = ledger.run.state == RunState.finished
    yield Finding(
        "lost",
        "attempts that are not over although the run is",
        [a.attempt_id for a in ledger.attempts if over and a.state in LIVE],
    )
    yield Finding(
        "lost",
        "groups given up without a reason",
        [g.group_id for g in ledger.groups.values() if g.state in ("dropped", "quarantined") and not g.reason],
    )
    yield Finding(
        "record",
        "groups that a surviving step trained although the ledger had given them up",
        [g for g in sorted(trained) if ledger.groups[g].state != GroupState.ready],
    )


def _ages(ledger: _Ledger) -> Iterator[tuple[Row[Any], int]]:
    """Every trained fact, dead lineages too, with the age of its farthest sample on the lineage that trained it: the
    greater of what the versions of its attempts say and of what the trainer, which saw every token, reported."""
    versions: dict[str, set[int]] = defaultdict(set)
    for attempt in ledger.attempts:
        if attempt.state == AttemptState.grouped and (oldest := attempt.oldest_version) is not None:
            versions[attempt.group_id].update(serials(oldest, attempt.newest_version))
    lineages: dict[int, Lineage] = {}
    for fact in ledger.trained:
        if fact.incarnation not in lineages:
            lineages[fact.incarnation] = ledger.lineage.at(fact.incarnation)
        lineage = lineages[fact.incarnation]
        known = [ledger.policies[v] for v in versions[fact.group_id] if v in ledger.policies]
        positions = [lineage.position(p.incarnation, p.step) for p in known]
        yield fact, max(fact.reported_age, fact.step - 1 - min(positions, default=fact.step - 1))


def _too_old(ages: list[tuple[Row[Any], int]], bound: int) -> Finding:
    rows = [
        f"{fact.group_id}: {age} steps at step {fact.step} of incarnation {fact.incarnation}"
        for fact, age in ages
        if age > bound
    ]
    return Finding("staleness", f"groups with a sample older than {bound} steps when it was trained", rows)


def _attempts(ledger: _Ledger) -> Iterator[Finding]:
    told: dict[str, list[Place]] = defaultdict(list)
    judged: dict[str, str] = {}  # attempt -> checksum of the trajectory that its verdict is on
    asked: dict[str, list[int]] = defaultdict(list)
    for event in ledger.events:
        if event.kind in _STATES and "ignored" not in event.data:
            # A rollout of an earlier epoch may count for the one in force.
            told[event.subject].append(Place(event.data.get("counts_as", event.epoch), _STATES[event.kind]))
            if event.kind == "attempt.scored":
                judged[event.subject] = event.data.get("trajectory", "")
            if event.kind == "attempt.requested":
                asked[event.subject].append(event.epoch)
        elif event.kind == "group.ready":
            for attempt in event.data["members"]:
                told[attempt].append(Place(0, AttemptState.grouped))
    wrong, epochs, unjudged, unread, mixed = [], [], [], [], []
    sizes: Counter[str] = Counter()
    for a in ledger.attempts:
        sizes[a.group_id] += 1
        if settle(told[a.attempt_id]).state != a.state:
            wrong.append(f"{a.attempt_id}: {a.state}, its events lead to {settle(told[a.attempt_id]).state}")
        if asked[a.attempt_id] != list(range(a.epoch + 1)):
            epochs.append(f"{a.attempt_id}: epoch {a.epoch}, asked for {asked[a.attempt_id]}")
        if a.state in (AttemptState.scored, AttemptState.grouped) and a.attempt_id not in ledger.verdicts:
            unjudged.append(a.attempt_id)
        sampled = a.epoch if a.sampled is None else a.sampled
        if a.attempt_id in ledger.verdicts and ledger.verdicts[a.attempt_id].epoch != sampled:
            unjudged.append(f"{a.attempt_id}: epoch {sampled}, verdict of epoch {ledger.verdicts[a.attempt_id].epoch}")
        if a.trajectory is not None and judged.get(a.attempt_id, "") not in ("", a.trajectory.checksum):
            mixed.append(f"{a.attempt_id}: trajectory {a.trajectory.checksum}, verdict on {judged[a.attempt_id]}")
        if a.oldest_version is not None and a.oldest_version not in ledger.policies:
            unread.append(f"{a.attempt_id}: version {a.oldest_version}")
    yield Finding("attempts", "attempts whose state their events do not lead to", wrong)
    yield Finding("attempts", "attempts whose epochs skipped or went back", epochs)
    yield Finding("attempts", "scored attempts without their verdict", unjudged)
    yield Finding("attempts", "attempts whose reward is another trajectory's", mixed)
    yield Finding("attempts", "attempts with tokens of a version that nobody published", unread)
    yield Finding(
        "attempts",
        "groups that do not have the number of attempts they were asked for with",
        [
            f"{g.group_id}: {sizes[g.group_id]} of {g.size}"
            for g in ledger.groups.values()
            if sizes[g.group_id] != g.size
        ],
    )
    grouped = Counter(a.group_id for a in ledger.attempts if a.state == AttemptState.grouped)
    yield Finding(
        "attempts",
        "ready groups whose members are not those that survived",
        [
            f"{g.group_id}: {grouped[g.group_id]} of {g.members}"
            for g in ledger.groups.values()
            if g.sequence is not None and grouped[g.group_id] != g.members
        ],
    )


def _retention(ledger: _Ledger) -> Iterator[Finding]:
    rows = [
        row
        for event in ledger.events
        if event.kind == RECORDS_GONE
        for row in (event.data["examples"] or [event.data["what"]])
    ]
    yield Finding("retention", "gaps in the bus: retention deleted these messages before they were read", rows)


def _record(ledger: _Ledger) -> Iterator[Finding]:
    run = ledger.run
    wrong = []
    if ledger.events and ledger.events[-1].sequence > run.last_event:
        wrong.append(f"last event is {ledger.events[-1].sequence}, the run says {run.last_event}")
    sequences = sorted(g.sequence for g in ledger.groups.values() if g.sequence is not None)
    if sequences != list(range(1, run.last_ready + 1)):
        wrong.append(f"{len(sequences)} ready groups, the run counts {run.last_ready}")
    draws = sorted(g.draw for g in ledger.groups.values())
    if draws != list(range(1, run.last_draw + 1)):
        wrong.append(f"{len(draws)} groups, the run counts {run.last_draw}")
    yield Finding("record", "counters that contradict the tables", wrong)
    steps: dict[int, list[Any]] = defaultdict(list)
    for step in ledger.steps:
        steps[step.incarnation].append(step)
    rows, lost = [], []
    for incarnation, made in steps.items():
        start = ledger.lineage.fork(incarnation).step
        numbers = [s.step for s in made]
        gaps = sorted(set(range(start + 1, numbers[-1] + 1)) - set(numbers))
        contained = max((step for at, step, _ in ledger.checkpoints if at == incarnation), default=0)
        if gaps and gaps[-1] <= contained:
            lost.append(
                f"incarnation {incarnation}: steps {gaps[:20]}, which the checkpoint of step {contained} contains"
            )
        elif numbers != list(range(start + 1, start + 1 + len(made))):
            rows.append(f"incarnation {incarnation}: steps {[s.step for s in made][:20]}, it began after {start}")
        if any(later.serial <= earlier.serial for earlier, later in pairwise(made)):
            rows.append(f"incarnation {incarnation}: serials {[s.serial for s in made][:20]}")
    yield Finding("record", "steps or serials that skip or go back", rows)
    yield Finding("record", "steps that the ledger has lost", lost)
