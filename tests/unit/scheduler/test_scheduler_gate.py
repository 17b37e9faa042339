"""The gate bounds the age of every sample by pacing, whatever attempts take and whenever the trainer comes."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.gate import Gate


@dataclass
class Outcome:
    ages: list[int]
    trained: int
    discarded: int = 0


def simulate(
    gate: Gate, *, durations: list[int], slow: dict[int, int], ticks: int, seed: int, with_oldest: bool
) -> Outcome:
    """Groups of one attempt each. An attempt stands on the version at its start; each tick ends some, and the trainer
    trains whatever is complete, in any order."""
    luck = random.Random(seed)
    version, started = 0, 0
    running: list[tuple[int, int]] = []  # (version at start, ticks left)
    ready: list[int] = []
    outcome = Outcome([], 0)
    for _ in range(ticks):
        running = [(v, left - 1) for v, left in running]
        ready += [v for v, left in running if left <= 0]
        running = [(v, left) for v, left in running if left > 0]
        if len(ready) >= gate.groups_per_step and luck.random() < 0.7:
            luck.shuffle(ready)
            batch, ready = ready[: gate.groups_per_step], ready[gate.groups_per_step :]
            outcome.ages += [version - v for v in batch]
            outcome.trained += len(batch)
            version += 1
        oldest = min([v for v, _ in running] + ready, default=version) if with_oldest else version
        room = gate.room(version=version, oldest=oldest, accepted=outcome.trained + len(ready), running=len(running))
        for _ in range(room):
            running.append((version, slow.get(started, luck.choice(durations))))
            started += 1
    return outcome


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 4),
    st.integers(1, 6),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.dictionaries(st.integers(0, 60), st.integers(1, 80), max_size=3),
    st.integers(0, 1000),
)
def test_no_sample_is_older_than_the_bound_and_work_goes_on(
    staleness: int, size: int, durations: list[int], slow: dict[int, int], seed: int
) -> None:
    outcome = simulate(Gate(staleness, size), durations=durations, slow=slow, ticks=300, seed=seed, with_oldest=True)
    assert max(outcome.ages, default=0) <= staleness
    assert outcome.trained >= size * 5  # it never locks itself in


def test_one_slow_attempt_stays_within_the_bound_and_would_not_without_the_oldest_version() -> None:
    arguments = {"durations": [1, 2, 3], "slow": {5: 150}, "ticks": 400, "seed": 1}
    assert max(simulate(Gate(2, 4), with_oldest=True, **arguments).ages) <= 2
    assert max(simulate(Gate(2, 4), with_oldest=False, **arguments).ages) > 50


def test_without_staleness_a_step_is_asked_for_only_when_the_one_before_is_trained() -> None:
    gate = Gate(max_staleness=0, groups_per_step=4)
    assert gate.room(version=0, oldest=0, accepted=0, running=0) == 4
    assert gate.room(version=0, oldest=0, accepted=4, running=0) == 0
    assert gate.room(version=1, oldest=1, accepted=4, running=0) == 4


def test_the_gate_is_never_open_by_a_negative_amount() -> None:
    assert Gate(1, 4).room(version=-3, oldest=0, accepted=0, running=0) == 0


@pytest.mark.parametrize(
    ("oldest", "expected"),
    [
        ([5, 5, 6, 6], [True] * 4),  # steps 6, 6, 7, 7: ages 0, 0, 0, 0
        ([4, 3, 4, 5], [True, False, True, True]),  # what is left out makes place for those behind it
        ([4, 4, 4, 4], [True, True, False, False]),
    ],
)
def test_groups_that_a_fork_made_too_old_are_found_in_the_ledgers_order(
    oldest: list[int], expected: list[bool]
) -> None:
    assert Gate(max_staleness=1, groups_per_step=2).in_time(oldest, trained=10) == expected
