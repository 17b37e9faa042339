"""The gate bounds the age of every sample by pacing, whatever attempts take and whenever the trainer comes."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler import pacing
from services.scheduler.gate import Gate

BOUNDS, SIZES = st.integers(0, 4), st.integers(1, 6)


@dataclass
class Model:
    """Groups of one attempt, a trainer that makes a step of the first places, and events in any order."""

    gate: Gate
    lead: int
    tip: int = 0
    version: int = 0  # lowest in rotation
    sampled: list[int] = field(default_factory=list)  # oldest versions of the unfinished
    complete: list[int] = field(default_factory=list)  # without a place
    placed: deque[int] = field(default_factory=deque)
    ages: list[int] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        return self.tip * self.gate.groups_per_step + len(self.placed)

    def decide(self) -> None:
        groups = sorted([(v, False) for v in self.sampled] + [(v, True) for v in self.complete])
        for index in self.gate.placing(groups, accepted=self.accepted):
            self.complete.remove(groups[index][0])
            self.placed.append(groups[index][0])
        standing = sorted(self.sampled + self.complete)
        assert self.gate.fits(standing, accepted=self.accepted)
        room = self.gate.room(version=self.version, standing=standing, accepted=self.accepted, lead=self.lead)
        self.sampled += [self.version] * room

    def happens(self, what: str, luck: random.Random) -> None:
        match what:
            case "step" if len(self.placed) >= self.gate.groups_per_step:
                self.ages += [self.tip - self.placed.popleft() for _ in range(self.gate.groups_per_step)]
                self.tip += 1
            case "swap":
                self.version = self.tip
            case "a replica falls behind":
                self.version = luck.randint(0, self.version)
            case "end" if self.sampled:
                self.complete.append(self.sampled.pop(luck.randrange(len(self.sampled))))
            case "fail" if self.sampled:
                self.sampled.pop(luck.randrange(len(self.sampled)))
            case "set aside" if self.placed:
                del self.placed[luck.randrange(len(self.placed))]
            case "asked for again" if self.sampled:  # on an older version, as far as there are places for that
                again = self.sampled.pop(luck.randrange(len(self.sampled)))
                older = luck.randint(-3, again)
                fits = self.gate.fits(sorted([*self.sampled, *self.complete, older]), accepted=self.accepted)
                self.sampled.append(older if fits else again)
            case "newer" if self.sampled:  # it was claimed late, by a replica that serves a newer version
                at = luck.randrange(len(self.sampled))
                self.sampled[at] = luck.randint(self.sampled[at], max(self.sampled[at], self.tip))


EVENTS = (
    *("step", "swap", "end") * 4,
    *("a replica falls behind", "fail", "set aside", "asked for again", "newer"),
)


@settings(max_examples=150, deadline=None)
@given(BOUNDS, SIZES, st.integers(0, 24), st.lists(st.sampled_from(EVENTS), max_size=150), st.integers(0, 1000))
def test_no_order_of_events_trains_a_sample_older_than_the_bound_or_stops_the_trainer_for_ever(
    bound: int, size: int, lead: int, events: list[str], seed: int
) -> None:
    luck, model = random.Random(seed), Model(Gate(bound, size), lead)
    model.decide()
    for what in events:
        model.happens(what, luck)
        model.decide()
    made = model.tip
    for _ in range(5):
        model.happens("swap", luck)
        model.decide()
        while model.sampled and len(model.placed) < size:  # the slowest end last
            model.sampled.sort(reverse=True)
            model.complete.append(model.sampled.pop(0))
            model.decide()
        model.happens("step", luck)
    assert model.tip == made + 5
    assert max(model.ages) <= bound


def test_everything_that_is_complete_gets_a_place_when_nothing_is_unfinished() -> None:
    assert Gate(1, 2).placing([(0, True), (0, True), (0, True), (1, True)], accepted=0) == [0, 1, 2, 3]


def test_a_complete_group_overtakes_an_unfinished_one_only_as_far_as_that_one_can_wait() -> None:
    gate = Gate(max_staleness=1, groups_per_step=2)
    behind = [(0, False), (0, True), (0, True), (0, True)]
    assert gate.placing(behind, accepted=0) == [1, 2, 3]  # the fourth place is the last of step 2, the last in time
    assert gate.placing(behind, accepted=1) == [1, 2]
    assert gate.placing([(0, True), *behind[:3]], accepted=0) == [0, 2, 3]


def test_the_oldest_groups_take_their_places_first() -> None:
    assert Gate(3, 2).placing([(0, True), (1, False), (2, True)], accepted=0) == [0, 2]


def test_a_group_that_a_fork_made_too_old_holds_nobody_back() -> None:
    gate = Gate(max_staleness=0, groups_per_step=2)
    assert gate.placing([(-5, False), (2, True)], accepted=4) == [1]


def test_one_slow_attempt_does_not_stop_the_sampling_of_others() -> None:
    gate = Gate(max_staleness=4, groups_per_step=4)
    assert gate.room(version=3, standing=[0], accepted=12, lead=8) == 11
    assert gate.room(version=3, standing=[0] * 20, accepted=12, lead=16) == 0


def test_newer_groups_of_other_replicas_keep_their_places() -> None:
    gate = Gate(max_staleness=1, groups_per_step=2)
    assert gate.room(version=0, standing=[1] * 5, accepted=0, lead=10) == 1  # the sixth of them would be too late
    assert gate.room(version=0, standing=[1] * 2, accepted=0, lead=10) == 4


def test_without_staleness_a_step_is_asked_for_only_when_the_one_before_is_trained() -> None:
    gate = Gate(max_staleness=0, groups_per_step=4)
    assert gate.room(version=0, standing=[], accepted=0, lead=0) == 4
    assert gate.room(version=0, standing=[], accepted=4, lead=0) == 0
    assert gate.room(version=1, standing=[], accepted=4, lead=0) == 4


def test_the_gate_is_never_open_by_a_negative_amount() -> None:
    assert Gate(1, 4).room(version=-3, standing=[], accepted=0, lead=4) == 0


@given(BOUNDS, SIZES, st.integers(0, 24), st.integers(0, 40), st.integers(0, 40), st.integers(-3, 12))
def test_the_version_that_is_said_to_open_the_gate_is_the_first_that_does(
    bound: int, size: int, lead: int, accepted: int, running: int, version: int
) -> None:
    gate, lead = Gate(bound, size), min(lead, bound * size)
    opening = gate.opening(accepted=accepted, running=running, lead=lead)
    room = gate.room(version=version, standing=[version] * running, accepted=accepted, lead=lead)
    assert (room > 0) == (version >= opening)


@given(
    st.lists(st.floats(0.1, 1e5), max_size=8),
    st.one_of(st.none(), st.floats(0.1, 1e4)),
    SIZES,
    BOUNDS,
)
def test_no_fewer_groups_are_asked_for_ahead_than_a_step_needs_and_no_more_than_the_bound_allows(
    latencies: list[float], step_s: float | None, size: int, bound: int
) -> None:
    lead = pacing.lead(latencies, step_s, groups_per_step=size, max_staleness=bound)
    assert min(size, bound * size) <= lead <= bound * size
    if not latencies or step_s is None:
        assert lead == bound * size


def test_longer_attempts_are_asked_for_farther_ahead_and_one_pause_of_hours_changes_little() -> None:
    def lead(*latencies: float) -> int:
        return pacing.lead(latencies, 100.0, groups_per_step=16, max_staleness=8)

    short, long = lead(*[50.0] * 64), lead(*[300.0] * 64)
    assert 16 <= short < long < 8 * 16
    assert lead(*[50.0] * 63, 1e5) <= short + 5


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
