"""Messages applied to a run's working set: what each of them says becomes facts. No decision is made here.

Every function is idempotent; those about attempts commute (`shared.ledger.transitions`). A message about something that
the ledger never heard of, or that contradicts it, raises `Refused`: it belongs into the dead-letter topic.
"""

from __future__ import annotations

from typing import Any

from services.scheduler.control import ReadConfig, Refused, control
from services.scheduler.decisions import abandon
from services.scheduler.quota import QUOTA_EXCEEDED
from services.scheduler.records import Attempt, ReplicaState
from services.scheduler.working_set import WorkingSet
from shared.contracts import messages as m
from shared.contracts.lineage import Fork, Lineage
from shared.contracts.run import Purpose
from shared.ledger.transitions import AttemptState, GroupState, RunState

PROMOTED = "policy.promoted"  # an event's kind
NAME_CHARS = 1024  # of a problem's id, and of an object's key: no store takes a longer one


def concerns(message: Any) -> bool:
    """Evaluations are not in the ledger. (A heartbeat names attempts of both kinds: the unknown ones are passed over.)"""
    key = getattr(message, "key", None)
    return not (isinstance(key, m.AttemptKey) and key.purpose is Purpose.evaluate)


def apply(ws: WorkingSet, message: Any, now: float, *, gone: dict[str, int], read_config: ReadConfig) -> None:
    """`gone`: attempts that the ledger knows and the working set no longer needs -> their epoch."""
    match message:
        case m.AttemptHeartbeat():
            heartbeat(ws, message, now)
        case m.AttemptClaimed() | m.RolloutFinished() | m.RolloutFailed() | m.RolloutScored():
            about_attempt(ws, message, now, gone)
        case m.ProblemAdmitted():
            admit(ws, message, now)
        case m.GroupQuarantined():
            quarantine(ws, message, now)
        case m.StepCommitted():
            commit_step(ws, message, now)
        case m.IncarnationStarted():
            start_incarnation(ws, message, now)
        case m.PolicyPublished():
            publish_policy(ws, message, now)
        case m.PolicyApplied():
            apply_policy(ws, message, now)
        case m.PolicyPromoted():
            promote_policy(ws, message, now)
        case m.RunControl():
            control(ws, message, now, read_config)
        case m.Alert():
            alerted(ws, message, now)
        case _:
            raise Refused(f"the scheduler has no use for {type(message).__name__}")


# Attempts


_KINDS: dict[Any, tuple[str, AttemptState]] = {
    m.AttemptClaimed: ("attempt.claimed", AttemptState.claimed),
    m.RolloutFinished: ("attempt.finished", AttemptState.finished),
    m.RolloutFailed: ("attempt.lost", AttemptState.lost),
    m.RolloutScored: ("attempt.scored", AttemptState.scored),
}


def about_attempt(ws: WorkingSet, message: Any, now: float, gone: dict[str, int]) -> None:
    """Moves the attempt, and keeps what the message adds. What comes too late (an older epoch, a closed group) is
    recorded as an event and changes nothing, so that the ledger can account for every message on the bus."""
    key: m.AttemptKey = message.key
    kind, state = _KINDS[type(message)]
    attempt = ws.attempts.get(key.attempt)
    if attempt is None:
        if key.attempt not in gone:
            raise Refused(f"attempt {key.attempt!r} of run {message.run!r}: the ledger never asked for it")
        ws.event(now, kind, key.attempt, key.epoch, ignored="its group is closed")
        return
    if key.epoch > attempt.epoch:
        raise Refused(f"attempt {key.attempt!r}: epoch {key.epoch} was never asked for, the newest is {attempt.epoch}")
    if key.epoch < attempt.epoch:
        ws.event(now, kind, key.attempt, key.epoch, ignored=f"epoch {attempt.epoch} is in force")
        return
    if isinstance(message, m.RolloutScored):
        _check_verdict(ws, attempt, message)
    moved = attempt.told(key.epoch, state)
    attempt.heard_at = now
    if attempt.claimed_at is None:
        ws.taken_at = now  # whatever is said of it, a worker has taken it up
    data: dict[str, Any] = {}
    match message:
        case m.AttemptClaimed():
            attempt.worker = attempt.worker or message.worker
            attempt.claimed_at = attempt.claimed_at or now
            data = {"worker": message.worker}
        case m.RolloutFinished():
            _finished(attempt, message, now)
            attempt.worker, attempt.seconds = message.worker, message.seconds
            data = {"stop": message.stop.value, "oldest": message.oldest_version, "newest": message.newest_version}
        case m.RolloutScored():
            _finished(attempt, message, now)
            ws.scored_at = now
            if moved:
                attempt.reward, attempt.solved = message.reward, message.verdict.solved
                ws.changes.verdicts.append(message)
            data = {"reward": message.reward, "solved": message.verdict.solved}
        case m.RolloutFailed():
            if moved:
                attempt.lost_at, attempt.reason = now, message.reason[:2000]
            data = {"reason": message.reason[:2000], "worker": message.worker}
    ws.event(now, kind, key.attempt, key.epoch, **data)  # the database keeps one per (kind, subject, epoch)
    ws.touch(attempt)


