"""How a run stands, from the words on the bus: as on the console's page, whatever is said and in which order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.acting import ALLOWED, objection
from etude.standing import Standing, Standings
from services.console.board import Board
from services.console.control import allowed
from shared.contracts.messages import BY_SCHEDULER, PolicyPublished, RunControl
from shared.contracts.run import Ref
from shared.ledger.transitions import RunState

REF = Ref(key="k", size=1, checksum="c" * 32)
ACTIONS = ("start", "pause", "resume", "stop", "finished", "reconfigure", "rollback")


def word(action: str, run: str = "r-a", **options: Any) -> RunControl:
    config = REF if action == "start" else None
    return RunControl(run=run, action=action, config=config, **options)  # type: ignore[arg-type]


def published(serial: int, step: int, run: str = "r-a", incarnation: int = 0) -> PolicyPublished:
    return PolicyPublished(run=run, serial=serial, incarnation=incarnation, step=step, parent=-1, manifest=REF)


def standings(*messages: Any) -> Standings:
    """Each said a second after the one before it."""
    found = Standings()
    for second, message in enumerate(messages):
        found.hear(message, float(second))
    return found


def one(*messages: Any) -> Standing:
    run = standings(*messages).of("r-a")
    assert run is not None
    return run


@given(
    st.lists(
        st.builds(
            word,
            st.sampled_from(ACTIONS),
            reason=st.sampled_from(["", "tea"]),
            by=st.sampled_from(["ann", BY_SCHEDULER]),
            number=st.sampled_from([0, 0, 1, 2, 3]),
        ),
        max_size=12,
    )
)
def test_a_run_stands_as_on_the_consoles_page(words: list[RunControl]) -> None:
    board, found = Board(10), Standings()
    for second, said in enumerate([word("start"), *words]):
        board.apply(said, float(second))
        found.hear(said, float(second))
    run = found.of("r-a")
    assert run is not None
    assert run.state is board.runs["r-a"].state


@pytest.mark.parametrize("state", RunState)
def test_a_person_may_do_here_what_the_page_offers(state: RunState) -> None:
    assert ALLOWED.get(state, ()) == allowed(state)


def test_a_run_that_only_published_or_was_only_spoken_to_is_none_that_was_started() -> None:
    found = standings(published(0, 0), word("pause", "r-b"))
    assert (found.runs, found.followed, found.of("r-a")) == ([], "", None)


def test_the_end_of_a_run_names_the_person_who_stopped_it_and_else_why_it_ended() -> None:
    stopped = word("stop", reason="tea", by="ann"), word("stop", reason="tea", by="ann", number=1)
    assert one(word("start"), *stopped, word("finished", reason="tea", by=BY_SCHEDULER, number=2)).why == "tea (ann)"
    over = [word(a, reason="10 minutes are over", by=BY_SCHEDULER, number=n) for n, a in ((1, "stop"), (2, "finished"))]
    assert one(word("start", by="ann"), *over).why == "10 minutes are over"


def test_a_state_is_as_old_as_the_word_that_led_to_it() -> None:
    run = one(word("start"), word("pause", by="ann"), word("pause", by="ann", number=1), word("rollback"))
    assert (run.state, run.started, run.since) == (RunState.paused, 0.0, 1.0)


def test_the_step_is_that_of_the_newest_version_also_after_a_rollback() -> None:
    run = one(published(0, 0), published(1, 1), published(2, 2), word("start"), published(3, 1, incarnation=1))
    assert (run.serial, run.step, run.incarnation) == (3, 1, 1)


def test_the_run_that_is_followed_is_the_one_started_last_also_after_its_end() -> None:
    found = standings(word("start"), word("start", "r-b"), word("finished", "r-b", number=1), word("start"))
    assert (found.followed, [run.run for run in found.unfinished]) == ("r-b", ["r-a"])
    assert "no trainer and no engine: both follow r-b" in objection(found, found.runs[0], "rollback", 1)
    assert not objection(found, found.runs[0], "stop", None)


def test_a_version_that_no_step_published_cannot_be_gone_back_to() -> None:
    found = standings(word("start"), published(0, 0), published(1, 1), published(2, 2))
    said = {n: objection(found, found.runs[0], "rollback", n) for n in (0, 2, 3)}
    assert said[2] == ""
    assert said[3] == "--to 3: no version that a step of r-a has published; published: 1 to 2"
    assert "--to 0" in said[0]
