from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.evaluator.figures import best_of, figures, rows
from services.evaluator.plan import Result
from shared.contracts.messages import EvalRequested
from shared.contracts.run import Ref

PACK = Ref(key="pack", size=1, checksum="0" * 32)


def request(samples: int) -> EvalRequested:
    return EvalRequested(run="r", eval="e", serial=0, pack=PACK, pack_hidden=PACK, samples=samples)


def results(
    problem: str, solved: list[bool], greedy: bool | None = None, tokens: int = 10, first: int = 0
) -> list[Result]:
    made = [
        Result(
            attempt=f"{problem}{i}",
            problem=problem,
            index=i,
            solved=s,
            first_edit=i < first,
            tokens=tokens,
            trajectory=PACK,
        )
        for i, s in enumerate(solved)
    ]
    if greedy is not None:
        made.append(Result(attempt=f"{problem}g", problem=problem, index=len(solved), solved=greedy, trajectory=PACK))
    return made


def test_the_figures_are_means_over_problems() -> None:
    table = rows(
        request(4), [*results("a", [True, True, True, False], True, first=2), *results("b", [False] * 4, False)]
    )
    f = figures(request(4), table)
    assert f["pass_at_1"] == pytest.approx(0.375)
    assert f["pass_at_1_low"] <= f["pass_at_1"] <= f["pass_at_1_high"]
    assert f["first_edit"] == pytest.approx(0.25)
    assert (f["k"], f["best_of_k"], f["greedy"]) == (4, 0.5, 0.5)
    assert f["tokens_per_solved"] == pytest.approx(80 / 3)
    assert f["mean_tokens"] == 10
    assert (f["problems"], f["samples"], f["attempts"], f["infrastructure_errors"]) == (2, 4, 8, 0)
    assert table["a"]["solved"] == 3
    assert [a["solved"] for a in table["a"]["attempts"]] == [True, True, True, False]


def test_what_infrastructure_lost_is_in_no_average() -> None:
    lost = [Result(attempt=f"x{i}", problem="x", index=i, error="engine") for i in range(5)]
    some = [*results("a", [True, True])[:1], Result(attempt="a1", problem="a", index=1, error="engine")]
    f = figures(request(2), rows(request(2), [*some, *lost]))
    assert (f["pass_at_1"], f["problems"], f["infrastructure_errors"], f["attempts"]) == (1.0, 1, 6, 1)


def test_one_problem_has_no_interval_over_problems() -> None:
    f = figures(request(4), rows(request(4), results("a", [True, True, True, False])))
    assert f["pass_at_1"] == 0.75
    assert not {"pass_at_1_low", "pass_at_1_high"} & f.keys()


def test_without_a_single_verdict_only_counts_are_there() -> None:
    f = figures(request(2), rows(request(2), [Result(attempt="x", problem="x", index=0, error="engine")]))
    assert f == {"problems": 0, "samples": 2, "attempts": 0, "infrastructure_errors": 1}


def test_nothing_solved_has_no_tokens_per_solved() -> None:
    assert "tokens_per_solved" not in figures(request(1), rows(request(1), results("a", [False])))


def test_the_same_results_give_the_same_figures_in_any_order() -> None:
    every = [r for i in range(9) for r in results(f"p{i}", [i % 2 == 0, i % 3 == 0], i % 4 == 0)]
    assert figures(request(2), rows(request(2), every)) == figures(request(2), rows(request(2), reversed(every)))


@given(st.integers(1, 7), st.data())
def test_best_of_is_the_share_of_draws_that_hold_a_solution(n: int, data: st.DataObject) -> None:
    solved, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(combinations([i < solved for i in range(n)], k))
    assert best_of(n, solved, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))