def _finished(attempt: Attempt, message: m.RolloutFinished | m.RolloutScored, now: float) -> None:
    attempt.saw(message.oldest_version)
    if message.newest_version >= 0:
        attempt.newest_version = message.newest_version
    attempt.finished_at = attempt.finished_at or now
    if attempt.trajectory is None:
        attempt.trajectory, attempt.effort, attempt.stop = message.trajectory, message.effort, message.stop.value


def _check_verdict(ws: WorkingSet, attempt: Attempt, message: m.RolloutScored) -> None:
    expected = ws.open[attempt.group].reward_config
    if message.reward_config != expected:
        raise Refused(
            f"attempt {attempt.id!r}: scored under reward configuration {message.reward_config!r}, "
            f"its group was asked for under {expected!r}; no group mixes two"
        )


def heartbeat(ws: WorkingSet, message: m.AttemptHeartbeat, now: float) -> None:
    """Renews the leases of what the worker holds. Only a new oldest version is worth a write."""
    for name, (epoch, oldest) in message.attempts.items():
        attempt = ws.attempts.get(name)
        if attempt is None or attempt.epoch != epoch:
            continue
        attempt.heard_at = now
        moved = attempt.told(epoch, AttemptState.claimed)  # its claim is on the way
        if moved:
            attempt.worker, attempt.claimed_at = message.worker, now
            ws.taken_at = now
            ws.event(now, "attempt.claimed", name, epoch, worker=message.worker)
        if attempt.saw(oldest) or moved:
            ws.touch(attempt)


# Problems and groups


def admit(ws: WorkingSet, message: m.ProblemAdmitted, now: float) -> None:
    """A request carries the problem's name and both references: together they must leave room for the rest of it."""
    longest = max(map(len, message.problems), default=0)
    if longest > NAME_CHARS:
        raise Refused(f"a problem's id of {longest} characters; allowed: at most {NAME_CHARS}")
    for ref in (message.pack, message.pack_hidden):
        if len(ref.key) > NAME_CHARS:
            raise Refused(f"a pack's key of {len(ref.key)} characters; allowed: at most {NAME_CHARS}")
    pack = message.pack.checksum
    if pack not in ws.packs:
        ws.packs[pack] = (message.pack, message.pack_hidden)
        ws.row("packs", pack_hash=pack, pack=message.pack, pack_hidden=message.pack_hidden)
    new = [(p, c, cell, pack) for p, (c, cell) in message.problems.items() if p not in ws.catalogue]
    if not new:
        return
    ws.catalogue.add(new)
    for problem, category, cell, _ in new:
        ws.row("problems", problem_id=problem, pack_hash=pack, category=category, cell=cell, admitted_at=now)
    ws.event(now, "problems.admitted", min(p[0] for p in new), count=len(new), pack=pack)
    ws.last_work_at = now


def quarantine(ws: WorkingSet, message: m.GroupQuarantined, now: float) -> None:
    """The trainer cannot train this group. Its problem, untrained, may return: not on the word of a trainer whose heir was
    told of the group meanwhile. It may train it, and says itself if it cannot."""
    group = ws.waiting.get(message.group)
    if group is None:
        return  # known already, or trained meanwhile by a lineage that survives
    if 0 <= message.incarnation < (group.announced or 0):
        ignored = f"announced to incarnation {group.announced}"
        return ws.event(now, "group.quarantined", group.id, message.incarnation, ignored=ignored)
    del ws.waiting[group.id]
    group.enter(GroupState.quarantined)
    group.reason = message.reason[:2000]
    ws.touch(group)
    ws.release(group)
    ws.event(now, "group.quarantined", group.id, max(0, message.incarnation), reason=group.reason)


# The trainer's facts


