"""What follows from a run's state: give attempts again, close and announce groups, stop, ask for more.

Level-triggered: everything is decided from the working set and the time, so it does not matter which message came last,
and a scheduler that starts in the middle goes on as if it had always been there. Deciding twice changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.scheduler import reconciler, rotation
from services.scheduler.hardness import Outcome
from services.scheduler.life import Budget, exhausted_s, hand_is_empty, step_seconds
from services.scheduler.listening import Listening
from services.scheduler.mending import mend
from services.scheduler.reconciler import Closing, Fate
from services.scheduler.records import Attempt, Group
from services.scheduler.requesting import ask, floor, grade_again, request, say_request
from services.scheduler.working_set import WorkingSet
from shared.contracts import codec
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.life import RunState
from shared.ledger.transitions import ENDS, AttemptState, GroupState

RECONCILE_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. `requests_unread`: whether the bus holds requests that no worker has acknowledged; None: unknown."""

    attempt_s: float
    grading_s: float
    replica_patience_s: float
    listening: Listening
    requests_unread: bool | None = None


def decide(ws: WorkingSet, now: float, limits: Limits, *, asks: bool = True) -> set[str]:
    """Returns what the run waits on, in words for `/readyz`; empty: on nothing but its own work. `asks` False: the run asks for no
    new groups here, since others run too (`requesting.request_among`)."""
    if ws.config is None:
        return set()
    _forget_replicas(ws, now, limits)
    waits = mend(ws, now, limits.replica_patience_s)
    if ws.head.state is RunState.stopping:
        _give_up_open(ws, now)
    elif ws.head.state is RunState.running:
        _drop_hopeless(ws, now)
        _reconcile(ws, now, limits, asking=True)
    elif ws.head.state is RunState.paused:
        _reconcile(ws, now, limits, asking=False)
    _close(ws, now)
    announce(ws, now)
    if ws.head.state is RunState.running:
        _spend(ws, now, limits)
    if ws.head.state is RunState.running:
        return waits | request(ws, now, limits.replica_patience_s) if asks else waits
    if ws.gate:
        ws.gate["room"] = 0  # a run that is not running asks for nothing
    if ws.head.state is RunState.stopping:
        _finish(ws, now, limits)
    return waits


def _forget_replicas(ws: WorkingSet, now: float, limits: Limits) -> None:
    for name in rotation.gone(ws.replicas, ws.policies, limits.replica_patience_s, limits.listening.since):
        ws.forget_replica(name, now, "nothing was heard of it for too long")


# Attempts


def _reconcile(ws: WorkingSet, now: float, limits: Limits, *, asking: bool) -> None:
    """`asking` False: leases and deadlines hold, but what was lost waits for the run to go on."""
    if now - ws.reconciled_at < RECONCILE_EVERY_S:
        return
    ws.reconciled_at = now
    assert ws.config
    schedule = ws.config.schedule
    for attempt in list(ws.live()):
        if _is_watched(attempt, asking):
            _watch(ws, attempt, now, limits, schedule.lease_s)
        if attempt.state is AttemptState.finished and not attempt.unusable:
            _watch_grading(ws, attempt, now, limits)
        if attempt.state is AttemptState.lost or (attempt.state is AttemptState.finished and attempt.unusable):
            match reconciler.fate(attempt.fruitless, now - attempt.lost_at, schedule.replacements):
                case Fate.again if asking:
                    ask(ws, attempt, now, epoch=attempt.epoch + 1, floor=floor(ws, now, limits.replica_patience_s))
                case Fate.fail:
                    _end(ws, attempt, AttemptState.failed, attempt.unusable or attempt.reason, now)
                case _:
                    pass


def overdue(ws: WorkingSet, now: float, limits: Limits) -> bool:
    """Whether an attempt of the run would be lost for silence now."""
    if ws.config is None or ws.head.state not in (RunState.running, RunState.paused):
        return False
    watched = (a for a in ws.live() if _is_watched(a, ws.head.state is RunState.running))
    return any(_overdue(ws, attempt, now, limits, ws.config.schedule.lease_s, upto=now) for attempt in watched)


def idle(ws: WorkingSet, now: float, limits: Limits) -> bool:
    """Return whether a request of the run would be repeated now, if the bus held none."""
    if ws.config is None or ws.head.state is not RunState.running:
        return False
    return any(a.state is AttemptState.requested and _repeats(ws, a, now, limits, unread=False) for a in ws.live())


def _is_watched(attempt: Attempt, asking: bool) -> bool:
    """Whether its silence may mean that it is lost. A paused run's workers take nothing up."""
    return attempt.state is AttemptState.claimed or (asking and attempt.state is AttemptState.requested)


