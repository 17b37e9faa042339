"""Which run to take up next, where some cannot be read."""

from __future__ import annotations

import pytest

from services.inference.candidates import FAILURES_TOLERATED, LAST_DELAY_S, Candidates, delay_after
from services.inference.following import Following
from shared.contracts.messages import PolicyPromoted
from tests.ruling import running


def candidates(*runs: str) -> Candidates:
    return Candidates(Following(statuses=running(*runs)))


def fail(found: Candidates, run: str, times: int, now: float = 0.0) -> list[bool]:
    return [found.put_off(run, f"the base of run {run}", now, 1.0) for _ in range(times)]


def test_the_run_started_last_is_taken_up_and_the_one_that_is_served_stays():
    found = candidates("a", "b")
    assert found.next("", 0.0) == "b"
    assert found.next("a", 0.0) == "b"
    assert found.next("b", 0.0) is None
    assert candidates().next("", 0.0) is None


def test_a_failure_or_two_start_no_other_engine_and_the_third_does():
    found = candidates("a", "b")
    for _ in range(FAILURES_TOLERATED - 1):
        fail(found, "b", 1)
        assert found.next("", 0.0) is None
    fail(found, "b", 1)
    assert found.next("", 0.0) == "a"
    assert found.next("a", 0.0) is None  # beside it, what is served stays


def test_a_run_that_was_put_off_is_tried_again_when_its_time_has_come_also_beside_another():
    found = candidates("a", "b")
    fail(found, "b", FAILURES_TOLERATED, now=100.0)
    due = found.due("a")
    assert due == 100.0 + delay_after(FAILURES_TOLERATED)
    assert found.next("a", due - 0.01) is None
    assert found.next("a", due) == "b"


def test_the_failure_that_is_told_is_told_once():
    assert fail(candidates("a"), "a", FAILURES_TOLERATED + 2) == [False, False, True, False, False]


def test_delays_double_up_to_a_limit_however_often_it_fails():
    assert delay_after(2) == 2 * delay_after(1)
    assert delay_after(100_000) == LAST_DELAY_S


@pytest.mark.parametrize(("served", "outdated"), [("a", []), ("b", ["b"])])
def test_what_nobody_prefers_any_more_is_outdated(served, outdated):
    found = candidates("a", "b")
    assert found.due(served) is None
    fail(found, "b", 1)
    assert found.outdated(served) == outdated


def test_a_run_that_an_engine_was_ended_for_in_vain_is_tried_again_only_where_nothing_else_is_served():
    found = candidates("a", "b")
    assert found.put_off("b", "an engine for run b", 0.0, 1.0, alone=True)  # told at once, and at once another comes up
    assert found.next("", 0.0) == "a"
    assert found.taken_up("a") == ["an engine for run b"]
    assert (found.next("a", 1e9), found.due("a"), found.outdated("a")) == (None, None, [])
    due = found.due("")
    assert due == delay_after(FAILURES_TOLERATED)
    assert found.next("", due) == "b"
    fail(found, "b", 1)  # another time it could not be read
    assert found.next("a", 1e9) is None
    found.taken_up("b")
    assert found.unread == {}


def test_no_promotion_is_followed_before_all_were_heard():
    following = Following(promotions=True, statuses=running("a"))
    found = Candidates(following)
    following.promotion(PolicyPromoted(run="a", serial=3, by="test"))
    assert (found.next("", 0.0), following.asked("a")) == (None, None)
    following.past_heard = True
    assert (found.next("", 0.0), following.asked("a"), following.asked("b")) == ("a", 3, None)
    following.pinned = 1
    assert following.asked("a") == 1
