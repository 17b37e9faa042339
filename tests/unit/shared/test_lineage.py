"""Ages along the tree of incarnations, and where versions stand on the lineage that survives, against distances walked in the
tree itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.lineage import Fork, Lineage, age, distance

# 0 ran to step 9; 1 continued it from 4 and ran to 8; 2 continued 0 from 6; 3 continued 1 from 7.
FORKS = {0: Fork(-1, 0), 1: Fork(0, 4), 2: Fork(0, 6), 3: Fork(1, 7)}


def test_on_one_line_age_is_the_difference_of_steps() -> None:
    assert age(FORKS, 0, 1, (0, 0)) == 0  # sampled by the very weights that the step starts from
    assert age(FORKS, 0, 5, (0, 2)) == 2
    assert age(FORKS, 1, 6, (0, 3)) == 2  # before the fork the parent's steps are ours
    assert age(FORKS, 3, 9, (0, 2)) == 6  # through two forks
    assert age(FORKS, 3, 9, (1, 6)) == 2


def test_a_token_of_a_dead_step_is_as_old_as_the_way_back_and_forward() -> None:
    """(t - f) + (s - f) for a token of dead step s > f."""
    assert age(FORKS, 1, 6, (0, 7)) == (5 - 4) + (7 - 4)
    assert age(FORKS, 2, 8, (1, 6)) == (7 - 4) + (6 - 4)  # cousins part where the older fork was
    assert age(FORKS, 3, 9, (0, 9)) == (8 - 4) + (9 - 4)


def test_the_step_forked_from_belongs_to_both() -> None:
    assert age(FORKS, 1, 5, (0, 4)) == 0
    assert age(FORKS, 1, 5, (1, 4)) == 0  # the base that the new incarnation published


def test_a_version_ahead_on_our_own_line_has_a_negative_age() -> None:
    assert age(FORKS, 0, 3, (0, 5)) == -3


def test_unknown_incarnations_share_the_base_policy_alone() -> None:
    assert distance({}, (5, 3), (2, 4)) == 7


@given(st.integers(0, 3), st.integers(0, 10), st.integers(0, 3), st.integers(0, 10))
def test_between_two_lines_the_way_is_as_long_in_both_directions(a: int, s: int, b: int, t: int) -> None:
    assert abs(distance(FORKS, (a, s), (b, t))) == abs(distance(FORKS, (b, t), (a, s)))


@st.composite
def trees(draw: st.DrawFn) -> tuple[dict[int, Fork], dict[int, int]]:
    """Incarnations 0..n, each forked from an earlier one at a step that it had reached; and the last step of each."""
    forks, last = {0: Fork(-1, 0)}, {0: draw(st.integers(0, 6))}
    for incarnation in range(1, draw(st.integers(1, 5)) + 1):
        parent = draw(st.sampled_from(sorted(last)))
        start = forks[parent].step
        step = draw(st.integers(start, last[parent]))
        forks[incarnation] = Fork(parent, step)
        last[incarnation] = step + draw(st.integers(0, 6))
    return forks, last


def ancestry(forks: dict[int, Fork], incarnation: int, step: int) -> list[tuple[int, int]]:
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
    tree: tuple[dict[int, Fork], dict[int, int]], data: st.DataObject
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
    assert age(forks, lineage.current, tip + 1, (incarnation, step)) == distance  # the trainer measures the same


@given(trees())
def test_exactly_the_ancestors_of_the_newest_incarnation_survive(tree: tuple[dict[int, Fork], dict[int, int]]) -> None:
    forks, last = tree
    lineage = Lineage(forks)
    surviving = set(ancestry(forks, lineage.current, last[lineage.current]))
    for incarnation, end in last.items():
        for step in range(forks[incarnation].step + 1, end + 1):
            assert lineage.survives(incarnation, step) == ((incarnation, step) in surviving)


def test_the_age_across_a_fork_is_the_way_back_plus_the_way_forward() -> None:
    lineage = Lineage({0: Fork(-1, 0), 1: Fork(0, 10)})
    t, f, s = 12, 10, 13  # a token of dead step 13, trained in step 12 of the new branch, from the weights of step 11
    assert (t - 1) - lineage.position(0, s) == (t - 1 - f) + (s - f)


def test_before_any_trainer_has_spoken_everything_counts() -> None:
    assert Lineage().survives(0, 3)
    assert Lineage().position(0, 3) == 3


def test_a_lineage_can_be_seen_as_an_earlier_incarnation_saw_it() -> None:
    lineage = Lineage({0: Fork(-1, 0), 1: Fork(0, 2)})
    assert not lineage.survives(0, 3)
    assert lineage.at(0).survives(0, 3)
