from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.evaluator.plan import FIRST_PAUSE_S, Patience, Plan, choose
from shared.contracts.messages import (
    AttemptKey,
    Effort,
    EvalRequested,
    RolloutRequested,
    RolloutScored,
    StopReason,
    Verdict,
)
from shared.contracts.run import Ref, Sampling

PACK = Ref(key="pack", size=1, checksum="0" * 32)
LEASE_S, LOST_S = 10.0, 100.0


def plan(
    problems: list[str], *, samples: int = 2, greedy: bool = True, asks: int = 2, name: str = "e", **sampling: Any
) -> Plan:
    request = EvalRequested(
        run="r",
        eval=name,
        serial=7,
        pack=PACK,
        pack_hidden=PACK,
        samples=samples,
        greedy=greedy,
        sampling=Sampling(temperature=0.8, **sampling),
    )
    return Plan(request, problems, "default", Patience(lease_s=LEASE_S, lost_s=LOST_S, asks=asks))


def verdict(key: AttemptKey, solved: bool = True) -> RolloutScored:
    return RolloutScored(
        run="r",
        key=key,
        verdict=Verdict(solved=solved, passed=1, total=1, first_edit_solved=None),
        reward=1.0,
        terms={},
        reward_config="default",
        trajectory=PACK,
        effort=Effort(thinking_tokens=3, final_tokens=1),
        stop=StopReason.submitted,
        oldest_version=7,
    )


def test_an_evaluation_asks_for_every_sample_and_one_greedy_attempt_pinned_to_its_version() -> None:
    made = plan(["b", "a"])
    asks = list(made.due(0.0, 100))
    assert len({ask.key.attempt for ask in asks}) == len(asks) == made.total == 6
    assert all(ask.pinned == 7 == ask.policy_floor for ask in asks)
    assert [ask.sampling.temperature for ask in asks] == [0.8, 0.8, 0.0] * 2
    assert len({ask.seed for ask in asks}) == 6
    assert len({ask.key.group for ask in asks}) == 2
    assert {a.key.attempt for a in asks}.isdisjoint(a.key.attempt for a in plan(["b", "a"], name="e2").due(0.0, 100))


def test_a_greedy_attempt_does_not_draw_again_what_cannot_come_out_otherwise() -> None:
    asks = plan(["a"], retry="fresh", max_repeats=16).due(0.0, 100)
    assert [ask.sampling.max_repeats for ask in asks] == [16, 16, 0]
    asks = plan(["a"], retry="append", max_repeats=6).due(0.0, 100)
    assert [ask.sampling.max_repeats for ask in asks] == [6, 6, 6]


def test_what_is_silent_for_long_is_asked_for_again_under_the_next_epoch_as_often_as_needed() -> None:
    made = plan(["a"], asks=1)
    first = list(made.due(0.0, 100))
    assert list(made.due(LOST_S - 1, 100)) == []
    for n in range(1, 5):
        again = list(made.due(n * LOST_S, 100))
        assert [a.key.attempt for a in again] == [f.key.attempt for f in first]
        assert {a.key.epoch for a in again} == {n}
    assert not made.results


def test_an_attempt_whose_worker_falls_silent_is_asked_for_again_soon_one_that_waits_for_its_verdict_is_not() -> None:
    made = plan(["a"], samples=2, greedy=False)
    held, graded = (ask.key for ask in made.due(0.0, 10))
    for key in (held, graded):
        made.progress(key.attempt, 0, 1.0, held=True)
    made.progress(held.attempt, 0, 9.0, held=True)
    made.progress(graded.attempt, 0, 9.0, held=False)
    assert list(made.due(9.0 + LEASE_S - 1, 10)) == []
    (again,) = made.due(9.0 + LEASE_S, 10)
    assert (again.key.attempt, again.key.epoch) == (held.attempt, 1)
    made.progress(held.attempt, 0, 20.0, held=True)  # a zombie of the old epoch
    assert list(made.due(20.0 + LEASE_S, 10)) == []


def test_infrastructure_failures_are_retried_after_a_pause_and_end_as_errors_never_as_unsolved() -> None:
    made = plan(["a"], samples=1, greedy=False, asks=2)
    (ask,) = made.due(0.0, 10)
    assert made.failed(ask.key, "engine", 1.0) is None
    assert made.failed(ask.key, "engine", 1.0) is None  # said twice, counted once
    assert list(made.due(1.0 + FIRST_PAUSE_S / 2, 10)) == []
    (again,) = made.due(1.0 + FIRST_PAUSE_S, 10)
    assert again.key.epoch == 1
    result = made.failed(again.key, "engine", 9.0)
    assert result is not None
    assert (result.error, made.complete) == ("engine", True)


def test_a_failure_of_an_older_epoch_does_not_touch_the_newer_one() -> None:
    made = plan(["a"], samples=1, greedy=False)
    (old,) = made.due(0.0, 10)
    (new,) = made.due(LOST_S, 10)
    made.failed(old.key, "late news", LOST_S + 1)
    assert made.out == 1
    assert made.scored(verdict(new.key)) is not None


def test_the_choice_of_problems_does_not_depend_on_their_order() -> None:
    ids = [f"p{i}" for i in range(50)]
    assert choose(ids, 10) == choose(reversed(ids), 10)
    assert len(choose(ids, 10)) == 10
    assert set(choose(ids, 10)) < set(choose(ids, 20))
    assert choose(ids, 0) == sorted(ids)
    assert choose(ids, 99) == sorted(ids)


@given(st.data())
def test_whatever_happens_every_place_ends_with_its_first_result_and_the_bound_holds(data: st.DataObject) -> None:
    made = plan(["a", "b", "c"], samples=2)
    known: list[AttemptKey] = []
    first: dict[str, bool] = {}
    now, bound = 0.0, data.draw(st.integers(1, 5))

    def see(asks: list[RolloutRequested]) -> None:
        assert made.out <= bound
        assert all(ask.key.attempt not in first for ask in asks)
        known.extend(ask.key for ask in asks)

    for _ in range(data.draw(st.integers(0, 40))):
        event = data.draw(st.sampled_from(("ask", "score", "fail", "wait", "restart")))
        if event == "ask":
            see(list(made.due(now, bound)))
        elif event == "wait":
            now += data.draw(st.floats(0, 2 * LOST_S))
        elif event == "restart":
            results = list(made.results.values())
            made = plan(["a", "b", "c"], samples=2)
            made.restore(results)
        elif known:
            key = data.draw(st.sampled_from(known))
            if event == "score":
                solved = data.draw(st.booleans())
                assert (made.scored(verdict(key, solved)) is None) == (key.attempt in first)
                first.setdefault(key.attempt, solved)
            elif (result := made.failed(key, "x", now)) is not None:
                assert key.attempt not in first
                first[result.attempt] = False
    for _ in range(200):  # and then all goes well
        now += LOST_S
        asks = list(made.due(now, bound))
        see(asks)
        for ask in asks:
            made.scored(verdict(ask.key))
            first.setdefault(ask.key.attempt, True)
    assert made.complete
    assert {a: r.solved for a, r in made.results.items()} == first
