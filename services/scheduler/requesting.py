"""Asking for attempts: which problems, how many groups, an attempt's next epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime

import xxhash

from services.scheduler.life import Budget
from services.scheduler.records import ANY, Attempt, Group, ReplicaState
from services.scheduler.shares import Accounts, Demand
from services.scheduler.working_set import EXAMPLES, WorkingSet
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.ids import attempt_id, group_id
from shared.ledger.transitions import ENDS, AttemptState

# What nobody has claimed yet counts as old as the version that it was asked at. Few are asked for ahead of the workers,
# so that `oldest` follows the policy instead of the length of a queue.
GROUPS_AHEAD = 4
TO_CLAIM = "a rollout worker to claim attempts"


def request(ws: WorkingSet, now: float, patience_s: float) -> set[str]:
    """Asks for as many groups as the gate has room for. Returns what the run waits on, as `decisions.decide` does.
    `patience_s`: how far behind in time a replica may be and still be asked."""
    assert ws.config
    wanted, waits = _wanted(ws, now, patience_s)
    if wanted == 0:
        return waits
    size = ws.config.schedule.group_size
    queued, taken = _in_flight(ws)
    wanted = min(wanted, max(0, _ahead(size, taken) - queued) // size)
    if wanted == 0:
        return set() if taken else {TO_CLAIM}
    return _draw(ws, wanted, now, patience_s)


def request_among(sets: Sequence[WorkingSet], accounts: Accounts, now: float, patience_s: float) -> set[str]:
    """As `request`, for runs that run at the same time: who asks for how many follows from their shares (`shares`)."""
    waits: set[str] = set()
    demands = {}
    for ws in sets:
        wanted, waiting = _wanted(ws, now, patience_s)
        if wanted and not ws.catalogue.free:
            wanted, waiting = 0, {"problems"}
        waits |= waiting
        demands[ws.id] = _demand(ws, wanted)
    taken = sum(len(demand.taken) for demand in demands.values())
    room = _ahead(max((demand.group_size for demand in demands.values()), default=0), taken)
    granted, use = accounts.divide(demands, now, room), accounts.use(demands)
    for ws in sets:
        ws.use = use[ws.id]
        if granted[ws.id]:
            waits |= _draw(ws, granted[ws.id], now, patience_s)
    if not taken and not any(granted.values()) and any(demand.groups for demand in demands.values()):
        waits.add(TO_CLAIM)
    return waits


def _ahead(group_size: int, taken: int) -> int:
    """Return how many attempts may wait for a worker. `taken`: those that workers hold."""
    return max(group_size * GROUPS_AHEAD, taken // 2)


def _in_flight(ws: WorkingSet) -> tuple[int, int]:
    """Return how many attempts wait for a worker, and how many workers hold."""
    states = Counter(a.state for a in ws.attempts.values())
    return states[AttemptState.requested], states[AttemptState.claimed]


def _demand(ws: WorkingSet, wanted: int) -> Demand:
    assert ws.config
    queued = [a.requested_at for a in ws.attempts.values() if a.state is AttemptState.requested]
    held = (a for a in ws.attempts.values() if a.state is AttemptState.claimed)
    return Demand(
        share=ws.config.schedule.share,
        groups=wanted,
        group_size=ws.config.schedule.group_size,
        queued=len(queued),
        waits_since=min(queued, default=None),
        taken={(a.id, a.epoch): a.heard_at if a.claimed_at is None else a.claimed_at for a in held},
        taken_at=ws.taken_at,
    )


def _wanted(ws: WorkingSet, now: float, patience_s: float) -> tuple[int, set[str]]:
    """Return how many groups gate and budget have room for. If none: what the run waits on, as `request`."""
    assert ws.config
    schedule = ws.config.schedule
    rotation = ws.rotation(now, patience_s)
    _say_lagging(ws, rotation.keys(), now)
    if not ws.policies or not rotation:
        return 0, {"an inference replica that serves this run's policy"}
    version = min(ws.position(replica.serial) for replica in rotation.values())
    standing = list(ws.standing().values())
    room = ws.schedule_gate.room(version=version, standing=standing, accepted=ws.accepted, lead=ws.lead)
    ws.gate = {
        "version": version,
        "oldest": min([version, *standing[:1]]),
        "accepted": ws.accepted,
        "running": len(ws.open) - len(ws.held),
        "held": len(ws.held),
        "lead": ws.lead,
        "room": room,
    }
    uncovered = Budget(schedule.max_steps, 0, schedule.groups_per_step).uncovered(
        accepted=ws.accepted, running=len(ws.open)
    )
    wanted = room if uncovered is None else min(room, uncovered)
    if wanted == 0 and uncovered != 0:
        return 0, {f"admitting 0: waiting for {_holder(ws, rotation, version, standing)}"}
    return wanted, set()


def _draw(ws: WorkingSet, wanted: int, now: float, patience_s: float) -> set[str]:
    """Draw so many problems and open their groups. Return what the run waits on, as `request`."""
    assert ws.config
    if not ws.catalogue.free:
        return {"problems"}
    problems = ws.catalogue.draw(
        ws.hardness if ws.config.schedule.hardness_sampling else None,
        wanted,
        step=ws.tip,
        seed=ws.config.seed,
        number=ws.head.last_draw + 1,
    )
    lowest = floor(ws, now, patience_s)
    for problem in problems:
        _open(ws, problem, lowest, now)
    return set() if len(problems) == wanted else {"problems"}


def _holder(ws: WorkingSet, rotation: Mapping[str, ReplicaState], version: int, standing: Sequence[int]) -> str:
    """Name what keeps the gate closed: the replicas without which it would be open, else the trainer."""
    newest = max(ws.position(serial) for serial in ws.policies)
    if ws.schedule_gate.room(version=newest, standing=standing, accepted=ws.accepted, lead=ws.lead) == 0:
        return _trainer(ws)
    behind = [
        f"{name}, at version {r.serial}" for name, r in sorted(rotation.items()) if ws.position(r.serial) == version
    ]
    return f"replica {'; '.join(behind[:EXAMPLES])}, to take a newer version"


def _trainer(ws: WorkingSet) -> str:
    """Which version would open the gate, and since when the trainer has been in the step that it makes, or what that step waits
    for. The text stays the same until a step is committed, so that its age says how long the gate has been closed."""
    gate = ws.schedule_gate
    opens = max(ws.tip + 1, gate.opening(accepted=ws.accepted, running=len(ws.open), lead=ws.lead))
    since = ws.commits[-1] if ws.commits else ws.head.first_request_at or 0.0
    clock = datetime.fromtimestamp(since, UTC).strftime("%H:%M:%S UTC")
    if len(ws.waiting) >= gate.groups_per_step:
        return f"the version of step {opens}; the trainer has been in step {ws.tip + 1} since {clock}"
    return f"the version of step {opens}; step {ws.tip + 1} has waited since {clock} for {_missing(ws)}"


def _missing(ws: WorkingSet) -> str:
    """Name what a step with too few groups waits for: the slowest attempt if complete groups wait for it, else groups."""
    for n, (name, oldest) in enumerate(ws.standing().items(), 1):
        last = ws.schedule_gate.deadline(oldest) <= ws.accepted + n  # its place is the last in time
        if ws.held and last and name not in ws.held:
            slowest = next(a for a in ws.open[name].attempts if a.state not in (*ENDS, AttemptState.scored))
            return f"attempt {slowest.id}, which would be too old if others overtook it"
    return "groups to become complete"


def _say_lagging(ws: WorkingSet, rotation: Collection[str], now: float) -> None:
    """Once of each that leaves the rotation without a word, of all those together that leave it together."""
    lagging = frozenset(
        name for name, one in ws.replicas.items() if one.ok and one.pool == "rollout" and name not in rotation
    )
    new, ws.lagging = sorted(lagging - ws.lagging), lagging
    if new:
        named = ", ".join(new[:EXAMPLES]) + (f" and {len(new) - EXAMPLES} more" if len(new) > EXAMPLES else "")
        what = f"out of rotation, for it does not follow the published versions: replica {named}"
        ws.alert(now, "replica_lags", "warning", what, new)


def floor(ws: WorkingSet, now: float, patience_s: float) -> int:
    """The lowest version of the rotation; 0 while there is none."""
    return min((replica.serial for replica in ws.rotation(now, patience_s).values()), default=0)


def _open(ws: WorkingSet, problem: str, floor: int, now: float) -> None:
    assert ws.config
    schedule, head = ws.config.schedule, ws.head
    head.first_request_at = now if head.first_request_at is None else head.first_request_at
    head.clock_started_at = now if head.clock_started_at is None else head.clock_started_at
    head.last_draw += 1
    number = ws.catalogue.next_number(problem)
    ws.catalogue.opened(problem, number)
    name = group_id(ws.id, problem, number)
    group = Group(
        id=name,
        problem=problem,
        number=number,
        draw=head.last_draw,
        size=schedule.group_size,
        reward_config=ws.config.reward.id,
        requested_at=now,
    )
    ws.open[name] = group
    ws.touch(group)
    ws.event(
        now, "group.opened", name, problem=problem, number=number, size=group.size, reward_config=group.reward_config
    )
    for place in range(group.size):
        attempt = Attempt(
            id=attempt_id(ws.id, name, place),
            group=name,
            place=place,
            epoch=0,
            state=AttemptState.requested,
            policy_floor=floor,
            requested_at=now,
            heard_at=now,
        )
        group.attempts.append(attempt)
        ws.attempts[attempt.id] = attempt
        ask(ws, attempt, now, epoch=0, floor=floor)
    ws.last_work_at = now


def ask(ws: WorkingSet, attempt: Attempt, now: float, *, epoch: int, floor: int) -> None:
    """Requests an epoch of an attempt. A later epoch is sampled on what is served now (`floor`), with the same seed. It continues
    from the attempt's checkpoint, if there is one, and then still stands on the versions of the tokens in it."""
    assert ws.config
    group = ws.open[attempt.group]
    if epoch > attempt.epoch:
        attempt.told(epoch, AttemptState.requested)
        attempt.policy_floor = _floor_again(ws, attempt, floor)
        attempt.requested_at, attempt.heard_at, attempt.worker, attempt.reason = now, now, "", ""
        if attempt.trajectory is not None:  # it was whole, and is no use: nothing of it is taken up again
            attempt.checkpoint = None
        if attempt.checkpoint is None:
            attempt.oldest_version = None
        attempt.newest_version = attempt.claimed_at = attempt.finished_at = attempt.cancelled_at = None
        attempt.stop = attempt.seconds = attempt.trajectory = attempt.effort = attempt.sampled = None
        attempt.overtaken_at = None
        attempt.ungraded.pop(
            ANY, None
        )  # of this epoch. The rest stays: its rollouts may be read of only later, and count
        attempt.grading_s, attempt.gradings, attempt.unusable, attempt.repeats = 0.0, 0, "", 0
    say_request(ws, attempt)
    ws.event(
        now, "attempt.requested", attempt.id, epoch, group=group.id, place=attempt.place, floor=attempt.policy_floor
    )
    ws.touch(attempt)


