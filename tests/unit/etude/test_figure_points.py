"""Messages become points: by which names, at which step, and which of several incarnations' steps counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etude.figures.points import STATE_NUMBERS, Kind, Past, Point, mark, past
from shared.contracts.flat import flat
from shared.contracts.life import RunState
from shared.contracts.messages import RunStatus
from tests.unit.etude.figure_messages import (
    RUN,
    begun,
    evaluated,
    heard,
    life,
    overtaking,
    published,
    step,
    word,
)


def curve(told: Past, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for row in told.rows for point in row.points if point.name == name]


def test_every_figure_of_a_step_an_evaluation_and_a_change_of_state_has_its_name_step_value_and_time() -> None:
    told = past(RUN, heard(word("running"), published(3, 1), step(1, 3), evaluated("before", 3), word("paused")))
    assert [point for row in told.rows for point in row.points] == [
        Point("run/state", 0, 1.0, 1000.0),
        Point("train/loss", 1, 1.0, 1002.0),
        Point("train/age_max", 1, 2.0, 1002.0),
        Point("train/groups", 1, 2.0, 1002.0),
        Point("train/version", 1, 3.0, 1002.0),
        Point("train/incarnation", 1, 0.0, 1002.0),
        Point("eval/pass_at_1", 1, 0.5, 1003.0),
        Point("eval/version", 1, 3.0, 1003.0),
        Point("run/state", 1, 2.0, 1004.0),
    ]
    assert told.state is RunState.paused


def test_the_marker_is_the_last_point_of_every_row_and_says_which_row_it_is() -> None:
    for row in past(RUN, life(3, 60)).rows:
        assert mark(row.points[-1]) == row.mark
        assert not any(mark(point) for point in row.points[:-1])


def test_the_surviving_lineages_step_counts_whatever_an_older_incarnation_says_and_when() -> None:
    said = heard(
        step(1, 1), step(2, 2), step(3, 3), begun(1, 1), step(2, 5, 1), step(4, 4), evaluated("dead", 3), published(3, 3)
    )  # fmt: skip
    told = past(RUN, said)
    assert curve(told, "train/loss") == [(1, 1.0), (2, 2.25)]
    assert curve(told, "train/incarnation") == [(1, 0.0), (2, 1.0)]
    assert curve(told, "eval/pass_at_1") == []


def test_a_fork_is_known_by_what_it_published_where_its_start_is_no_longer_kept() -> None:
    told = past(RUN, heard(step(1, 1), step(2, 2), published(4, 1, 1), published(5, 2, 1), step(2, 5, 1)))
    assert curve(told, "train/loss") == [(1, 1.0), (2, 2.25)]


def test_an_evaluation_stands_at_the_step_of_its_version_and_waits_until_that_is_known() -> None:
    said = heard(published(0, 0), evaluated("later", 2), evaluated("base", 0), step(1, 1), step(2, 2))
    assert curve(past(RUN, said[:3]), "eval/version") == [(0, 0.0)]
    assert curve(past(RUN, said), "eval/version") == [(0, 0.0), (2, 2.0)]


def test_a_change_of_state_stands_at_the_last_step_committed_by_then_also_where_the_topics_overtook_each_other() -> (
    None
):
    said = heard(word("running"), step(1, 1), step(2, 2), word("paused"), step(3, 3), word("running"), word("running"))
    control = [one for one in said if isinstance(one.message, RunStatus)]
    steps = [one for one in said if one not in control]
    for order in (said, [*control, *steps], [*steps, *control]):
        assert curve(past(RUN, order), "run/state") == [(0, 1.0), (2, 2.0), (3, 1.0)]


def test_what_is_said_twice_counts_when_it_was_said_first() -> None:
    said = heard(step(1, 1), evaluated("e", 1), step(1, 1, loss=9.0), evaluated("e", 1, 0.9))
    told = past(RUN, said)
    assert (curve(told, "train/loss"), curve(told, "eval/pass_at_1")) == ([(1, 1.0)], [(1, 0.5)])
    assert {row.at for row in told.rows} == {1000.0, 1001.0}


def test_what_is_said_of_other_runs_is_passed_over() -> None:
    assert past("r-other", life(1, 40)) == Past([], RunState.announced, {}, {})


@given(st.integers(0, 10_000), st.integers(0, 60), st.integers(0, 10_000))
def test_each_step_has_one_value_and_the_order_among_the_topics_changes_nothing(
    seed: int, length: int, mixed: int
) -> None:
    said = life(seed, length)
    told = past(RUN, said)
    assert past(RUN, overtaking(said, mixed)).rows == told.rows
    steps = [row.step for row in told.rows if row.kind is Kind.train]
    assert steps == list(range(1, len(steps) + 1))
    assert len({row.mark for row in told.rows}) == len(told.rows)


def test_every_state_has_a_number_of_its_own() -> None:
    assert STATE_NUMBERS == {"announced": 0, "running": 1, "paused": 2, "stopping": 3, "finished": 4}
    assert set(STATE_NUMBERS) == set(RunState)


def test_a_configuration_is_flat_with_the_keys_of_references_and_without_what_is_none() -> None:
    config = {
        "run": "r",
        "base": {"key": "checkpoints/b", "size": 3, "checksum": "c"},
        "train": {"kl": 0.1, "mtp": True, "betas": [0.9, 0.95], "credit": {"per": "turn"}},
        "eval_pack": None,
    }
    assert flat(config) == {
        "run": "r",
        "base": "checkpoints/b",
        "train.kl": 0.1,
        "train.mtp": True,
        "train.betas": "[0.9, 0.95]",
        "train.credit.per": "turn",
    }
