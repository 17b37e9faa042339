"""The simulated fleet: what no rule may break, and what each rule is known for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.simulation.cli import read
from services.scheduler.simulation.desk import Shipped
from services.scheduler.simulation.durations import HeavyTailed, Recorded
from services.scheduler.simulation.fleet import Fleet, History, Rule, simulate
from services.scheduler.simulation.measures import measure
from services.scheduler.simulation.rules import Ahead, Capacity, DropStale, Oldest, Paced, Synchronous


def history_of(rule: Rule, fleet: Fleet, durations: HeavyTailed, steps: int = 24, seed: int = 0) -> History:
    return simulate(rule, fleet, durations, steps=steps, seed=seed)


fleets = st.builds(
    Fleet,
    slots=st.integers(1, 60),
    groups_per_step=st.integers(1, 6),
    group_size=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    step_s=st.floats(1.0, 500.0),
    swap_s=st.floats(0.0, 30.0),
    grading_s=st.floats(0.0, 30.0),
)
lengths = st.builds(HeavyTailed, st.floats(10.0, 600.0), st.floats(0.0, 1.5), st.floats(0.0, 1.0))


@settings(max_examples=40, deadline=None)
@given(fleets, lengths, st.sampled_from([Synchronous, DropStale, Capacity, Paced, Ahead, Oldest]), st.integers(0, 9))
def test_no_rule_trains_a_group_twice_or_above_the_bound(
    fleet: Fleet, durations: HeavyTailed, rule: type[Paced], seed: int
) -> None:
    history = history_of(rule(), fleet, durations, seed=seed)
    assert not history.stuck
    trained = [group for step in history.steps for group in step.groups]
    thrown = [group for _, group in history.discarded]
    assert len(set(trained) | set(thrown)) == len(trained) + len(thrown)
    assert all(0 <= age <= fleet.max_staleness for step in history.steps for age in step.ages)
    assert all(len(step.groups) == fleet.groups_per_step for step in history.steps)
    assert all(0 <= busy <= fleet.slots for _, busy in history.busy)
    if rule in (Paced, Ahead, Oldest, Synchronous):
        assert not thrown


def test_equal_seeds_give_equal_histories_and_every_rule_the_same_attempts() -> None:
    fleet, durations = Fleet(slots=200, max_staleness=2), HeavyTailed()
    first, second = (history_of(Paced(), fleet, durations, seed=3) for _ in range(2))
    assert first == second
    other = history_of(DropStale(), fleet, durations, seed=3)
    both = min(len(first.opened), len(other.opened))
    assert first.opened[:both] == other.opened[:both]


def test_throwing_away_what_is_stale_makes_long_attempts_rare_and_pacing_does_not() -> None:
    fleet, durations = Fleet(slots=400, max_staleness=2, step_s=120.0), HeavyTailed(120.0, 1.0)
    stale = measure("", fleet, history_of(DropStale(), fleet, durations, steps=60), warm_up=15)
    paced = measure("", fleet, history_of(Paced(), fleet, durations, steps=60), warm_up=15)
    assert stale.bias < -5 * stale.bias_error < 0
    assert (paced.bias, paced.discarded, paced.too_old) == (0.0, 0.0, 0)
    assert stale.discarded > 0.2


def test_the_whole_scheduler_paces_as_its_gate_does(tmp_path: Path) -> None:
    fleet, durations = Fleet(slots=60, groups_per_step=4, group_size=4, max_staleness=2, step_s=300.0), HeavyTailed()
    shipped = Shipped(fleet, tmp_path, problems=1000)
    histories = []
    for rule in (shipped, Paced()):
        histories.append(history_of(rule, fleet, durations, steps=16))
    shipped.close()
    desk, gate = (measure("", fleet, history, warm_up=4) for history in histories)
    assert not histories[0].discarded
    assert desk.age_max <= fleet.max_staleness
    assert desk.trainer_idle == pytest.approx(gate.trainer_idle, abs=0.05)


def test_pacing_keeps_the_trainer_busy_with_younger_groups_than_the_bound_allows() -> None:
    fleet, durations = Fleet(slots=80, max_staleness=6, step_s=300.0), HeavyTailed(120.0, 0.6)
    paced, ahead = (
        measure("", fleet, history_of(rule(), fleet, durations, steps=40, seed=1), warm_up=15)
        for rule in (Paced, Ahead)
    )
    assert paced.trainer_idle <= 0.05
    assert paced.age_mean < 0.6 * ahead.age_mean


def test_the_trainer_waits_at_least_for_what_an_attempt_lasts_beyond_the_bound() -> None:
    """All attempts last 3 steps and 10 s; of the bound's 2 steps, none of them can be made up for."""
    fleet, durations = Fleet(slots=400, max_staleness=2, step_s=100.0, grading_s=0.0), Recorded([[310.0] * 8])
    for rule in (Paced, Ahead, Oldest):
        found = measure("", fleet, simulate(rule(), fleet, durations, steps=40), warm_up=10)
        assert 0 < found.idle_limit <= found.trainer_idle


def test_recorded_groups_come_back_whole() -> None:
    recorded = Recorded([[10.0, 20.0], [30.0, 40.0]])
    drawn = recorded.groups(50, 2, np.random.default_rng(0))
    assert {tuple(sorted(row)) for row in drawn.tolist()} == {(10.0, 20.0), (30.0, 40.0)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("group,seconds\n", "found no finished attempt"),
        ("seconds\n1\n", "found the columns"),
        ("group,seconds\na,1\nb,soon\n", "line 3: found seconds 'soon'"),
        ("group,seconds\na,-1\n", "found -1 s"),
        ("group,seconds\na,nan\n", "found nan s"),
    ],
)
def test_a_recording_that_is_none_is_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "attempts.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        read(file)


def test_a_fleet_that_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"slots: found 0; allowed: at least 1"):
        Fleet(slots=0)
    with pytest.raises(ValueError, match=r"step_s: found nan"):
        Fleet(slots=1, step_s=float("nan"))
    with pytest.raises(ValueError, match=r"durations: found shortest 10 s, median 5 s"):
        HeavyTailed(median_s=5.0)
