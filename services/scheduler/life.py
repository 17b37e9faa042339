"""The life of a run: what its budget allows, when it ends. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shared.contracts.run import ScheduleConfig

STEP_MARGIN = 1.25  # × the time of a step, for each that the trainer may still make of what waits for it
MARGIN_S = 2.0  # least of that; the most is half of the budget
HAND_STEPS = 4.0  # longest step so far × this: after so much silence the trainer has nothing in hand
HAND_S = 5.0  # least of that
FIRST_STEP_S = (
    1800.0  # instead, while no step was measured: a large model's first one, with its compilation, may take as long
)
NO_TRAINER_S = 120.0  # instead, while no trainer was heard of
# After so long without problems the run is over: COMPLETE_S if the curator said that no more will come (its messages may
# overtake each other), else EXHAUSTED_S, or PAUSES × the longest pause between two admissions so far.
COMPLETE_S, EXHAUSTED_S, PAUSES = 30.0, 300.0, 4.0


def step_seconds(commits: Sequence[float], count: int = 8) -> list[float]:
    """Seconds between the last commits, in order."""
    tail = list(commits)[-count - 1 :]
    return [later - earlier for earlier, later in pairwise(tail)]


@dataclass(frozen=True, slots=True)
class Budget:
    """`minutes`: of the clock that runs from the first request to the last publication and stands while paused."""

    max_steps: int
    minutes: float
    groups_per_step: int

    @staticmethod
    def of(schedule: ScheduleConfig) -> Budget:
        return Budget(schedule.max_steps, schedule.minutes, schedule.groups_per_step)

    def spent(self, *, steps: int, clock_s: float, waiting: int, step_times: Sequence[float]) -> str:
        """Why the run must stop now; empty: it goes on. It stops early enough that what the trainer can still make of the
        `waiting` groups (ready, untrained) is published within the minutes. `clock_s` and `step_times` are seconds: the
        shortest of the last steps comes nearest to the time of training alone."""
        if self.max_steps and steps >= self.max_steps:
            return f"{steps} of {self.max_steps} steps are done"
        if self.minutes:
            ahead = STEP_MARGIN * min(step_times, default=0.0) * max(1, waiting // self.groups_per_step)
            margin = min(max(ahead, MARGIN_S), self.minutes * 30)
            if clock_s >= self.minutes * 60 - margin:
                return f"{self.minutes:g} minutes are over"
        return ""

    def progress(self, *, steps: int, clock_s: float) -> float:
        """Share of the limits that is spent, 0 to 1; 0 where there is none."""
        by_steps = steps / self.max_steps if self.max_steps else 0.0
        by_clock = clock_s / (self.minutes * 60) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_clock))

    def uncovered(self, *, accepted: int, running: int) -> int | None:
        """Groups still needed for `max_steps`; None: no limit."""
        return max(0, self.max_steps * self.groups_per_step - accepted - running) if self.max_steps else None


def hand_is_empty(
    *, waiting: int, groups_per_step: int, silent_s: float, step_times: Sequence[float], trainer: bool = True
) -> bool:
    """Return whether a trainer that was told to stop has made of what waits all that it can. `waiting`: ready, untrained
    groups; `silent_s`: since it was told to stop or last committed, whichever came later; `trainer`: whether one was heard of.

    A step may take a second or half an hour, so the patience is a multiple of what this run's steps took."""
    if waiting < groups_per_step:
        return True
    if not step_times:
        return silent_s > (FIRST_STEP_S if trainer else NO_TRAINER_S)
    return silent_s > max(HAND_STEPS * max(step_times), HAND_S)


def exhausted_s(admissions: Sequence[float], complete: bool) -> float:
    """Return after how many seconds without a problem to ask for every problem was practised. `admissions`: when problems were
    admitted, in order; `complete`: whether the curator said that no more will come."""
    if complete:
        return COMPLETE_S
    return max(EXHAUSTED_S, PAUSES * max(step_seconds(admissions), default=0.0))
