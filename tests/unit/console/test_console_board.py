"""The pure parts of the console: what messages add up to, charts, transcripts, hostile text."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.console import changes, transcript
from services.console.board import LISTED_RUNS, Board
from services.console.charts import POINTS, Series, line_chart
from services.console.conversation import conversation
from services.console.seen import Seen
from shared.contracts import messages as m
from shared.contracts.run import Purpose
from shared.contracts.trajectory import Segment, Submission, unpack
from tests.unit.console.conftest import HOSTILE, PROBLEM, RUN


def board_of(messages):
    board = Board(1000)
    for message in messages:
        board.apply(message)
    return board


def test_the_board_adds_up_what_the_messages_say(world):
    board = board_of(message for _, _, message in world.messages)
    run = board.runs[RUN]
    assert (run.state, run.step, run.serial, run.scored) == ("running", 3, 3, 4)
    assert {version: tally.solved for version, tally in run.tallies.items()} == {0: 0, 1: 0, 2: 1, 3: 1}
    assert board.replicas["engine-0"].serial == 3
    assert [alert.name for alert in board.alerts] == ["drift"]
    assert run.evals["before"].figures["pass_at_1"] == 0.31


def test_a_message_that_comes_twice_counts_once(world):
    messages = [message for _, _, message in world.messages]
    once, twice = board_of(messages), board_of([x for message in messages for x in (message, message)])
    assert once.runs[RUN].tallies == twice.runs[RUN].tallies
    assert once.runs[RUN].steps == twice.runs[RUN].steps


def test_scored_attempts_count_once_however_many_have_come_since(world):
    board = Board(10)
    scored = world.scored("a-0", version=0, solved=True)
    messages = [
        msgspec.structs.replace(scored, key=msgspec.structs.replace(scored.key, attempt=f"a-{i}")) for i in range(300)
    ]
    for scored in messages + messages:  # as after a broker's failure: all again from the start
        board.apply(scored)
    run = board.runs[RUN]
    assert (run.scored, run.tallies[0].attempts, run.stops["submitted"]) == (300, 300, 300)
    assert list(run.attempts) == [f"a-{i}" for i in range(290, 300)]


def test_a_life_of_an_attempt_that_is_lost_counts_once_and_its_next_life_again():
    board = Board(10)
    for attempt, epoch in (("a-1", 1), ("a-1", 1), ("a-1", 2), ("a-2", 1), ("a-1", 1)):
        key = m.AttemptKey(attempt=attempt, epoch=epoch, group="g", problem="p")
        board.apply(m.RolloutFailed(run=RUN, key=key, reason="the sandbox died", worker="w"))
    assert board.runs[RUN].failed == 3


@given(st.lists(st.text(max_size=3)))
def test_what_was_seen_is_known_as_a_set_would_know_it(names):
    seen, known = Seen(), set()
    for name in [*names, *map(str, range(200))]:  # enough that it grows
        assert seen.add(name) is (name not in known)
        known.add(name)
    assert len(seen) == len(known)


def test_a_new_incarnation_takes_the_steps_after_its_fork_away_and_a_zombies_steps_do_not_count(world):
    run = board_of(message for _, _, message in world.messages)
    run.apply(m.IncarnationStarted(run=RUN, incarnation=1, step=1, parent=0))
    assert sorted(run.runs[RUN].steps) == [1]
    run.apply(m.StepCommitted(run=RUN, incarnation=0, step=4, serial=9, groups={}))
    assert sorted(run.runs[RUN].steps) == [1]
    run.apply(m.StepCommitted(run=RUN, incarnation=1, step=2, serial=4, groups={}))
    assert sorted(run.runs[RUN].steps) == [1, 2]


def test_evaluations_do_not_count_as_training(world):
    board = board_of([world.scored("a-e", version=0, solved=True, purpose=Purpose.evaluate)])
    assert board.runs[RUN].scored == 0
    assert board.runs[RUN].tallies == {}
    assert list(board.runs[RUN].attempts) == ["a-e"]


def test_of_runs_that_practised_long_ago_the_figures_stay_and_the_attempts_go(world):
    board = Board(10)
    for run in range(LISTED_RUNS + 5):
        for attempt in range(3):
            scored = world.scored(f"a-{attempt}", version=0, solved=attempt > 0)
            board.apply(msgspec.structs.replace(scored, run=f"r-{run}"))
    board.apply(msgspec.structs.replace(world.scored("a-9", version=0, solved=True), run="r-0"))  # it goes on
    assert sum(bool(run.attempts) for run in board.runs.values()) == LISTED_RUNS
    assert (board.runs["r-1"].scored, board.runs["r-1"].attempts) == (3, {})
    assert (board.runs["r-1"].lately().attempts, board.runs["r-1"].lately().solved) == (3, 2)
    assert list(board.runs["r-0"].attempts) == ["a-9"]


def test_memory_is_bounded(world):
    board = Board(10)
    for i in range(50):
        board.apply(msgspec.structs.replace(world.scored("a-0", version=0, solved=True)))
        board.apply(m.Alert(run=RUN, name=str(i), severity="info", what="x"))
        scored = world.scored("a-0", version=0, solved=True)
        board.apply(msgspec.structs.replace(scored, key=msgspec.structs.replace(scored.key, attempt=f"x-{i}")))
    assert list(board.runs[RUN].attempts) == [f"x-{i}" for i in range(40, 50)]


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(width=32)), max_size=600).map(sorted), st.booleans())
def test_every_finite_curve_can_be_drawn_and_stays_within_its_frame(points, percent):
    drawn = str(line_chart([Series("x", points)], x_name="step", label="l", percent=percent))
    if not any(np.isfinite(y) for _, y in points):
        assert "nothing yet" in drawn
        return
    assert drawn.count("<circle") <= POINTS
    for piece in drawn.split('cx="')[1:]:
        assert -0.5 <= float(piece.split('"')[0]) <= 420.5
    for piece in drawn.split('cy="')[1:]:
        assert -0.5 <= float(piece.split('"')[0]) <= 190.5


def test_the_names_in_a_chart_are_escaped():
    drawn = str(line_chart([Series(HOSTILE, [(0, 1.0)]), Series("b", [(1, 2.0)])], x_name=HOSTILE, label=HOSTILE))
    assert "<script" not in drawn
    assert "\x1b" not in drawn
    assert "\u202e" not in drawn


def test_token_by_token_is_exactly_what_the_engine_saw(world):
    segment = unpack(world.objects.get(world.trajectory("a-0", 3))).segments[0]
    T = len(segment.tokens)
    pages = [transcript.tokens(segment, world.chat, first, 10) for first in range(0, T, 10)]
    shown = [token for page in pages for token in page]
    assert [token.id for token in shown] == segment.tokens.tolist()
    assert [token.heat >= 0 for token in shown] == segment.loss_mask.tolist()
    assert all(token.version == 3 for token in shown if token.heat >= 0)
    assert shown[0].begins == "prompt"
    assert transcript.tokens(segment, world.chat, T + 5, 10) == []


def test_without_the_chat_format_ids_are_shown(world):
    segment = unpack(world.objects.get(world.trajectory("a-0", 3))).segments[0]
    ((first, *_),) = conversation([segment], None, None)
    assert "not at hand" in first.passages[0].text.head
    assert transcript.tokens(segment, None, 0, 1)[0].text == str(segment.tokens[0])


def test_a_segment_without_spans_is_one_block(world):
    ids = np.array(world.chat.encode("x = 1"), np.int32)
    zeros = np.zeros(len(ids))
    segment = Segment(
        tokens=ids,
        loss_mask=zeros.astype(bool),
        logprobs=zeros.astype(np.float32),
        versions=zeros.astype(np.int32) - 1,
        oldest_kv_version=0,
    )
    ((block,),) = conversation([segment], world.chat, None)
    assert block.passages[0].text.head == "x = 1"


@pytest.mark.parametrize(("logprob", "heat"), [(0.0, 0), (-0.7, 1), (-1.4, 2), (-50.0, 9), (1e-5, 0)])
def test_heat_doubles_with_each_shade(logprob, heat):
    assert transcript.heat(logprob) == heat


def test_the_difference_names_changed_files_only():
    submitted = Submission(files={"a": "2\n", "b": "x\n", "c": "new\n"})
    found = changes.of(submitted, {"a": "1\n", "b": "x\n"}).files
    assert [file.path for file in found] == ["a", "c"]
    assert [line for file in found for kind, line in file.lines if kind == "add"] == ["+2", "+new"]
    assert changes.of(Submission(files=PROBLEM.files), PROBLEM.files).files == ()
