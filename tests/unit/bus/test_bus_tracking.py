"""The pure parts of the bus: what may be committed, and who reads which partition."""

from __future__ import annotations

import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus.assignment import partition_of, share
from shared.bus.tracking import OffsetTracker, read_ranges, runs, write_ranges


@st.composite
def histories(draw):
    """Rising offsets with gaps, some of them acknowledged in any order, the rest never."""
    offsets = sorted(draw(st.sets(st.integers(0, 300), max_size=40)))
    acknowledged = draw(st.permutations(offsets).flatmap(lambda p: st.integers(0, len(p)).map(lambda n: p[:n])))
    return offsets, acknowledged


def finished(tracker):
    return [offset for first, last in tracker.finished() for offset in range(first, last + 1)]


class Simple:
    """What an OffsetTracker says, without care for what it costs."""

    def __init__(self, position, before):
        self.position, self.given, self.open, self.before = position, [], set(), {o for o in before if o >= position}

    def give(self, offset):
        self.given.append(offset)
        if offset not in self.before:
            self.open.add(offset)
        self.settle()

    def done(self, offset):
        self.open.discard(offset)
        self.settle()

    def settle(self):
        while self.given and self.given[0] not in self.open:
            self.position = self.given.pop(0) + 1

    def finished(self, last):
        return [o for o in self.given if o not in self.open] + sorted(o for o in self.before if o > last)


@given(st.integers(0, 20), st.sets(st.integers(0, 90)), st.sets(st.integers(0, 80)), st.randoms(use_true_random=False))
def test_the_tracker_says_what_a_simple_one_says(position, before, offsets, random):
    tracker, simple, last = OffsetTracker(position, before), Simple(position, before), position - 1
    coming, out = sorted(o for o in offsets if o >= position), []
    while coming or out:
        if coming and (not out or random.random() < 0.6):
            last = coming.pop(0)
            out += [last] * (not tracker.give(last))
            simple.give(last)
        else:
            offset = out.pop(random.randrange(len(out)))
            tracker.done(offset)
            simple.done(offset)
        assert (tracker.position, finished(tracker)) == (simple.position, simple.finished(last))
        assert tracker.open == len(simple.open)


def test_a_look_behind_a_stuck_offset_costs_no_more_after_a_day():
    tracker = OffsetTracker(0)
    for offset in range(300_000):
        tracker.give(offset)
        if offset:
            tracker.done(offset)
    lines = 0

    def count(*_: object) -> object:
        nonlocal lines
        lines += 1
        return count

    tracemalloc.start()
    sys.settrace(count)
    try:
        text = write_ranges(tracker.position, tracker.finished(), 4000)
    finally:
        sys.settrace(None)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert text == "etude:1-100000"
    assert lines < 1000
    assert most < 100_000  # bytes: nor is anything copied that has an entry per offset


@given(histories())
def test_the_position_never_passes_an_open_offset_and_never_falls(history):
    offsets, acknowledged = history
    tracker = OffsetTracker(0)
    for offset in offsets:
        tracker.give(offset)
    left = set(offsets)
    before = tracker.position
    for offset in acknowledged:
        tracker.done(offset)
        left.discard(offset)
        assert tracker.position >= before
        assert all(o >= tracker.position for o in left)
        assert not any(o >= tracker.position for o in offsets if o < min(left, default=301))
        before = tracker.position
    assert tracker.open == len(left)


@given(histories())
def test_a_restart_at_the_position_gives_every_open_offset_again(history):
    offsets, acknowledged = history
    tracker = OffsetTracker(0)
    for offset in offsets:
        tracker.give(offset)
    for offset in acknowledged:
        tracker.done(offset)
    again = {o for o in offsets if o >= tracker.position}
    assert again >= set(offsets) - set(acknowledged)


