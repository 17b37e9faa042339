"""Where versions stand on the lineage that survives, against distances walked in the tree itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.lineage import Fork, Lineage


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[Fork], dict[int, int]]:
    """Incarnations 0..n, each forked from an earlier one at a step that it had reached; and the last step of each."""
    forks, last = [Fork(0, 0, -1)], {0: draw(st.integers(0, 6))}
    for incarnation in range(1, draw(st.integers(1, 5)) + 1):
        parent = draw(st.sampled_from(sorted(last)))
        start = forks[parent].step
        step = draw(st.integers(start, last[parent]))
        forks.append(Fork(incarnation, step, parent))
        last[incarnation] = step + draw(st.integers(0, 6))
    return forks, last


def ancestry(forks: list[Fork], incarnation: int, step: int) -> list[tuple[int, int]]:
    """Versions on the way to the base policy, from (incarnation, step), each named by who made it."""
    way = []
    while True:
        fork = forks[incarnation]
        while step > fork.step:
            way.append((incarnation, step))
            step -= 1
        if fork.parent < 0:
            return [*way, (-1, 0)]
        incarnation = fork.parent


@given(trees(), st.data())
def test_position_is_the_tip_minus_the_distance_along_the_tree(
    tree: tuple[list[Fork], dict[int, int]], data: st.DataObject
) -> None:
    forks, last = tree
    lineage = Lineage(forks)
    incarnation = data.draw(st.sampled_from(sorted(last)))
    step = data.draw(st.integers(forks[incarnation].step, last[incarnation]))
    tip = last[lineage.current]
    ours, theirs = ancestry(forks, lineage.current, tip), ancestry(forks, incarnation, step)
    common = next(version for version in ours if version in theirs)
    distance = ours.index(common) + theirs.index(common)
    if theirs.index(common) == 0:  # on the surviving lineage
        assert lineage.position(incarnation, step) == step
    assert tip - lineage.position(incarnation, step) == distance


@given(trees())
def test_exactly_the_ancestors_of_the_newest_incarnation_survive(tree: tuple[list[Fork], dict[int, int]]) -> None:
    forks, last = tree
    lineage = Lineage(forks)
    surviving = set(ancestry(forks, lineage.current, last[lineage.current]))
    for incarnation, end in last.items():
        for step in range(forks[incarnation].step + 1, end + 1):
            assert lineage.survives(incarnation, step) == ((incarnation, step) in surviving)


def test_the_age_across_a_fork_is_the_way_back_plus_the_way_forward() -> None:
    lineage = Lineage([Fork(0, 0, -1), Fork(1, 10, 0)])
    t, f, s = 12, 10, 13  # a token of dead step 13, trained in step 12 of the new branch, from the weights of step 11
    assert (t - 1) - lineage.position(0, s) == (t - 1 - f) + (s - f)


def test_before_any_trainer_has_spoken_everything_counts() -> None:
    assert Lineage().survives(0, 3)
    assert Lineage().position(0, 3) == 3


def test_a_lineage_can_be_seen_as_an_earlier_incarnation_saw_it() -> None:
    lineage = Lineage([Fork(0, 0, -1), Fork(1, 2, 0)])
    assert not lineage.survives(0, 3)
    assert lineage.at(0).survives(0, 3)
