"""Messages applied to a run's working set: what each of them says becomes facts. No decision is made here.

Every function is idempotent; those about attempts commute (`shared.ledger.transitions`). A message about something that
the ledger never heard of, or that contradicts it, raises `Refused`: it belongs into the dead-letter topic.
"""

from __future__ import annotations

from typing import Any

from services.scheduler import probing
from services.scheduler.control import ReadConfig, Refused, control
from services.scheduler.decisions import abandon, drop
from services.scheduler.records import ADMISSIONS, COMPLETE, Mending, ReplicaState
from services.scheduler.recovery import problems_of, take_trained
from services.scheduler.rollouts import about_attempt
from services.scheduler.working_set import WorkingSet
from shared.contracts import messages as m
from shared.contracts.life import RunState
from shared.contracts.lineage import Fork, Lineage
from shared.contracts.run import ALWAYS_PAUSE, Purpose
from shared.contracts.topics import ROLLOUTS_SCORED, Topic
from shared.ledger.transitions import AttemptState, GroupState

PROMOTED = "policy.promoted"  # an event's kind
NAME_CHARS = 1024  # of a problem's id, and of an object's key: no store takes a longer one


def concerns(message: Any) -> bool:
    """Evaluations are not in the ledger. (A heartbeat names attempts of both kinds: the unknown ones are passed over.)"""
    key = getattr(message, "key", None)
    return not (isinstance(key, m.AttemptKey) and key.purpose is Purpose.evaluate)


def apply(
    ws: WorkingSet,
    message: Any,
    now: float,
    *,
    gone: dict[str, int],
    read_config: ReadConfig,
    topic: Topic | None = None,
) -> None:
    """`gone`: attempts that the ledger knows and the working set no longer needs -> their epoch. `topic`: where it was said."""
    match message:
        case m.AttemptHeartbeat():
            heartbeat(ws, message, now)
        case m.AttemptCheckpointed():
            checkpointed(ws, message, now)
        case m.AttemptClaimed() | m.RolloutFinished() | m.RolloutFailed() | m.RolloutScored():
            about_attempt(ws, message, now, gone, of_grading=topic is ROLLOUTS_SCORED)
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
        case m.RunCommand():
            control(ws, message, now, read_config)
        case m.Alert():
            alerted(ws, message, now)
        case _:
            raise Refused(f"the scheduler has no use for {type(message).__name__}")


# Workers


def heartbeat(ws: WorkingSet, message: m.AttemptHeartbeat, now: float) -> None:
    """Renew the leases of what the worker holds. Only a new oldest version is worth a write.

    Two workers may hold the same epoch. The gate counts on the versions of the first; of the second only its result counts
    (`rollouts.take`), and its heartbeats do not hide that the first has died once it has died itself."""
    ws.workers[message.worker] = now, frozenset(message.silent)
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
        first = attempt.worker == message.worker and attempt.state is not AttemptState.scored
        if (first and attempt.saw(oldest)) or moved:
            ws.touch(attempt)


def checkpointed(ws: WorkingSet, message: m.AttemptCheckpointed, now: float) -> None:
    """Keep what the attempt's next epoch continues from. Of an epoch that is over it says nothing any more: the next has begun
    from what was known, and stands on the versions of that."""
    attempt = ws.attempts.get(message.key.attempt)
    if attempt is None or attempt.epoch != message.key.epoch or attempt.state is AttemptState.scored:
        return
    attempt.heard_at = now
    if attempt.kept(message.checkpoint, message.oldest_version):
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
    if why := probing.objection(message.probed, message.problems):
        raise Refused(why)
    pack = message.pack.checksum
    if pack not in ws.packs:
        ws.packs[pack] = (message.pack, message.pack_hidden)
        ws.row("packs", pack_hash=pack, pack=message.pack, pack_hidden=message.pack_hidden)
    if message.complete and not ws.complete:
        ws.complete = True
        ws.event(now, COMPLETE, "")
    new = ws.catalogue.add([(p, c, cell, pack) for p, (c, cell) in message.problems.items()])
    if not new:
        return
    for problem, category, cell, _ in new:
        ws.row("problems", problem_id=problem, pack_hash=pack, category=category, cell=cell, admitted_at=now)
    take_trained(ws, (row[0] for row in new))
    ws.admissions = [*ws.admissions, now][-ADMISSIONS:]
    ws.event(now, "problems.admitted", min(p[0] for p in new), count=len(new), pack=pack)
    probing.take(ws, {row[0]: message.probed[row[0]] for row in new if row[0] in message.probed}, now)
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
    if message.step > ws.tip + 1:
        ws.behind = True  # steps are read in their order, so the ledger has lost those in between
    ws.tip = max(ws.tip, message.step)
    ws.commits.append(now)
    ws.note_seconds(message.metrics)
    ws.last_work_at = now
    late = []
    for problem in problems_of(ws, message.groups.keys() - ws.announced.keys()).values():
        _trained_unheard(ws, problem, message.step, now)
    for name in message.groups:
        if name not in ws.announced:
            continue
        ws.trained.add(name)
        group = ws.waiting.pop(name, None)
        if group is not None:
            ws.trained_upto = max(ws.trained_upto, group.sequence or 0)
        problem = ws.announced[name]
        for other in [g for g in (*ws.open.values(), *ws.waiting.values()) if g.problem == problem]:
            if other.id not in message.groups:
                abandon(ws, other, f"its problem was trained meanwhile, by {name}", now)
        ws.catalogue.take(problem)  # trained is trained, even if the ledger had given the group up
        if group and group.versions and ws.config:
            age = message.step - 1 - min(ws.position(version) for version in group.versions)
            if age > ws.config.schedule.max_staleness:
                late.append(f"{name}: {age} steps")
    if ws.behind:
        _pass_over(ws, message, now)
    if late:
        what = f"step {message.step} trained samples older than the bound"
        ws.alert(now, "staleness_breach", "critical", what, late)