def _overdue(
    ws: WorkingSet, attempt: Attempt, now: float, limits: Limits, lease_s: float, *, upto: float | None = None
) -> str:
    """`upto`: as if everything that was said before it had been read; None: as far as it has been read."""
    since = limits.listening.since
    # A queue that moves, however slowly, has lost nothing: a request waits since anything of the run was taken up last.
    waits_since = max(attempt.heard_at, ws.resumed_at, ws.taken_at)
    return reconciler.overdue(
        attempt.state,
        silent_s=since(attempt.heard_at, upto),
        passed_over_s=since(waits_since, upto) if ws.taken_at > attempt.requested_at else None,
        cancelled_s=None if attempt.cancelled_at is None else since(attempt.cancelled_at, upto),
        lease_s=lease_s,
        limit_s=limits.attempt_s,
    )


def _repeats(ws: WorkingSet, attempt: Attempt, now: float, limits: Limits, *, unread: bool | None) -> bool:
    """Whether the request is to be repeated now: it, and all others, have been taken up by nobody for too long."""
    if ws.taken_at > attempt.requested_at:
        return False  # others were taken up after it: `overdue` watches over it
    waits_since = max(attempt.heard_at, attempt.requested_at, attempt.asked_at, ws.resumed_at, ws.taken_at)
    return reconciler.repeat(limits.listening.since(waits_since, now), attempt.repeats, limits.attempt_s, unread)


def _watch_grading(ws: WorkingSet, attempt: Attempt, now: float, limits: Limits) -> None:
    """Have a finished rollout graded again whose grading failed, or whose verdict does not come. A queue of the graders that
    is long has not failed: only a verdict that others have overtaken is missing."""
    finished = attempt.finished_at or now
    if attempt.overtaken_at is None and ws.graded_upto > finished:
        attempt.overtaken_at = now
        ws.touch(attempt)
    since = limits.listening.since
    failed = attempt.grade_at is not None and now >= attempt.grade_at
    overdue = attempt.grade_at is None and reconciler.ungraded(
        overtaken_s=None if attempt.overtaken_at is None else since(attempt.overtaken_at),
        quiet_s=since(max(finished, ws.scored_at, attempt.asked_at)),
        grading_limit_s=limits.grading_s + attempt.grading_s,
    )
    if overdue and attempt.overtaken_at is None:
        ws.quiet_at = now  # then all that wait as long, or nearly so: the first verdict would put off the others
    elif attempt.grade_at is None and max(finished, attempt.asked_at) < ws.quiet_at - limits.grading_s:
        overdue = True
    if not failed and not overdue:
        return
    silent = overdue and attempt.overtaken_at is not None
    limit = reconciler.UNANSWERED if silent else reconciler.GRADINGS
    attempt.gradings += silent
    if attempt.gradings > limit and ws.scored_at > attempt.asked_at:
        attempt.unusable = f"no verdict, although it was to be graded {attempt.gradings} times and others were graded"
        attempt.lost_at, attempt.grade_at = now, None
        ws.touch(attempt)
        return
    attempt.grade_at, attempt.asked_at = None, now
    attempt.overtaken_at = None if attempt.overtaken_at is None else now
    grade_again(ws, attempt, now)


def _watch(ws: WorkingSet, attempt: Attempt, now: float, limits: Limits, lease_s: float) -> None:
    running_s = now - (attempt.claimed_at or now)
    why = _overdue(ws, attempt, now, limits, lease_s)
    if why:
        attempt.told(attempt.epoch, AttemptState.lost)
        attempt.lost_at, attempt.reason = now, why
        ws.event(now, "attempt.lost", attempt.id, attempt.epoch, reason=why, worker=attempt.worker)
        ws.touch(attempt)
    elif reconciler.must_submit(attempt.state, running_s, attempt.cancelled_at is not None, limits.attempt_s):
        attempt.cancelled_at = now
        ws.say(t.ATTEMPTS_CANCEL, attempt.id, _cancel(ws, attempt, "submit"))
        ws.touch(attempt)
    elif attempt.state is AttemptState.requested and _repeats(ws, attempt, now, limits, unread=limits.requests_unread):
        attempt.repeats += 1
        attempt.asked_at = now
        ws.touch(attempt)
        say_request(ws, attempt)
        what = "requests that no worker has taken up were asked for again: the bus may have lost them"
        ws.alert(now, "requests_repeated", "warning", what, [attempt.id])


def _cancel(ws: WorkingSet, attempt: Attempt, mode: Literal["submit", "drop"]) -> m.AttemptCancel:
    return m.AttemptCancel(run=ws.id, attempt=attempt.id, epoch=attempt.epoch, mode=mode)


def _end(ws: WorkingSet, attempt: Attempt, state: AttemptState, reason: str, now: float) -> None:
    if attempt.told(attempt.epoch, state):
        attempt.reason = reason
        ws.event(now, f"attempt.{state.value}", attempt.id, attempt.epoch, reason=reason)
        ws.touch(attempt)


