"""The drift watch: silent while nothing changes, one alert per change, with examples."""

from __future__ import annotations

import itertools
import random

import pytest

from services.reward.monitors import WINDOW as GROUPS
from services.reward.monitors import DriftWatch
from shared.contracts.graded import Finding
from shared.contracts.messages import Alert, AttemptKey, Effort, RolloutScored, StopReason, Verdict
from shared.contracts.run import Purpose, Ref

WINDOW = 4 * GROUPS  # attempts of as many groups as are compared
SERIAL = itertools.count()
REF = Ref(key="k", size=1, checksum="0" * 32)


def feed(
    watch: DriftWatch, count: int, *, findings: tuple[str, ...] = (), start: int = 0, **fields: object
) -> list[Alert]:
    """`count` attempts, in groups of four of which two are solved."""
    alerts = []
    for i in range(start, start + count):
        serial = next(SERIAL)
        solved = i % 2 == 0
        values = {
            "verdict": Verdict(solved=solved, passed=1, total=1),
            "reward": float(solved),
            "terms": {"solved": float(solved)},
            "effort": Effort(thinking_tokens=50),
            "reward_config": "c",
            "key": AttemptKey(attempt=f"a-{i}", epoch=0, group=f"g-{serial // 4}", problem="p"),
        }
        scored = RolloutScored(
            run="r", trajectory=REF, stop=StopReason.submitted, oldest_version=0, **{**values, **fields}
        )
        alerts += watch.observe(scored, {name: Finding(1.0) for name in findings})
    return alerts


def test_a_policy_that_stays_as_it_was_sets_off_nothing() -> None:
    assert feed(DriftWatch(), 4 * WINDOW, findings=("untested_submit", "no_submit")) == []


def test_a_habit_that_spreads_sets_off_one_alert_with_examples() -> None:
    watch = DriftWatch()
    assert feed(watch, 2 * WINDOW) == []
    alerts = feed(watch, 2 * WINDOW, findings=("untested_submit",), start=10_000)
    assert [a.name for a in alerts] == ["untested_submits"]
    assert "0.00 in the first" in alerts[0].what
    assert all(int(e[2:]) >= 10_000 for e in alerts[0].examples)
    assert alerts[0].examples


def test_an_alarm_sounds_again_only_after_it_was_over() -> None:
    watch = DriftWatch()
    feed(watch, 2 * WINDOW)
    assert len(feed(watch, 2 * WINDOW, findings=("no_submit",))) == 1
    assert feed(watch, 2 * WINDOW) == []
    assert len(feed(watch, 2 * WINDOW, findings=("no_submit",))) == 1


def test_longer_attempts_and_unconfirmed_reward_are_noticed() -> None:
    watch = DriftWatch()
    feed(watch, WINDOW)
    longer = feed(watch, WINDOW, effort=Effort(thinking_tokens=200))
    assert [a.name for a in longer] == ["longer_attempts"]
    watch = DriftWatch()
    feed(watch, WINDOW)
    hollow = feed(watch, WINDOW, reward=1.3, terms={"solved": 1.0, "charm": 0.3})
    assert [a.name for a in hollow] == ["reward_without_passes"]


def test_a_policy_that_loses_half_of_what_it_could_at_its_best_is_noticed_with_attempts_that_failed() -> None:
    watch = DriftWatch()
    feed(watch, WINDOW)  # half of them solved
    all_solved = Verdict(solved=True, passed=1, total=1)
    assert feed(watch, WINDOW, verdict=all_solved, reward=1.0, terms={"solved": 1.0}) == []
    assert feed(watch, WINDOW) == []  # half of its best is not less than half
    none_solved = Verdict(solved=False, passed=0, total=1)
    alerts = feed(watch, WINDOW, start=10_000, verdict=none_solved, reward=0.0, terms={"solved": 0.0})
    assert [a.name for a in alerts] == ["fewer_solved"]
    assert "1.00 in its best" in alerts[0].what
    assert all(int(e[2:]) >= 10_000 for e in alerts[0].examples)


def practise(
    watch: DriftWatch, rates: random.Random, size: int, groups: int, start: int, scale: float = 1.0
) -> list[Alert]:
    """Groups of `size` attempts at problems of every hardness, from never to always solved."""
    alerts = []
    for number in range(start, start + groups):
        rate = scale * rates.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        for i in range(size):
            verdict = Verdict(solved=rates.random() < rate, passed=1, total=1)
            key = AttemptKey(attempt=f"{number}-{i}", epoch=0, group=f"g-{number}", problem=f"p-{number}")
            alerts += feed(watch, 1, key=key, verdict=verdict, reward=0.5, terms={"solved": 0.5})
    return alerts


@pytest.mark.parametrize("size", [4, 8, 64])
@pytest.mark.parametrize("seed", range(3))
def test_easy_and_hard_problems_in_turn_are_no_collapse_and_a_collapse_is_noticed(seed: int, size: int) -> None:
    watch, rates = DriftWatch(), random.Random(seed)
    assert practise(watch, rates, size, 1500 if size < 64 else 600, 0) == []
    collapse = practise(watch, rates, size, 2 * GROUPS, 10_000, scale=0.2)
    assert [alert.name for alert in collapse] == ["fewer_solved"]


def habitual(rates: random.Random, number: int, place: int) -> tuple[RolloutScored, list[str]]:
    """An attempt of a policy that does not change: problems of every hardness, each with its own share of bad habits."""
    problem = random.Random(number)
    solved = rates.random() < problem.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    habit = problem.random() ** 2
    names = [name for name in ("untested_submit", "no_submit", "broken_tool_call") if rates.random() < 0.6 * habit]
    scored = RolloutScored(
        run="r",
        key=AttemptKey(attempt=f"{number}-{place}", epoch=0, group=f"g-{number}", problem=f"p-{number}"),
        verdict=Verdict(solved=solved, passed=1, total=1),
        reward=float(solved) + rates.gauss(0.0, 0.2),
        terms={"solved": float(solved)},
        reward_config="c",
        trajectory=REF,
        effort=Effort(thinking_tokens=int(rates.lognormvariate(6.0, 0.7))),
        stop=StopReason.submitted,
        oldest_version=0,
    )
    return scored, names


@pytest.mark.parametrize("seed", range(6))
def test_a_policy_that_does_not_change_raises_no_false_alarm(seed: int) -> None:
    """All six alarms watch 700 groups of four. Of 150 such runs none had a false alarm: fewer than 2 % do, with 95 % confidence."""
    watch, rates = DriftWatch(), random.Random(seed)
    attempts = [habitual(rates, 10_000 * seed + number, place) for number in range(700) for place in range(4)]
    assert [alert for scored, names in attempts for alert in watch.observe(scored, names)] == []


def test_evaluations_and_other_configurations_are_kept_apart() -> None:
    watch = DriftWatch()
    feed(watch, WINDOW)
    key = AttemptKey(attempt="a", epoch=0, group="g", problem="p", purpose=Purpose.evaluate)
    assert feed(watch, 2 * WINDOW, findings=("no_submit",), key=key) == []
    assert feed(watch, 3 * WINDOW, findings=("no_submit",), reward_config="d") == []
