"""Silence counts only where somebody listened, and only up to where everything was read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.listening import ABSENT_S, MOST_GAPS, Listening
from services.scheduler.watermark import Watermark
from shared.bus import Standing


@given(st.lists(st.floats(0.01, 20), min_size=2, max_size=40), st.data())
def test_every_gap_counts_and_none_for_more_than_its_share(gaps: list[float], data: st.DataObject) -> None:
    listening, now, batches = Listening(), 1000.0, [1000.0]
    listening.batch(now, heard=True, upto=None)
    for gap in gaps:
        now += gap
        batches.append(now)
        listening.batch(now, heard=True, upto=None)
    first = data.draw(st.integers(0, len(gaps)))
    assert listening.since(batches[first]) == pytest.approx(sum(min(gap, ABSENT_S) for gap in gaps[first:]), abs=1e-6)


def test_what_was_said_after_the_watermark_may_be_unread_and_what_was_said_to_the_deaf_is_nobodys_silence() -> None:
    listening = Listening()
    for second in range(10):
        listening.batch(float(second), heard=True, upto=4.0)
    assert listening.since(2.0) == 2.0
    assert listening.since(6.0) < 0
    assert listening.since(2.0, 9.0) == 7.0  # as if all had been read
    listening.batch(10.0, heard=False, upto=None)
    listening.batch(11.0, heard=True, upto=None)
    assert listening.since(2.0) == 1.0


def test_a_scheduler_that_is_slow_for_days_remembers_no_more_than_it_needs() -> None:
    listening = Listening()
    for number in range(3 * MOST_GAPS):
        listening.batch(4.0 * number, heard=True, upto=None)
    assert len(listening._ends) <= MOST_GAPS
    assert listening.since(4.0 * 3 * MOST_GAPS - 404) == pytest.approx(300)


def test_a_time_counts_as_read_once_every_partition_was_handled_up_to_where_it_ended_then() -> None:
    one, other = ("attempts.progress", 0), ("rollouts.finished", 3)
    mark = Watermark()
    assert mark.advance(10.0, {one: Standing(5, 5), other: Standing(0, 7)}) == float("-inf")
    assert mark.advance(20.0, {one: Standing(90, 100), other: Standing(6, 7)}) == float("-inf")  # one is read first
    assert mark.advance(30.0, {one: Standing(90, 100), other: Standing(7, 9)}) == 10.0
    assert mark.advance(40.0, {one: Standing(100, 100), other: Standing(8, 9)}) == 10.0
    assert mark.advance(50.0, {one: Standing(100, 100), other: Standing(9, 9)}) == 30.0