# Groups


def _close(ws: WorkingSet, now: float) -> None:
    """Drop groups with too few survivors. Complete groups get their places in the ledger's order, those of the oldest versions
    first, as far as every unfinished group can still be trained in time after them (`gate`)."""
    assert ws.config
    fates = {
        name: reconciler.closing([a.state for a in group.attempts], ws.config.schedule.group_min)
        for name, group in ws.open.items()
    }
    for name, fate in fates.items():
        if fate is Closing.dropped:
            group = ws.open[name]
            drop(ws, group, f"fewer than {ws.config.schedule.group_min} attempts survived", now)
            ws.alert(now, "groups_dropped", "warning", "infrastructure failed too many attempts of a group", [group.id])
    complete = {name for name, fate in fates.items() if fate is Closing.ready}
    if complete:
        standing = ws.standing()
        names, groups = list(standing), [(oldest, name in complete) for name, oldest in standing.items()]
        for index in ws.schedule_gate.placing(groups, accepted=ws.accepted):
            _place(ws, ws.open[names[index]], now)
    ws.held = sorted(complete & ws.open.keys())


def _place(ws: WorkingSet, group: Group, now: float) -> None:
    """A complete group gets the next place in the ledger's order."""
    survivors = [a for a in group.attempts if a.state is AttemptState.scored]
    for attempt in survivors:
        attempt.told(attempt.epoch, AttemptState.grouped)
        ws.touch(attempt)
    count = group.members = len(survivors)
    efforts = [a.effort for a in survivors if a.effort is not None]
    group.solved = sum(a.solved for a in survivors)
    group.turns = sum(e.turns for e in efforts) / count
    group.thinking_tokens = sum(e.thinking_tokens for e in efforts) / count
    group.versions = sorted({version for a in survivors for version in a.versions})
    ws.head.last_ready += 1
    group.enter(GroupState.ready)
    group.sequence, group.closed_at, group.step = ws.head.last_ready, now, ws.tip
    ws.event(now, "group.ready", group.id, sequence=group.sequence, members=[a.id for a in survivors])
    ws.touch(group)
    _forget(ws, group)
    ws.waiting[group.id] = group
    ws.announced[group.id] = group.problem
    ws.latencies_s.append(max(attempt.heard_at for attempt in survivors) - group.requested_at)
    ws.last_work_at = now
    category, cell = ws.catalogue.kind(group.problem)
    ws.hardness.observe(Outcome(category, cell, count, group.solved, group.turns, group.thinking_tokens, group.step))


def drop(ws: WorkingSet, group: Group, reason: str, now: float) -> None:
    """Its live attempts end with it; whether its problem returns: `WorkingSet.release`."""
    for attempt in group.attempts:
        if attempt.state not in ENDS:
            _end(ws, attempt, AttemptState.dropped, reason, now)
    group.enter(GroupState.dropped)
    group.closed_at, group.reason = now, reason
    ws.event(now, "group.dropped", group.id, reason=reason)
    ws.touch(group)
    _forget(ws, group)
    ws.waiting.pop(group.id, None)
    ws.release(group)


def abandon(ws: WorkingSet, group: Group, reason: str, now: float) -> None:
    """Drops it and tells whoever works on it."""
    for attempt in group.attempts:
        if attempt.state not in ENDS:
            ws.say(t.ATTEMPTS_CANCEL, attempt.id, _cancel(ws, attempt, "drop"))
    drop(ws, group, reason, now)


def _forget(ws: WorkingSet, group: Group) -> None:
    ws.open.pop(group.id, None)
    for attempt in group.attempts:
        ws.attempts.pop(attempt.id, None)


def unannounced(ws: WorkingSet) -> list[Group]:
    """Return ready, untrained groups that the trainer of the surviving lineage was not told of, in the ledger's order. None
    before a trainer was heard of: any later one would take what is addressed to nobody."""
    if ws.head.incarnation < 0:
        return []
    return [g for g in ws.waiting.values() if g.announced is None or g.announced < ws.head.incarnation]


