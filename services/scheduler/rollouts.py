"""What workers and graders say of one attempt becomes facts.

Invariants:
- One trajectory, one verdict: reward, trajectory, effort and versions of a scored attempt come from one and the same message.
- The first verdict wins, whichever rollout it is on. Two workers may have rolled out the same epoch, and a worker that was
  silent for longer than its lease may finish after its attempt was asked for again: each of these rollouts may win.
- A finished rollout is passed over only if another one has won, or if it is older than the gate can still admit.
- Nothing here depends on the order of the topics.
"""

from __future__ import annotations

from typing import Any

from services.scheduler.control import Refused
from services.scheduler.reconciler import grade_again_in_s
from services.scheduler.records import ANY, Attempt
from services.scheduler.working_set import WorkingSet
from shared.contracts import messages as m
from shared.contracts.topics import ATTEMPTS_CANCEL
from shared.ledger.transitions import AttemptState

Rollout = m.RolloutFinished | m.RolloutScored
REASON_CHARS = 2000
UNFINISHED = (AttemptState.requested, AttemptState.claimed, AttemptState.lost)
_KINDS: dict[Any, str] = {
    m.AttemptClaimed: "attempt.claimed",
    m.RolloutFinished: "attempt.finished",
    m.RolloutFailed: "attempt.lost",
    m.RolloutScored: "attempt.scored",
}


def about_attempt(ws: WorkingSet, message: Any, now: float, gone: dict[str, int], *, of_grading: bool = False) -> None:
    """Move the attempt, and keep what the message adds. A message that comes too late is recorded as an event and changes
    nothing, so that the ledger can account for every message on the bus. `of_grading`: a grader said it."""
    key: m.AttemptKey = message.key
    kind = _KINDS[type(message)]
    attempt = ws.attempts.get(key.attempt)
    if attempt is None:
        if key.attempt not in gone:
            raise Refused(f"attempt {key.attempt!r} of run {message.run!r}: the ledger never asked for it")
        return ws.event(now, kind, key.attempt, key.epoch, ignored="its group is closed")
    if key.epoch > attempt.epoch:
        raise Refused(f"attempt {key.attempt!r}: epoch {key.epoch} was never asked for, the newest is {attempt.epoch}")
    if isinstance(message, m.RolloutScored):
        _check_verdict(ws, attempt, message)
    if isinstance(message, Rollout):
        if isinstance(message, m.RolloutFinished) and (key.epoch, message.trajectory.checksum) in attempt.useless:
            return ws.event(now, kind, key.attempt, key.epoch, ignored="graders can do nothing with this rollout")
        if why := _too_old(ws, attempt, message):  # another rollout of this epoch may still count
            return ws.event(now, "attempt.passed_over", key.attempt, key.epoch, ignored=why)
        if attempt.state is AttemptState.scored and key.epoch != attempt.rolled_out:
            return ws.event(now, kind, key.attempt, key.epoch, ignored="another rollout has its verdict")
    elif key.epoch < attempt.epoch and not _graded_in_vain(attempt, message, of_grading):
        if _is_of_grading(message, of_grading):  # of a rollout that was not read of yet; that may still come to count
            _keep_ungraded(attempt, message, now)
            ws.touch(attempt)
        return ws.event(now, kind, key.attempt, key.epoch, ignored=f"epoch {attempt.epoch} is in force")
    attempt.heard_at = now
    if attempt.claimed_at is None:
        ws.taken_at = now  # some worker has taken it up
    match message:
        case m.AttemptClaimed():
            attempt.told(key.epoch, AttemptState.claimed)
            attempt.worker = attempt.worker or message.worker
            attempt.claimed_at = attempt.claimed_at or now
            data: dict[str, Any] = {"worker": message.worker}
        case m.RolloutFinished():
            data = _finished(ws, attempt, message, now)
        case m.RolloutScored():
            data = _scored(ws, attempt, message, now)
        case m.RolloutFailed():
            data = {"reason": message.reason[:REASON_CHARS], "worker": message.worker}
            if message.checkpoint is not None and key.epoch == attempt.epoch:
                attempt.kept(message.checkpoint, message.oldest_version)
            if _is_of_grading(message, of_grading):
                kind = "attempt.ungraded"
                _ungraded(attempt, message, now)
            elif attempt.told(key.epoch, AttemptState.lost):
                attempt.lost_at, attempt.reason = now, message.reason[:REASON_CHARS]
    if key.epoch < attempt.epoch:
        data["counts_as"] = attempt.epoch
    ws.event(now, kind, key.attempt, key.epoch, **data)  # the database keeps one per (kind, subject, epoch)
    ws.touch(attempt)


def _check_verdict(ws: WorkingSet, attempt: Attempt, message: m.RolloutScored) -> None:
    expected = ws.open[attempt.group].reward_config
    if message.reward_config != expected:
        raise Refused(
            f"attempt {attempt.id!r}: scored under reward configuration {message.reward_config!r}, "
            f"its group was asked for under {expected!r}; no group mixes two"
        )


def _too_old(ws: WorkingSet, attempt: Attempt, message: Rollout) -> str:
    """Return why the rollout cannot count although it is finished; empty: it can. The gate has admitted groups by the oldest
    version that it knew of. An older one, of an earlier epoch or of a second worker, may leave too few places before it."""
    oldest = message.oldest_version
    if oldest < 0 or ws.config is None or ws.position(oldest) >= ws.position(attempt.standing):
        return ""
    if attempt.trajectory in (None, message.trajectory) and message.key.epoch == attempt.epoch and not attempt.worker:
        return ""  # nothing else is known of this epoch
    if ws.may_stand_on(attempt.group, ws.position(oldest)):
        return ""
    return f"its version {oldest} is older than the gate can still admit"


