"""Asking for attempts: which problems, how many groups, an attempt's next epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import xxhash

from services.scheduler.life import Budget
from services.scheduler.records import Attempt, Group
from services.scheduler.working_set import EXAMPLES, WorkingSet
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.ids import attempt_id, group_id
from shared.ledger.transitions import AttemptState

# What nobody has claimed yet counts as old as the version that it was asked at. Few are asked for ahead of the workers,
# so that `oldest` follows the policy instead of the length of a queue.
GROUPS_AHEAD = 4


def request(ws: WorkingSet, now: float, patience_s: float) -> set[str]:
    """Asks for as many groups as the gate has room for. Returns what the run waits on, as `decisions.decide` does.
    `patience_s`: how far behind in time a replica may be and still be asked."""
    assert ws.config
    schedule = ws.config.schedule
    rotation = ws.rotation(now, patience_s)
    _say_lagging(ws, rotation.keys(), now)
    if not ws.policies or not rotation:
        return {"an inference replica that serves this run's policy"}
    version = min(ws.position(replica.serial) for replica in rotation.values())
    lowest = min(replica.serial for replica in rotation.values())
    oldest = ws.oldest()
    room = ws.schedule_gate.room(
        version=version,
        oldest=version if oldest is None else oldest,
        accepted=ws.accepted,
        running=len(ws.open),
    )
    uncovered = Budget(schedule.max_steps, 0, schedule.groups_per_step).uncovered(
        accepted=ws.accepted, running=len(ws.open)
    )
    wanted = room if uncovered is None else min(room, uncovered)
    if wanted == 0:
        return set() if uncovered == 0 else {"room: the trainer to train, or the oldest attempt to end"}
    states = Counter(a.state for a in ws.attempts.values())
    unclaimed, claimed = states[AttemptState.requested], states[AttemptState.claimed]
    ahead = max(schedule.group_size * GROUPS_AHEAD, claimed // 2)
    wanted = min(wanted, max(0, ahead - unclaimed) // schedule.group_size)
    if wanted == 0:
        return set() if claimed else {"a rollout worker to claim attempts"}
    if not ws.catalogue.free:
        return {"problems"}
    problems = ws.catalogue.draw(
        ws.hardness if schedule.hardness_sampling else None,
        wanted,
        step=ws.tip,
        seed=ws.config.seed,
        number=ws.head.last_draw + 1,
    )
    for problem in problems:
        _open(ws, problem, lowest, now)
    return set() if len(problems) == wanted else {"problems"}


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
    number = ws.catalogue.numbers[ws.catalogue.index[problem]]
    ws.catalogue.numbers[ws.catalogue.index[problem]] += 1
    ws.catalogue.take(problem)
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
    """Requests an epoch of an attempt. A later epoch starts afresh, on what is served now (`floor`), with the same seed."""
    assert ws.config
    group = ws.open[attempt.group]
    if epoch > attempt.epoch:
        attempt.told(epoch, AttemptState.requested)
        attempt.policy_floor = max(attempt.policy_floor, floor)
        attempt.requested_at, attempt.heard_at, attempt.worker, attempt.reason = now, now, "", ""
        attempt.oldest_version = attempt.newest_version = attempt.claimed_at = attempt.finished_at = (
            attempt.cancelled_at
        ) = None
        attempt.stop = attempt.seconds = attempt.trajectory = attempt.effort = None
    pack, pack_hidden = ws.packs[ws.catalogue.packs[ws.catalogue.index[group.problem]]]
    request = m.RolloutRequested(
        run=ws.id,
        key=m.AttemptKey(attempt=attempt.id, epoch=epoch, group=group.id, problem=group.problem, index=attempt.place),
        policy_floor=attempt.policy_floor,
        reward_config=group.reward_config,
        sampling=ws.config.sampling,
        pack=pack,
        pack_hidden=pack_hidden,
        seed=xxhash.xxh3_64_intdigest(f"{ws.config.seed}|{attempt.id}".encode()) >> 1,
    )
    ws.say(t.ROLLOUTS_REQUESTED, attempt.id, request)
    ws.event(
        now, "attempt.requested", attempt.id, epoch, group=group.id, place=attempt.place, floor=attempt.policy_floor
    )
    ws.touch(attempt)