def announce(ws: WorkingSet, now: float) -> None:
    """Tells the trainer. A new incarnation is told again of everything that waits: it may have forgotten, and what its
    predecessor trained after the fork waits again. What the fork made too old to train within the bound is dropped.

    The trainer trains in the ledger's order. So where a step is heard of before the word that a group was set aside, the
    group is one that the trainer has passed over. It grows old without anybody's fault, and is no breach of the bound."""
    new = unannounced(ws)
    if not new or ws.forking(now):
        return
    assert ws.config
    queue = sorted(ws.waiting.values(), key=lambda g: g.sequence or 0)
    ages = [min((ws.position(v) for v in g.versions), default=ws.tip) for g in queue]
    late = [g for g, fine in zip(queue, ws.schedule_gate.in_time(ages, trained=ws.slots), strict=True) if not fine]
    aside = [g for g in late if g.announced == ws.head.incarnation and (g.sequence or 0) < ws.trained_upto]
    for group in aside:
        drop(ws, group, "the trainer set it aside: it has trained groups that come later", now)
    late = [g for g in late if g not in aside]
    for group in late:
        drop(ws, group, f"older than {ws.config.schedule.max_staleness} steps by the time it would be trained", now)
    if late and len(ws.lineage.forks) <= 1:
        what = "groups too old to train although nothing was forked"
        ws.alert(now, "staleness_breach", "critical", what, [g.id for g in late])
    elif late:
        what = f"the fork at step {ws.lineage.start} made {len(late)} groups too old to train"
        ws.alert(now, "groups_dropped", "warning", what, [g.id for g in late])
    progress = Budget.of(ws.config.schedule).progress(steps=ws.tip, clock_s=ws.clock(now))
    for group in sorted(new, key=lambda g: g.sequence or 0):
        if group.state is not GroupState.ready or group.sequence is None:
            continue
        ready = m.GroupReady(
            run=ws.id,
            group=group.id,
            problem=group.problem,
            sequence=group.sequence,
            members=ws.members(group),
            incarnation=ws.head.incarnation,
            progress=progress,
            reward_config=group.reward_config,
            expected=ws.hardness.chance_at_first(*ws.catalogue.kind(group.problem)),
        )
        try:
            codec.encode(t.GROUPS_READY, ready)
        except codec.MessageTooLarge as error:  # said in a tick, where no message could be blamed
            drop(ws, group, f"its announcement is too large: {error}", now)
            continue
        ws.say(t.GROUPS_READY, ws.id, ready)
        ws.event(now, "group.announced", group.id, max(0, ws.head.incarnation), sequence=group.sequence)
        group.announced = ws.head.incarnation
        group.attempts = []
        ws.touch(group)


def _drop_hopeless(ws: WorkingSet, now: float) -> None:
    """After a fork: running groups that would be too old even in the very next step. Their problems return."""
    assert ws.config
    if ws.forking(now):
        return
    bound = ws.tip - ws.config.schedule.max_staleness
    for name, oldest in ws.standing().items():
        if oldest < bound:
            group = ws.open[name]
            abandon(ws, group, f"sampled on a branch that step {ws.lineage.start} cut off, and too old since", now)


# The run


def _spend(ws: WorkingSet, now: float, limits: Limits) -> None:
    """Ends the run when its budget is spent, or when every problem was practised."""
    assert ws.config
    schedule, times = ws.config.schedule, step_seconds(ws.commits)
    why = Budget.of(schedule).spent(steps=ws.tip, clock_s=ws.clock(now), waiting=len(ws.waiting), step_times=times)
    idle = ws.head.first_request_at is not None and not ws.open and not ws.catalogue.free
    enough_s = exhausted_s(ws.admissions, ws.complete)
    if idle and len(ws.waiting) < schedule.groups_per_step and limits.listening.since(ws.last_work_at) > enough_s:
        why = why or "every problem was practised"
    if why:
        ws.enter(RunState.stopping, now, why)
        ws.say_state(now)
        _give_up_open(ws, now)


def _give_up_open(ws: WorkingSet, now: float) -> None:
    """A stopping run takes no more attempts: what runs is told to end, what is not complete is dropped."""
    if not ws.open:
        return
    for attempt in ws.live():  # by name and epoch: a worker that hears it again, after a resume, must not drop others
        if attempt.state in (AttemptState.requested, AttemptState.claimed, AttemptState.lost):
            ws.say(t.ATTEMPTS_CANCEL, attempt.id, _cancel(ws, attempt, "drop"))
    assert ws.config
    for group in list(ws.open.values()):
        states = [attempt.state for attempt in group.attempts]
        if reconciler.closing(states, ws.config.schedule.group_min) is Closing.open:
            drop(ws, group, "the run stopped before the group was complete", now)
    _close(ws, now)


def _finish(ws: WorkingSet, now: float, limits: Limits) -> None:
    assert ws.config
    since = max(ws.head.stopped_at or now, ws.commits[-1] if ws.commits else 0.0)
    if hand_is_empty(
        waiting=len(ws.waiting),
        groups_per_step=ws.config.schedule.groups_per_step,
        silent_s=limits.listening.since(since),
        step_times=step_seconds(ws.commits),
        trainer=ws.head.incarnation >= 0,
    ):
        ws.enter(RunState.finished, now, ws.head.reason, by=ws.by)
        ws.say_state(now)