@given(histories(), st.integers(0, 400))
def test_the_next_consumer_is_given_only_what_was_not_finished(history, room):
    offsets, acknowledged = history
    first = OffsetTracker(0)
    for offset in offsets:
        first.give(offset)
    for offset in acknowledged:
        first.done(offset)
    told = read_ranges(first.position, write_ranges(first.position, first.finished(), room))
    second, again = OffsetTracker(first.position, told), []
    for offset in (o for o in offsets if o >= first.position):
        if not second.was_finished(offset):
            again.append(offset)
        second.give(offset)
    assert set(again) >= set(offsets) - set(acknowledged)
    if room == 400:  # enough for all
        assert again == sorted(set(offsets) - set(acknowledged))
    for offset in again:
        second.done(offset)
    assert (second.open, finished(second)) == (0, [])
    assert not offsets or second.position == offsets[-1] + 1


@given(st.integers(0, 10**9), st.sets(st.integers(0, 10**6)), st.integers(0, 200))
def test_finished_offsets_are_written_within_the_room_and_read_back(position, relative, room):
    offsets = sorted(position + r for r in relative)
    text = write_ranges(position, runs(offsets), room)
    assert len(text) <= max(room, 0)
    found = read_ranges(position, text)
    assert found == offsets[: len(found)]


@given(st.text(max_size=40))
def test_metadata_that_somebody_else_wrote_says_nothing(text):
    assert read_ranges(7, text) == []


@pytest.mark.parametrize("text", ["", "x", "1-", "5-3", "0-99999999999", "1,,2", "-1", "7,5", "0-60000,60001-120000"])
def test_ranges_that_are_none_are_ignored(text):
    assert read_ranges(0, "etude:" + text) == []


def test_what_is_gone_from_the_log_does_not_spoil_what_is_finished_behind_it():
    tracker = OffsetTracker(5, [7, 9])
    tracker.give(5)
    tracker.give(8)  # 7 is gone, and so is 9
    tracker.give(12)
    tracker.give(13)
    tracker.done(5)
    tracker.done(13)
    assert (tracker.position, finished(tracker)) == (6, [13])


def test_acknowledging_twice_or_something_never_given_changes_nothing():
    tracker = OffsetTracker(5)
    tracker.give(7)
    tracker.give(9)
    tracker.done(8)
    tracker.done(9)
    tracker.done(9)
    assert (tracker.position, tracker.open) == (5, 1)
    tracker.done(7)
    tracker.done(7)
    assert (tracker.position, tracker.open) == (10, 0)


def test_offsets_out_of_order_are_refused():
    tracker = OffsetTracker(5)
    with pytest.raises(ValueError, match="expected at least 5"):
        tracker.give(4)
    tracker.give(6)
    with pytest.raises(ValueError, match="expected at least 7"):
        tracker.give(6)


@given(
    st.integers(1, 64),
    st.lists(st.sets(st.integers(0, 6), min_size=1, max_size=7), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_members_that_come_and_go_settle_on_fair_shares_with_one_owner_each(partitions, memberships, random):
    owners: dict[int, str] = {}
    for present in memberships:
        members = [f"m{i}" for i in sorted(present)]
        owners = {part: owner for part, owner in owners.items() if owner in members}
        for _ in range(6 * len(members) + 6):
            moved = False
            for me in random.sample(members, len(members)):
                change = share(partitions, owners, members, me)
                assert not set(change.take) & set(owners)
                for part in change.release:
                    assert owners.pop(part) == me
                owners.update(dict.fromkeys(change.take, me))
                moved = moved or bool(change.take or change.release)
            if not moved:
                break
        else:
            pytest.fail(f"no rest: {owners}")
        assert sorted(owners) == list(range(partitions))
        counts = [list(owners.values()).count(member) for member in members]
        assert max(counts) - min(counts) <= 1


def test_a_newcomer_moves_no_more_than_its_own_share():
    owners = {part: f"m{part % 2}" for part in range(8)}
    moves = [share(8, owners, ["m0", "m1", "m2"], member) for member in ("m0", "m1")]
    assert sum(len(move.release) for move in moves) == 2


def test_a_dead_owners_partitions_are_free():
    assert share(4, {0: "dead", 1: "dead", 2: "me", 3: "me"}, ["me"], "me").take == (0, 1)


def test_the_partition_of_a_key_is_the_same_in_every_version():
    assert [partition_of(key, 64) for key in ("", "a-1", "r-20260101T000000-abcd", "é")] == [2, 32, 53, 51]