def _pass_over(ws: WorkingSet, message: m.StepCommitted, now: float) -> None:
    """Give up the groups that steps which the ledger has lost trained; waited for, they would keep their places without end. The
    trainer trains in the ledger's order: what it was told of and has passed over was trained then, or it was set aside. Either
    way the problem does not return."""
    waiting = [g for g in ws.waiting.values() if g.announced == message.incarnation]
    passed = [g for g in waiting if (g.sequence or 0) < ws.trained_upto]
    for group in passed:
        drop(
            ws, group, f"the trainer passed over it by step {message.step}: the ledger has lost steps before that", now
        )
        ws.catalogue.take(group.problem)
    if passed:
        what = f"the ledger has lost steps before step {message.step} (docs/operations.md)"
        ws.alert(now, "ledger_behind", "critical", what, [group.id for group in passed])


def _trained_unheard(ws: WorkingSet, problem: str, step: int, now: float) -> None:
    """A ledger that lost its last commits hears of a group that it never announced. Its problem is trained all the same."""
    for other in [g for g in (*ws.open.values(), *ws.waiting.values()) if g.problem == problem]:
        abandon(ws, other, f"its problem was trained meanwhile, in step {step}", now)
    ws.catalogue.take(problem)


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
    if message.parent < 0:
        ws.base = max(ws.base, message.serial)
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
        message.pool,
        message.serial,
        message.ok,
        message.url,
        message.pause_s,
        now,
        message.reason[:2000],
        damaged=message.damaged and not message.ok,
        serving=message.serving,
    )
    if message.ok and message.pool == "rollout":
        ws.mending = Mending()
    ws.changes.replicas.add(message.replica)
    ws.event(now, "policy.applied", message.replica, message.serial, ok=message.ok, pause_s=message.pause_s)


def leave(ws: WorkingSet, message: m.PolicyApplied, now: float) -> None:
    """A replica serves one run at a time: one that serves another run has left this one, and says nothing about that here."""
    if message.run == ws.id or not message.ok:
        return
    places = (message.replica, *([message.url] if message.url else ()))
    for name in [name for name, one in ws.replicas.items() if name in places or one.url in places]:
        ws.forget_replica(name, now, f"{message.replica} serves run {message.run} now"[:2000])


def promote_policy(ws: WorkingSet, message: m.PolicyPromoted, now: float) -> None:
    """That it ever was: the database keeps one event per version. Its weights stay."""
    ws.event(now, PROMOTED, str(message.serial), reason=message.reason[:2000], by=message.by[:200])


# The run


def alerted(ws: WorkingSet, message: m.Alert, now: float) -> None:
    """The run pauses where its configuration names this alert, and at those of ALWAYS_PAUSE; the trainer does not go on either.
    That records are gone is kept, too: the audit reads the ledger alone."""
    if message.name == m.RECORDS_GONE:
        ws.event(now, m.RECORDS_GONE, "", ws.head.last_event, what=message.what, examples=message.examples)
    if ws.config is None or ws.head.state is not RunState.running:
        return
    if message.name not in ALWAYS_PAUSE.union(ws.config.schedule.pause_on):
        return
    reason = f"alert {message.name}: {message.what}"[:2000]
    ws.enter(RunState.paused, now, reason, by=m.BY_SCHEDULER, drain=False)
    ws.say_state(now)