def _graded_in_vain(attempt: Attempt, message: Any, of_grading: bool) -> bool:
    """Return whether this is a grader's failure with the rollout that counts."""
    return (
        _is_of_grading(message, of_grading)
        and attempt.state is AttemptState.finished
        and message.key.epoch == attempt.rolled_out
    )


def _is_of_grading(message: Any, of_grading: bool) -> bool:
    """Return whether a grader says that it failed. `of_grading`: the message came on the graders' topic."""
    return isinstance(message, m.RolloutFailed) and (of_grading or message.trajectory is not None)


def _take(attempt: Attempt, message: Rollout) -> None:
    """Take everything that describes the rollout from this message."""
    same = attempt.trajectory == message.trajectory
    attempt.trajectory, attempt.effort, attempt.stop = message.trajectory, message.effort, message.stop.value
    attempt.sampled = message.key.epoch if message.key.epoch != attempt.epoch else None
    if message.newest_version >= 0 or not same:
        attempt.newest_version = message.newest_version if message.newest_version >= 0 else None
    if isinstance(message, m.RolloutFinished):
        attempt.worker, attempt.seconds, attempt.grading_s = message.worker, message.seconds, message.grading_s
    elif not same:
        attempt.worker, attempt.seconds = "", None  # its own finished message will say


def _finished(ws: WorkingSet, attempt: Attempt, message: m.RolloutFinished, now: float) -> dict[str, Any]:
    data = {"stop": message.stop.value, "oldest": message.oldest_version, "newest": message.newest_version}
    if attempt.state is AttemptState.scored:
        if attempt.trajectory == message.trajectory and attempt.seconds is None:
            attempt.worker, attempt.seconds = message.worker, message.seconds
        return data
    attempt.saw(message.oldest_version)  # the gate counts on the oldest of all rollouts that may still win
    _supersede(ws, attempt, message.key.epoch)
    if attempt.trajectory is None or (attempt.unusable and attempt.trajectory != message.trajectory):
        if attempt.unusable and attempt.grade_at is None:  # graders may have failed with this one too, long ago
            attempt.grade_at = now + grade_again_in_s(1)
        _take(attempt, message)
        attempt.finished_at, attempt.unusable = now, ""
        failed = attempt.ungraded.pop(message.trajectory.checksum, None) or attempt.ungraded.pop(ANY, None)
        if failed is not None:
            _ungraded(attempt, failed, now)
    if attempt.told(attempt.epoch, AttemptState.finished):
        attempt.reason = ""  # of a loss that was none
    return data


def _scored(ws: WorkingSet, attempt: Attempt, message: m.RolloutScored, now: float) -> dict[str, Any]:
    ws.scored_at = now
    _supersede(ws, attempt, message.key.epoch)
    if attempt.told(attempt.epoch, AttemptState.scored):
        _take(attempt, message)
        if message.oldest_version >= 0:
            attempt.oldest_version = message.oldest_version
        attempt.finished_at = attempt.finished_at or now
        attempt.reason = attempt.unusable = ""
        attempt.reward, attempt.solved = message.reward, message.verdict.solved
        attempt.steps = m.earned_by_step(message.verdict, message.terms)
        ws.graded_upto = max(ws.graded_upto, attempt.finished_at)
        ws.changes.verdicts.append(message)
    return {
        "reward": message.reward,
        "solved": message.verdict.solved,
        "trajectory": message.trajectory.checksum,
    }


def _supersede(ws: WorkingSet, attempt: Attempt, epoch: int) -> None:
    """A rollout of an earlier epoch counts after all: whoever rolls out the later epoch can stop."""
    if epoch < attempt.epoch and attempt.state in UNFINISHED:
        ws.say(
            ATTEMPTS_CANCEL,
            attempt.id,
            m.AttemptCancel(run=ws.id, attempt=attempt.id, epoch=attempt.epoch, mode="drop"),
        )


def _ungraded(attempt: Attempt, message: m.RolloutFailed, now: float) -> None:
    """Grading failed. The rollout stays finished: it is graded again, or sampled again where there is nothing to grade."""
    if attempt.state is AttemptState.scored:
        return
    known = attempt.trajectory if message.trajectory is None else message.trajectory
    if known is None or known != attempt.trajectory:  # of a rollout not read of yet; that may still come to count
        return _keep_ungraded(attempt, message, now)
    if message.again == "grade":
        attempt.gradings += 1
        attempt.grade_at = now + grade_again_in_s(attempt.gradings)
        return
    if attempt.state is not AttemptState.finished and attempt.told(attempt.epoch, AttemptState.lost):
        attempt.reason = message.reason[:REASON_CHARS]
    attempt.unusable, attempt.lost_at = message.reason[:REASON_CHARS], now
    attempt.useless.add((message.key.epoch, known.checksum))


def _keep_ungraded(attempt: Attempt, message: m.RolloutFailed, now: float) -> None:
    """Keep a grader's failure until its rollout is read of. A failure of an earlier epoch that names no rollout is not kept
    in memory: it must not be taken for one with a later rollout.

    `grade_at` is in the ledger, so that a scheduler that restarts in between has the rollout graded again all the same. For
    another rollout that comes first, this asks for its verdict once more, which graders answer from what they kept."""
    if message.trajectory is not None:
        attempt.ungraded[message.trajectory.checksum] = message
    elif message.key.epoch == attempt.epoch:
        attempt.ungraded[ANY] = message
    if attempt.grade_at is None:
        attempt.grade_at = now + grade_again_in_s(1)
