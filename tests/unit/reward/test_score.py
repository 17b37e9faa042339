"""The reward: terms that add up, a penalty where it applies, configurations that are refused by name."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.score import check, missing, score
from shared.contracts.graded import Finding, Graded
from shared.contracts.messages import Effort, Verdict
from shared.contracts.run import LengthPenalty, RewardConfig
from shared.terms import names

RIGHT = Verdict(solved=True, passed=3, total=3)
WRONG = Verdict(solved=False, passed=2, total=3)
LONG = Effort(thinking_tokens=640, turns=3)


@given(
    solved=st.booleans(),
    weight=st.floats(-10, 10),
    length=st.none() | st.builds(LengthPenalty, weight=st.floats(0, 1), q=st.floats(0, 3), apply=st.just("all")),
    behaviour=st.dictionaries(st.sampled_from(names()), st.floats(-1, 1)),
    amounts=st.dictionaries(st.sampled_from(names()), st.integers(0, 5)),
    tokens=st.integers(0, 100_000),
)
def test_terms_add_up_to_the_reward_exactly(solved, weight, length, behaviour, amounts, tokens) -> None:
    config = RewardConfig(id="c", solved=weight, length=length, behaviour=behaviour, behaviour_apply="all")
    check(config)
    verdict = RIGHT if solved else WRONG
    reward, terms = score(
        config, verdict, Effort(thinking_tokens=tokens), {n: Finding(float(a)) for n, a in amounts.items()}
    )
    assert sum(terms.values()) == reward
    assert set(behaviour) <= set(terms)
    assert msgspec.json.decode(msgspec.json.encode(terms)) == terms


def test_without_length_and_behaviour_the_reward_is_the_verdict() -> None:
    config = RewardConfig(length=None, behaviour={})
    assert score(config, RIGHT, LONG, {})[0] == 1.0
    assert score(config, WRONG, LONG, {})[0] == 0.0


def test_the_length_penalty_applies_to_solved_attempts_alone_unless_told_otherwise() -> None:
    only_solved, everywhere = (RewardConfig(length=LengthPenalty(apply=a), behaviour={}) for a in ("solved", "all"))
    assert score(only_solved, WRONG, LONG, {}) == (0.0, {"solved": 0.0})
    assert score(only_solved, RIGHT, LONG, {})[1]["length"] < 0
    assert score(everywhere, WRONG, LONG, {})[0] < 0


def test_behaviour_costs_its_weight_times_its_amount() -> None:
    config = RewardConfig(length=None, behaviour={"broken_tool_call": -0.05, "no_submit": -0.1})
    reward, terms = score(config, RIGHT, LONG, {"broken_tool_call": Finding(2.0), "untested_submit": Finding(1.0)})
    assert terms == {"solved": 1.0, "broken_tool_call": -0.1, "no_submit": 0.0}
    assert reward == pytest.approx(0.9)


def test_behaviour_counts_in_solved_attempts_alone_unless_told_otherwise() -> None:
    found = {"broken_tool_call": Finding(2.0)}
    only_solved, everywhere = (RewardConfig(length=None, behaviour_apply=a) for a in ("solved", "all"))
    assert score(only_solved, WRONG, LONG, found) == (0.0, {"solved": 0.0})
    assert score(only_solved, RIGHT, LONG, found)[0] == pytest.approx(0.9)
    assert score(everywhere, WRONG, LONG, found)[0] == pytest.approx(-0.1)


def test_a_solved_attempt_is_worth_more_than_any_unsolved_one_by_default() -> None:
    worst = {name: Finding(4.0) for name in RewardConfig().behaviour}
    most = Effort(thinking_tokens=10_000, tool_calls=100, turns=100)
    assert score(RewardConfig(), RIGHT, most, worst)[0] > score(RewardConfig(), WRONG, Effort(), {})[0]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            RewardConfig(behaviour={"kindness": 1.0}),
            "found 'kindness'; allowed: broken_tool_call, environment_reward, judge",
        ),
        (RewardConfig(behaviour={"no_submit": float("nan")}), "reward.behaviour.no_submit: found nan"),
        (RewardConfig(solved=float("inf")), "reward.solved: found inf"),
        (RewardConfig(length=LengthPenalty(q=-1.0)), "reward.length.q: found -1.0"),
    ],
)
def test_an_unusable_configuration_is_refused_by_field(config: RewardConfig, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check(config)


def test_a_term_that_a_grader_lacks_or_could_not_compute_adds_nothing_and_is_named() -> None:
    config = RewardConfig(
        length=None, behaviour={"no_submit": -0.1, "kindness": 1.0, "style": -0.1, "terminal_only": 0.0}
    )
    graded = Graded(
        verdict=RIGHT, findings={"no_submit": Finding(1.0)}, grader="g-7", terms=["no_submit", "style"],
        quarantined={"style": "ruff is not installed here", "needless_question": "no text"},
    )  # fmt: skip
    without = missing(config, graded)
    assert without == {
        "kindness": "grader g-7 does not have it: install there the package that brings it",
        "style": "ruff is not installed here",
    }
    reward, terms = score(config, RIGHT, LONG, graded.findings, without)
    assert terms == {"solved": 1.0, "no_submit": -0.1, "terminal_only": 0.0}
    assert reward == pytest.approx(0.9)


def test_a_verdict_of_before_is_trusted_to_have_had_all_terms() -> None:
    assert missing(RewardConfig(behaviour={"style": -1.0}), Graded(verdict=RIGHT)) == {}