def commit_step(ws: WorkingSet, message: m.StepCommitted, now: float) -> None:
    """Facts, whatever becomes of the lineage. A step of an incarnation that nobody announced continues right before it:
    the topic keeps the trainer's order, so its first step is its first word."""
    if message.incarnation > ws.lineage.current:
        begun = m.IncarnationStarted(
            run=message.run, incarnation=message.incarnation, step=message.step - 1, parent=ws.lineage.current
        )
        start_incarnation(ws, begun, now)
        if ws.forked:
            return  # the desk loads the run again and applies this message to it
    if (message.incarnation, message.step) in ws.steps:
        return
    ws.steps[message.incarnation, message.step] = message.serial
    ws.row(
        "steps",
        incarnation=message.incarnation,
        step=message.step,
        serial=message.serial,
        committed_at=now,
        metrics=dict(message.metrics),
    )
    survives = ws.lineage.survives(message.incarnation, message.step)
    unknown = [group for group in message.groups if group not in ws.announced]
    again = [group for group in message.groups if survives and group in ws.trained]
    for group, age in message.groups.items():
        if group in ws.announced and group not in again:
            ws.row("trained", group_id=group, incarnation=message.incarnation, step=message.step, reported_age=age)
    data = {"serial": message.serial, "groups": message.groups, "survives": survives, "unknown": unknown}
    ws.event(now, "step.committed", str(message.step), message.incarnation, **data)
    if unknown:
        ws.alert(now, "unknown_groups", "critical", "a step names groups that the ledger never announced", unknown)
    if again:
        ws.alert(
            now, "trained_twice", "critical", "a step names groups that were trained before in this lineage", again
        )
    if survives:
        _survived(ws, message, now)


def _survived(ws: WorkingSet, message: m.StepCommitted, now: float) -> None:
    ws.tip = max(ws.tip, message.step)
    ws.commits.append(now)
    ws.last_work_at = now
    late = []
    for name in message.groups:
        if name not in ws.announced:
            continue
        ws.trained.add(name)
        group = ws.waiting.pop(name, None)
        problem = ws.announced[name]
        for other in [g for g in (*ws.open.values(), *ws.waiting.values()) if g.problem == problem]:
            if other.id not in message.groups:
                abandon(ws, other, f"its problem was trained meanwhile, by {name}", now)
        ws.catalogue.take(problem)  # trained is trained, even if the ledger had given the group up
        if group and group.versions and ws.config:
            age = message.step - 1 - min(ws.position(version) for version in group.versions)
            if age > ws.config.schedule.max_staleness:
                late.append(f"{name}: {age} steps")
    if late:
        what = f"step {message.step} trained samples older than the bound"
        ws.alert(now, "staleness_breach", "critical", what, late)


def start_incarnation(ws: WorkingSet, message: m.IncarnationStarted, now: float) -> None:
    """A newer trainer's word. An older one's, or the same again, changes nothing."""
    if message.incarnation <= ws.lineage.current:
        return
    ws.row("incarnations", incarnation=message.incarnation, step=message.step, parent=message.parent, started_at=now)
    ws.event(now, "incarnation.started", "", message.incarnation, step=message.step, parent=message.parent)
    ws.head.incarnation = message.incarnation
    ws.lineage = Lineage(ws.lineage.forks | {message.incarnation: Fork(message.parent, message.step)})
    ws.forked = True


def publish_policy(ws: WorkingSet, message: m.PolicyPublished, now: float) -> None:
    if message.serial in ws.policies:
        return
    ws.policies[message.serial] = (message.incarnation, message.step, now)
    ws.row(
        "policies",
        serial=message.serial,
        incarnation=message.incarnation,
        step=message.step,
        parent=message.parent,
        manifest=message.manifest,
        published_at=now,
    )
    ws.event(now, "policy.published", str(message.serial), message.incarnation, step=message.step)


def apply_policy(ws: WorkingSet, message: m.PolicyApplied, now: float) -> None:
    """A replica that takes over the address of another one replaces it: it is the same place, started again."""
    same = [name for name, one in ws.replicas.items() if message.url and one.url == message.url]
    for name in same:
        if name != message.replica:
            ws.forget_replica(name, now, f"{message.replica} has its address"[:2000])
    ws.replicas[message.replica] = ReplicaState(
        message.pool, message.serial, message.ok, message.url, message.pause_s, now, message.reason[:2000]
    )
    ws.changes.replicas.add(message.replica)
    ws.event(now, "policy.applied", message.replica, message.serial, ok=message.ok, pause_s=message.pause_s)


def promote_policy(ws: WorkingSet, message: m.PolicyPromoted, now: float) -> None:
    """That it ever was: the database keeps one event per version. Its weights stay."""
    ws.event(now, PROMOTED, str(message.serial), reason=message.reason[:2000], by=message.by[:200])


# The run


def alerted(ws: WorkingSet, message: m.Alert, now: float) -> None:
    """The run pauses where its configuration names this alert, and above its quota; the trainer does not go on either."""
    if ws.config is None or ws.head.state is not RunState.running:
        return
    if message.name not in (QUOTA_EXCEEDED, *ws.config.schedule.pause_on):
        return
    reason = f"alert {message.name}: {message.what}"[:2000]
    ws.enter(RunState.paused, now, reason, by=m.BY_SCHEDULER, drain=False)
    ws.say_state(now)
