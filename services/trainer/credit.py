"""Which turn earned what: from a group's rewards and recorded turns to one advantage per sampled token. Pure; numpy only.

An attempt of several turns that is solved by its fourth edit holds three edits that failed. Dr. GRPO reinforces all four
alike, and for attempts as short as ours that noise drowns the signal: over 190 problems, the gradients of two halves of the
same batch had a cosine of 0.00 with credit per attempt, and of 0.08 with credit per turn (docs/results.md).

    G_t = r * discount^c_t - p_t - the losses of its faults (a broken call, testing or submitting what had failed)
    A_t = G_t - mean of G over the group's turns that began alike: with the task, after a test that passed, or otherwise

r is the attempt's reward without its length penalty, c_t how many later turns still changed the files. p_t is the turn's own
share of the penalty, C(x after) - C(x before): tokens are charged where they were spent, and the shares of an attempt sum to its
penalty exactly (shared.length). Left in r, the whole penalty would lie on the turn that solved the problem.

How a turn began is known before it samples, so that the mean is a baseline and no incentive (sorted by what a turn did, a policy
learns to do what is compared with least). All turns that answer the task alone answer one and the same prompt: their mean is
the value of that state. Those are the first turns and, where retries are fresh, nearly all others; second tries in a
conversation, which succeed less often, are compared with each other.

Of a problem of several steps, r of a turn is what the attempt earned less what the steps that were submitted before the turn
earned: no turn changes what is past. Turns are compared with those of the same step.

A group in which no attempt earned anything (no r is above 0) teaches its faults, and what its reward takes from failed attempts too
(`apply = all`), alone. Such groups take the longest to compute, so only `credit.failed_share` of them do, and the others are
left out (all advantages 0). `credit.per = "attempt"` is Dr. GRPO as it is written: A = r - mean r.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

from services.trainer.loss import advantages
from shared.contracts.run import Credit, LengthPenalty
from shared.contracts.trajectory import Segment, Span, Trajectory
from shared.length import SAMPLED, UNTOLD, charges, length_penalty, untold_tokens

CHANGING = frozenset({"edit", "undo", "write", "apply_patch", "terminal", "bash", "shell"})


def assign(
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float],
    credit: Credit,
    *,
    lot: float,
    lengths: Sequence[LengthPenalty | None] | None = None,
    steps: Sequence[Sequence[float]] | None = None,
) -> list[list[np.ndarray]]:
    """Return advantages float32 [T] per attempt and segment, 0 where nothing was sampled. `lot`: the group's, uniform in [0, 1).
    `lengths`: the length penalty that each reward holds; None: it holds none. `steps`: for each attempt what its steps earned of
    its reward, empty where its problem has no steps; None: none has."""
    if credit.per == "attempt":
        whole = advantages(rewards)
        return [
            [np.where(s.loss_mask, a, 0.0).astype(np.float32) for s in t.segments]
            for t, a in zip(trajectories, whole, strict=True)
        ]
    lengths, steps = lengths or [None] * len(rewards), steps or [()] * len(rewards)
    rewards = [without_length(t, r, length) for t, r, length in zip(trajectories, rewards, lengths, strict=True)]
    if max(rewards) <= 0 and lot >= credit.failed_share:
        return [[np.zeros(len(s.tokens), np.float32) for s in t.segments] for t in trajectories]
    returns = [
        turn_returns(t, r, credit, length, earned)
        for t, r, length, earned in zip(trajectories, rewards, lengths, steps, strict=True)
    ]
    beginnings = [
        _beginnings(t, turns, submitting(t) if earned else [])
        for t, turns, earned in zip(trajectories, returns, steps, strict=True)
    ]
    seen: dict[str, list[float]] = {}
    for turns, began in zip(returns, beginnings, strict=True):
        for turn, value in turns.items():
            seen.setdefault(began[turn], []).append(value)
    baseline = {key: float(np.mean(values)) for key, values in seen.items()}
    return [
        _spread(t, {turn: value - baseline[began[turn]] for turn, value in turns.items()})
        for t, turns, began in zip(trajectories, returns, beginnings, strict=True)
    ]


def without_length(trajectory: Trajectory, reward: float, length: LengthPenalty | None) -> float:
    """Return the reward as it was before the length penalty was subtracted. `length`: None: none was."""
    return reward if length is None else reward + length_penalty(trajectory.effort, length)


def submitting(trajectory: Trajectory) -> list[int]:
    """Return the turns that submitted a step, in order; the last one may have ended the attempt."""
    return sorted({s.turn for segment in trajectory.segments for s in segment.spans if s.role == "final" and s.ok})


def turn_returns(
    trajectory: Trajectory,
    reward: float,
    credit: Credit,
    length: LengthPenalty | None = None,
    steps: Sequence[float] = (),
) -> dict[int, float]:
    """Return G by turn, in order, for every turn that sampled something. Sampled tokens outside of all spans are a turn UNTOLD,
    which came before all others. `reward`: without the length penalty. `length`: the penalty that the attempt pays; None: none.
    `steps`: what each step earned of the reward; empty: the problem has none."""
    turns: dict[int, list[Span]] = {}
    for segment in trajectory.segments:
        for span in segment.spans:
            if span.role in SAMPLED and segment.loss_mask[span.start : span.end].any():
                turns.setdefault(span.turn, []).append(span)
        if untold_tokens(segment):
            turns.setdefault(UNTOLD, [])
    owed = charges(trajectory, length) if length is not None else {}
    result: dict[int, float] = {}
    ends = submitting(trajectory) if steps else []
    changes = 0  # by later turns
    for number in sorted(turns, reverse=True):
        spans = turns[number]
        faults = {span.fault for span in spans if span.fault}
        if "endless" not in faults and not all(span.ok for span in spans):
            faults.add("broken")
        lost = sum(credit.faults.get(fault, 0.0) for fault in faults)
        past = sum(steps[: bisect_left(ends, number)])
        result[number] = (reward - past) * credit.discount**changes - owed.get(number, 0.0) - lost
        changes += any(span.tool in CHANGING and span.ok for span in spans)
    return dict(sorted(result.items()))


def _beginnings(trajectory: Trajectory, turns: Iterable[int], ends: Sequence[int]) -> dict[int, str]:
    """How each turn began: "task" (nothing else was read), "passed" (the last answer was a test without failure) or
    "other"; after a step that was submitted also its number. `ends`: the turns that submitted one."""
    passed = {span.turn for segment in trajectory.segments for span in segment.spans if span.passed}
    bare = {min(turns, default=0)} | {turn for s in trajectory.segments if (turn := _bare(s)) is not None}
    began = {t: "task" if t in bare else "passed" if t - 1 in passed else "other" for t in turns}
    return {t: f"{how} of step {step}" if (step := bisect_left(ends, t)) else how for t, how in began.items()}


def _bare(segment: Segment) -> int | None:
    """The turn that answers the task alone: the segment's first, unless a self-summary stood before it."""
    for span in segment.spans:
        if span.role in SAMPLED:
            return span.turn if segment.loss_mask[span.start : span.end].any() else None
    return None


def _spread(trajectory: Trajectory, advantages: dict[int, float]) -> list[np.ndarray]:
    """By turn to by token."""
    rows = []
    for segment in trajectory.segments:
        row = np.full(len(segment.tokens), advantages.get(UNTOLD, 0.0), np.float32)
        for span in segment.spans:
            if span.turn in advantages and span.role in SAMPLED:
                row[span.start : span.end] = advantages[span.turn]
        row[~segment.loss_mask] = 0.0
        rows.append(row)
    return rows
