"""What to do with an attempt that was lost, and with a group of which not all survived. Pure.

The reconciler is the one owner of redelivery: once a worker has acknowledged a request, only this gives it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from shared.ledger.transitions import AttemptState

FIRST_DELAY_S = 0.5  # between the loss of an epoch and asking again; doubles, so that an outage is not burned through
CANCEL_GRACE_S = 60.0  # an attempt told to submit has so long to do it
FIRST_REGRADE_S, LAST_REGRADE_S = 10.0, 300.0  # between a grading that failed and the next; doubles
GRADINGS = (
    10  # that failed or stayed unanswered while others were graded; then the rollout is no use. About half an hour
)
UNANSWERED = 2  # of them in silence: each has cost a grading limit
GRADERS_AWAY = 6  # times the grading limit: while nobody is graded, a verdict is asked for once more after so long
REPEAT_WITHIN_S = 3600.0  # at most between two repetitions of a request
UNREAD_PATIENCES = 6  # × that while the bus says that it holds requests
PASSED_OVER_S = 600.0  # a request that others were taken up after waits so long once nothing is taken up any more

Fate = Enum("Fate", "wait again fail")
Closing = Enum("Closing", "open ready dropped")


def fate(fruitless: int, lost_for_s: float, replacements: int) -> Fate:
    """Of a lost attempt: asked for again with epoch + 1, up to `replacements` times without progress, then failed. `fruitless`:
    epochs before this one, since the last that wrote a rollout checkpoint. An attempt that gets on is asked for as often as it
    takes: else long attempts, which lose more workers, would be rarer among those that are trained."""
    if fruitless >= replacements:
        return Fate.fail
    return Fate.again if lost_for_s >= FIRST_DELAY_S * 2**fruitless else Fate.wait


def overdue(
    state: AttemptState,
    *,
    silent_s: float,
    passed_over_s: float | None,
    cancelled_s: float | None,
    lease_s: float,
    limit_s: float,
) -> str:
    """Return why an unfinished attempt counts as lost now; empty: it does not. Seconds since its worker was heard of, since
    it was told to submit (None: it was not). `passed_over_s`: since a worker took up anything of the run, if one did after
    this was asked for (None: nobody did).

    A request that nobody has claimed is the bus's to deliver, and never overdue while no worker takes up anything: then it
    may be repeated (`repeat`). But what is still there after full workers must have got room (`limit_s`) and taken up
    nothing was buried, forgotten by the bus, or acknowledged by a worker that died before its claim. Waited for, it would
    hold the gate, and the run, without end.
    """
    patience_s = max(PASSED_OVER_S, limit_s + CANCEL_GRACE_S)
    if state is AttemptState.requested and passed_over_s is not None and passed_over_s > patience_s:
        return f"never claimed, and nothing else was in the last {passed_over_s:.0f} s"
    if state is AttemptState.claimed:
        if silent_s > lease_s:
            return f"no heartbeat for {silent_s:.0f} s"
        if cancelled_s is not None and cancelled_s > CANCEL_GRACE_S:
            return f"did not submit within {CANCEL_GRACE_S:.0f} s of the limit of {limit_s:.0f} s"
    return ""


def repeat(idle_s: float, repeats: int, limit_s: float, unread: bool | None) -> bool:
    """Return whether a request that nobody has taken up is said once more, in the same words. `idle_s`: since anything of the
    run was taken up, or this was said last. `repeats`: times that it was said again already. `unread`: whether the bus still
    holds requests that no worker has acknowledged; None: unknown.

    A bus that was restored, or that has deleted what it kept for a week, has lost the requests. Workers may also be busy with
    another run's, so the first patience is as long as an attempt may take. Where the bus still holds requests, these are
    most likely among them, and it takes longer.
    """
    patience_s = max(PASSED_OVER_S, limit_s + CANCEL_GRACE_S) * 2**repeats
    return idle_s > min(patience_s, REPEAT_WITHIN_S) * (UNREAD_PATIENCES if unread else 1)


def grade_again_in_s(gradings: int) -> float:
    """Return how long to wait after a grading failed. `gradings`: how many have."""
    return min(LAST_REGRADE_S, FIRST_REGRADE_S * 2 ** (gradings - 1))


def ungraded(*, overtaken_s: float | None, quiet_s: float, grading_limit_s: float) -> bool:
    """Return whether a missing verdict is overdue. `overtaken_s`: since a rollout that finished later got its verdict; None:
    none did, so the queue of the graders has not come so far. `quiet_s`: since any verdict came, or this was asked for."""
    if overtaken_s is not None:
        return overtaken_s > grading_limit_s
    return quiet_s > GRADERS_AWAY * grading_limit_s


def must_submit(state: AttemptState, running_s: float, cancelled: bool, limit_s: float) -> bool:
    """At the hard time limit an attempt is ended and submitted as it is: scored and trained, never thrown away."""
    return state is AttemptState.claimed and not cancelled and running_s > limit_s


def closing(states: Sequence[AttemptState], group_min: int) -> Closing:
    """Of a group: open while any member may still come; ready with at least `group_min` survivors, else dropped."""
    survivors = 0
    for state in states:
        if state is AttemptState.scored:
            survivors += 1
        elif state not in (AttemptState.failed, AttemptState.dropped):
            return Closing.open
    return Closing.ready if survivors >= max(1, group_min) else Closing.dropped
