"""What to do with an attempt that was lost, and with a group of which not all survived. Pure.

The reconciler is the one owner of redelivery: once a worker has acknowledged a request, only this gives it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from shared.ledger.transitions import AttemptState

FIRST_DELAY_S = 0.5  # between the loss of an epoch and asking again; doubles, so that an outage is not burned through
CANCEL_GRACE_S = 60.0  # an attempt told to submit has so long to do it
PASSED_OVER_S = 600.0  # a request that others were taken up after waits so long once nothing is taken up any more

Fate = Enum("Fate", "wait again fail")
Closing = Enum("Closing", "open ready dropped")


def fate(epoch: int, lost_for_s: float, replacements: int) -> Fate:
    """Of a lost attempt: asked for again with epoch + 1, up to `replacements` times, then failed."""
    if epoch >= replacements:
        return Fate.fail
    return Fate.again if lost_for_s >= FIRST_DELAY_S * 2**epoch else Fate.wait


def overdue(
    state: AttemptState,
    *,
    silent_s: float,
    passed_over_s: float | None,
    cancelled_s: float | None,
    graded_s: float | None,
    lease_s: float,
    limit_s: float,
    grading_limit_s: float,
) -> str:
    """Why a live attempt counts as lost now; empty: it does not. Seconds since its worker was heard of,
    since it was told to submit (None: it was not), since it finished (None: it did not). `passed_over_s`: since a worker
    took up anything of the run, if one did after this was asked for (None: nobody did).

    A request that nobody has claimed is the bus's to deliver, and never overdue while no worker takes up anything. But
    what is still there after full workers must have got room (`limit_s`) and taken up nothing was buried, forgotten by the
    bus, or acknowledged by a worker that died before its claim; waited for, it would hold the gate, and the run, for ever.
    """
    patience_s = max(PASSED_OVER_S, limit_s + CANCEL_GRACE_S)
    if state is AttemptState.requested and passed_over_s is not None and passed_over_s > patience_s:
        return f"never claimed, and nothing else was in the last {passed_over_s:.0f} s"
    if state is AttemptState.claimed:
        if silent_s > lease_s:
            return f"no heartbeat for {silent_s:.0f} s"
        if cancelled_s is not None and cancelled_s > CANCEL_GRACE_S:
            return f"did not submit within {CANCEL_GRACE_S:.0f} s of the limit of {limit_s:.0f} s"
    if state is AttemptState.finished and graded_s is not None and graded_s > grading_limit_s:
        return f"no verdict for {graded_s:.0f} s"
    return ""


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