def _floor_again(ws: WorkingSet, attempt: Attempt, floor: int) -> int:
    """Return the floor of the next epoch of an attempt. `floor`: the lowest version in rotation.

    The gate has admitted other groups by the version that this attempt stood on. A replica that joined the rotation since may
    serve an older one. The next epoch may stand on that only where the gate still has the places for it."""
    floor = max(attempt.policy_floor, floor)
    if ws.may_stand_on(attempt.group, ws.position(floor)):
        return floor
    return max(floor, attempt.standing)


def _key(group: Group, attempt: Attempt, epoch: int) -> m.AttemptKey:
    return m.AttemptKey(attempt=attempt.id, epoch=epoch, group=group.id, problem=group.problem, index=attempt.place)


def say_request(ws: WorkingSet, attempt: Attempt) -> None:
    """Say the request of the epoch in force, for the first time or once more."""
    assert ws.config
    group = ws.open[attempt.group]
    pack, pack_hidden = ws.packs[ws.catalogue.pack(group.problem)]
    request = m.RolloutRequested(
        run=ws.id,
        key=_key(group, attempt, attempt.epoch),
        policy_floor=attempt.policy_floor,
        reward_config=group.reward_config,
        sampling=ws.config.sampling,
        pack=pack,
        pack_hidden=pack_hidden,
        seed=xxhash.xxh3_64_intdigest(f"{ws.config.seed}|{attempt.id}".encode()) >> 1,
        checkpoint=attempt.checkpoint,
    )
    ws.say(t.ROLLOUTS_REQUESTED, attempt.id, request)


def grade_again(ws: WorkingSet, attempt: Attempt, now: float) -> None:
    """Say once more that the rollout is finished: graders grade it again, and nothing is sampled again."""
    group = ws.open[attempt.group]
    pack, pack_hidden = ws.packs[ws.catalogue.pack(group.problem)]
    assert attempt.trajectory is not None
    finished = m.RolloutFinished(
        run=ws.id,
        key=_key(group, attempt, attempt.rolled_out),
        stop=m.StopReason(attempt.stop or m.StopReason.submitted),
        trajectory=attempt.trajectory,
        reward_config=group.reward_config,
        pack=pack,
        pack_hidden=pack_hidden,
        effort=attempt.effort or m.Effort(),
        oldest_version=-1 if attempt.oldest_version is None else attempt.oldest_version,
        oldest_kv_version=-1,
        newest_version=-1 if attempt.newest_version is None else attempt.newest_version,
        worker=attempt.worker,
        seconds=attempt.seconds or 0.0,
        grading_s=attempt.grading_s,
    )
    ws.say(t.ROLLOUTS_FINISHED, attempt.id, finished)
    ws.touch(attempt)
    ws.event(now, "attempt.graded_again", attempt.id, attempt.rolled_out, times=attempt.gradings)
