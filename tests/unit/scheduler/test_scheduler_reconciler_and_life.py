"""When an attempt is given again, when a group closes, when a run ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.life import Budget, exhausted_s, hand_is_empty, step_seconds
from services.scheduler.reconciler import (
    Closing,
    Fate,
    closing,
    fate,
    grade_again_in_s,
    must_submit,
    overdue,
    repeat,
    ungraded,
)
from shared.contracts.codec import encode
from shared.contracts.ids import group_id
from shared.contracts.messages import StepCommitted
from shared.contracts.run import GROUPS, NAME_CHARS, STALENESS, RewardConfig
from shared.contracts.schedulable import objections
from shared.contracts.topics import STEPS_COMMITTED
from shared.ledger.transitions import AttemptState as S
from tests.unit.scheduler.world import config

LIMITS: dict[str, Any] = {"lease_s": 20.0, "limit_s": 900.0}


def late(state: S, **since: Any) -> str:
    known: dict[str, Any] = {"silent_s": 0.0, "passed_over_s": None, "cancelled_s": None, **since}
    return overdue(state, **known, **LIMITS)


def test_a_lost_attempt_is_given_again_up_to_r_times_and_then_failed() -> None:
    assert [fate(epoch, 60, replacements=2) for epoch in range(3)] == [Fate.again, Fate.again, Fate.fail]
    assert fate(0, 60, replacements=0) is Fate.fail


def test_giving_again_waits_longer_each_time() -> None:
    assert fate(0, 0.1, replacements=3) is Fate.wait
    assert fate(2, 1.0, replacements=3) is Fate.wait
    assert fate(2, 2.1, replacements=3) is Fate.again


def test_only_a_claimed_attempt_has_a_lease() -> None:
    assert late(S.claimed, silent_s=21) == "no heartbeat for 21 s"
    assert not late(S.claimed, silent_s=19)
    assert not late(S.requested, silent_s=9999)
    assert not late(S.scored, silent_s=9999)


def test_a_request_is_lost_only_when_workers_passed_it_over_for_longer_than_they_can_be_full() -> None:
    assert not late(S.requested, passed_over_s=959)  # a worker may be full for as long as an attempt takes to submit
    assert late(S.requested, passed_over_s=961) == "never claimed, and nothing else was in the last 961 s"
    assert not late(S.claimed, passed_over_s=9999)


def test_an_attempt_at_its_time_limit_is_told_to_submit_before_it_is_given_up() -> None:
    assert must_submit(S.claimed, 901, False, 900)
    assert not must_submit(S.claimed, 901, True, 900)
    assert not late(S.claimed, cancelled_s=30)
    assert "did not submit" in late(S.claimed, cancelled_s=90)


def test_a_finished_attempt_is_never_lost_by_silence_and_graded_again_once_others_overtook_it() -> None:
    assert not late(S.finished, silent_s=9999, cancelled_s=9999)
    assert not ungraded(overtaken_s=None, quiet_s=3599, grading_limit_s=600)  # the queue has not come so far
    assert ungraded(overtaken_s=None, quiet_s=3601, grading_limit_s=600)  # nobody is graded at all
    assert not ungraded(overtaken_s=599, quiet_s=0, grading_limit_s=600)
    assert ungraded(overtaken_s=601, quiet_s=0, grading_limit_s=600)
    assert [grade_again_in_s(n) for n in (1, 2, 3, 9)] == [10, 20, 40, 300]


def test_a_request_is_repeated_after_longer_and_longer_and_later_while_the_bus_holds_some() -> None:
    assert [repeat(s, 0, 900.0, None) for s in (959, 961)] == [False, True]
    assert [repeat(1000, n, 900.0, False) for n in (0, 1)] == [True, False]
    assert repeat(3601, 20, 900.0, False)
    assert not repeat(5000, 0, 900.0, True)
    assert repeat(6000, 0, 900.0, True)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([S.scored, S.scored, S.claimed], Closing.open),
        ([S.scored, S.lost, S.scored], Closing.open),
        ([S.scored, S.scored, S.failed], Closing.ready),
        ([S.scored, S.failed, S.failed], Closing.dropped),
        ([S.failed, S.failed, S.failed], Closing.dropped),
    ],
)
def test_a_group_closes_with_enough_survivors_and_is_dropped_with_fewer(states: list[S], expected: Closing) -> None:
    assert closing(states, group_min=2) is expected


def test_the_run_stops_early_enough_to_publish_within_its_minutes() -> None:
    budget = Budget(max_steps=0, minutes=10, groups_per_step=16)
    assert not budget.spent(steps=50, clock_s=594, waiting=5, step_times=[9.0, 4.0, 6.0])
    assert budget.spent(steps=50, clock_s=595, waiting=5, step_times=[9.0, 4.0, 6.0]) == "10 minutes are over"
    assert budget.spent(steps=50, clock_s=591, waiting=47, step_times=[9.0, 4.0, 6.0])  # two more steps wait
    assert not budget.spent(steps=0, clock_s=590, waiting=0, step_times=[])


def test_progress_is_of_the_limit_that_comes_first() -> None:
    both = Budget(max_steps=100, minutes=10, groups_per_step=16)
    assert both.progress(steps=25, clock_s=60) == 0.25
    assert both.progress(steps=25, clock_s=300) == 0.5
    assert both.progress(steps=25, clock_s=6_000) == 1.0
    assert Budget(max_steps=0, minutes=0, groups_per_step=16).progress(steps=25, clock_s=300) == 0.0


def test_a_very_short_budget_still_leaves_half_of_its_time() -> None:
    assert not Budget(max_steps=0, minutes=0.1, groups_per_step=16).spent(
        steps=1, clock_s=2, waiting=0, step_times=[30.0]
    )


def test_steps_are_covered_by_what_is_accepted_and_running() -> None:
    budget = Budget(max_steps=5, minutes=0, groups_per_step=4)
    assert budget.uncovered(accepted=12, running=3) == 5
    assert budget.uncovered(accepted=18, running=3) == 0
    assert Budget(max_steps=0, minutes=1, groups_per_step=4).uncovered(accepted=9, running=9) is None
    assert budget.spent(steps=5, clock_s=0, waiting=0, step_times=[])


def test_a_stopped_trainer_may_finish_the_step_that_it_could_hold() -> None:
    hand: dict[str, Any] = {"groups_per_step": 4, "step_times": [2.0, 3.0]}
    assert hand_is_empty(waiting=3, silent_s=0, **hand)
    assert not hand_is_empty(waiting=4, silent_s=11, **hand)
    assert hand_is_empty(waiting=4, silent_s=13, **hand)
    assert not hand_is_empty(waiting=4, silent_s=1700, groups_per_step=4, step_times=[])
    assert hand_is_empty(waiting=4, silent_s=130, groups_per_step=4, step_times=[], trainer=False)


@given(st.floats(0.01, 7200), st.integers(4, 40))
def test_however_long_steps_take_a_stopped_trainer_may_finish_what_it_could_hold(step_s: float, waiting: int) -> None:
    assert not hand_is_empty(waiting=waiting, silent_s=2 * step_s, groups_per_step=4, step_times=[step_s])
    assert hand_is_empty(waiting=waiting, silent_s=5 + 4.1 * step_s, groups_per_step=4, step_times=[step_s])


@given(st.floats(1, 3600), st.integers(0, 47))
def test_however_long_steps_take_the_minutes_leave_time_for_what_waits(step_s: float, waiting: int) -> None:
    budget = Budget(max_steps=0, minutes=100 * step_s / 60, groups_per_step=16)
    last = 100 * step_s - max(2.0, 1.25 * step_s * max(1, waiting // 16))
    assert not budget.spent(steps=50, clock_s=0.999 * last, waiting=waiting, step_times=[step_s])
    assert budget.spent(steps=50, clock_s=1.001 * last, waiting=waiting, step_times=[step_s])


def test_a_curator_may_take_its_time_unless_it_said_that_no_more_problems_come() -> None:
    assert exhausted_s([0.0], complete=False) == 300
    assert exhausted_s([0.0, 600.0, 700.0], complete=False) == 2400
    assert exhausted_s([0.0, 600.0], complete=True) == 30


def test_step_times_are_those_of_the_last_steps() -> None:
    assert step_seconds([1, 2, 4, 8], count=2) == [2, 4]
    assert step_seconds([5]) == []


def test_an_impossible_schedule_is_refused_with_field_value_and_what_is_allowed() -> None:
    assert objections(config()) == []
    assert objections(config(group_size=4, group_min=5)) == [
        "schedule.group_min: found 5; allowed: 2 to group_size (4)"
    ]
    assert len(objections(config(group_size=1, max_staleness=-1, minutes=-2))) == 4
    assert objections(config(keep_versions=-1, quota_gb=float("nan"))) == [
        "schedule.keep_versions: found -1; allowed: 0 (all stay) or more",
        "schedule.quota_gb: found nan; allowed: 0 (no quota) or more",
    ]


def test_a_configuration_whose_messages_would_not_fit_the_bus_is_refused_before_anything_is_asked_for() -> None:
    assert objections(config(groups_per_step=GROUPS + 1, max_staleness=STALENESS + 1)) == [
        "schedule.groups_per_step: found 1025; allowed: 1 to 1024",
        "schedule.max_staleness: found 129; allowed: 0 to 128",
    ]
    named = msgspec.structs.replace(config(), run="r" * 101, reward=RewardConfig(id=""))
    allowed = "allowed: 1 to 100 characters, so that the run's messages fit the bus"
    assert objections(named) == [f"run: found 101 characters; {allowed}", f"reward.id: found 0 characters; {allowed}"]


def test_the_largest_step_that_is_allowed_fits_the_bus() -> None:
    run, figure = "r" * NAME_CHARS, 1.2345678901234567e-05
    groups = {group_id(run, f"p{number}", 0): STALENESS for number in range(GROUPS)}
    versions = range(1_000_000, 1_000_000 + STALENESS + 1)
    metrics = {f"mismatch_{name}_version_{serial}": figure for name in ("k3", "p99") for serial in versions}
    metrics |= {f"another_figure_of_the_step_{number}": figure for number in range(80)}
    step = StepCommitted(run=run, incarnation=999, step=10**6, serial=10**6, groups=groups, metrics=metrics)
    encode(STEPS_COMMITTED, step)
