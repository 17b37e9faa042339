"""A group starves when its programs hold all of its memory and read their own files again and again."""

from __future__ import annotations

from shared.sandbox.inside.starvation import LOOK_S, Starvation

LIMIT = 1000


def looks(
    held: int, faults_per_s: float, seconds: float, starvation: Starvation | None = None, begin: float = 0.0
) -> list[float]:
    """Return when the group was found to starve."""
    starvation = starvation or Starvation()
    times = [begin + LOOK_S * n for n in range(int(seconds / LOOK_S) + 1)]
    return [now for now in times if starvation.look(now, held, LIMIT, int(faults_per_s * now))]


def test_a_full_group_that_reads_its_pages_again_is_found_after_five_seconds_and_again() -> None:
    assert looks(980, 55, 12) == [5.0, 10.0]


def test_a_full_group_that_reads_nothing_is_well() -> None:
    assert looks(1000, 0, 60) == []


def test_a_group_with_room_is_well_however_much_it_reads() -> None:
    assert looks(900, 5000, 60) == []


def test_room_in_between_begins_anew() -> None:
    starvation = Starvation()
    assert looks(980, 55, 4, starvation) == []
    assert looks(500, 55, 0, starvation, 4.5) == []
    assert looks(980, 55, 4.5, starvation, 5.0) == []
    assert looks(980, 55, 0, starvation, 10.0) == [10.0]
