"""How runs stand, from what the scheduler says on the bus."""

from __future__ import annotations

from typing import Any

from etude.acting import objection
from etude.run_list import rows
from etude.standing import Standing, Standings
from services.console.board import Board
from services.console.starting import in_the_way
from shared.contracts.life import RunState
from shared.contracts.messages import PolicyPublished, RunCommand, RunStatus
from shared.contracts.run import Ref
from tests.ruling import status

REF = Ref(key="k", size=1, checksum="c" * 32)


def word(state: str, run: str = "r-a", **more: Any) -> RunStatus:
    return status(run, state, *([REF] if state == "running" else []), **more)


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


def test_a_run_that_only_published_or_was_only_spoken_to_is_none_that_was_started() -> None:
    found = standings(published(0, 0), RunCommand(run="r-b", action="pause"))
    assert (found.runs, found.followed, found.of("r-a")) == ([], "", None)


def test_the_end_of_a_run_names_the_person_who_stopped_it_and_else_why_it_ended() -> None:
    by_ann = [word(state, reason="tea", by="ann") for state in ("running", "stopping", "finished")]
    assert one(*by_ann).why == "tea (ann)"
    over = [word(state, reason="10 minutes are over") for state in ("running", "stopping", "finished")]
    assert one(*over).why == "10 minutes are over"


def test_an_older_status_that_comes_again_changes_nothing() -> None:
    running, paused = word("running"), word("paused", by="ann")
    run = one(running, paused, running)
    assert (run.state, run.started, run.since) == (RunState.paused, running.started, paused.since)


def test_a_run_that_was_refused_is_known_and_followed_by_nobody() -> None:
    found = standings(word("running"), status("r-b", "finished", reason="no"))
    assert ([run.run for run in found.runs], found.followed) == (["r-a", "r-b"], "r-a")


def test_a_start_that_no_scheduler_has_answered_is_known() -> None:
    start = RunCommand(run="r-a", action="start", config=REF)
    assert (standings(start).starting, standings(start, word("running")).starting) == (["r-a"], [])


def test_the_step_is_that_of_the_newest_version_also_after_a_rollback() -> None:
    run = one(published(0, 0), published(1, 1), published(2, 2), word("running"), published(3, 1, incarnation=1))
    assert (run.serial, run.step, run.incarnation) == (3, 1, 1)


def test_the_run_that_is_followed_is_the_one_started_last_also_after_its_end() -> None:
    found = standings(word("running"), word("running", "r-b"), word("finished", "r-b"), word("paused"), status("r-a"))
    assert (found.followed, [run.run for run in found.unfinished]) == ("r-b", ["r-a"])
    assert "no trainer and no engine: both follow r-b" in objection(found, found.runs[0], "rollback", 1)
    assert not objection(found, found.runs[0], "stop", None)


def test_a_run_that_is_started_beside_others_takes_no_trainer_from_them_and_has_its_own() -> None:
    found = standings(word("running"), word("running", "r-b", beside=True), published(1, 1), published(1, 1, "r-b"))
    assert found.followed == "r-a"
    assert [run.beside for run in found.runs] == [False, True]
    for run in found.runs:
        assert not objection(found, run, "rollback", 1)
    assert [row["left_for"] for row in rows(found)] == ["", ""]
    board = Board(10)
    for run, beside in (("r-a", False), ("r-b", True)):
        board.apply(word("running", run, beside=beside))
    assert in_the_way(board.runs.values()).startswith("r-a is running; it would get no trainer")
    board.apply(word("finished"))
    assert in_the_way(board.runs.values()) == ""


def test_a_version_that_no_step_published_cannot_be_gone_back_to() -> None:
    found = standings(word("running"), published(0, 0), published(1, 1), published(2, 2))
    said = {n: objection(found, found.runs[0], "rollback", n) for n in (0, 2, 3)}
    assert said[2] == ""
    assert said[3] == "--to 3: no version that a step of r-a has published; published: 1 to 2"
    assert "--to 0" in said[0]
