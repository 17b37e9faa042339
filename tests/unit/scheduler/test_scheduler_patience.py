"""How long a run waits for more problems: it knows that after a restart and after a fork as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine

from services.scheduler.desk import Desk
from services.scheduler.life import COMPLETE_S, PAUSES, exhausted_s
from services.scheduler.store import Store
from shared.contracts import messages as m
from tests.unit.scheduler.test_scheduler_intake import Room
from tests.unit.scheduler.world import REF, RUN

PAUSE_S = 900.0  # between two admissions


def restart(room: Room) -> None:
    room.desk = Desk(Store(room.engine), lambda ref: room.run_config)
    room.tell()


def fork(room: Room) -> None:
    room.tell(m.IncarnationStarted(run=RUN, incarnation=1, step=0, parent=0))


def stay(room: Room) -> None:
    room.tell()


EVENTS = pytest.mark.parametrize("happens", [stay, fork, restart])


def patience(room: Room) -> float:
    return exhausted_s(room.ws.admissions, room.ws.complete)


@EVENTS
def test_the_pauses_between_admissions_are_known(any_engine: Engine, happens: Callable[[Room], None]) -> None:
    room = Room(any_engine).begin(problems=2)
    for number in range(11):
        room.now += PAUSE_S + (number == 5)
        problems = {f"q{number}-{i}": ("debugging", "cell") for i in range(2)}
        room.tell(m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems=problems))
    admissions = room.ws.admissions
    happens(room)
    assert room.ws.admissions == admissions
    assert patience(room) == PAUSES * (PAUSE_S + 1)


@EVENTS
def test_that_no_more_problems_will_come_is_known(any_engine: Engine, happens: Callable[[Room], None]) -> None:
    """Also where the curator says so in a message of its own, without a problem."""
    room = Room(any_engine).begin(problems=2)
    room.now += PAUSE_S
    room.tell(m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems={"q": ("debugging", "cell")}))
    assert patience(room) > COMPLETE_S
    happens(room)
    assert patience(room) > COMPLETE_S
    for _ in range(2):
        room.tell(m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems={}, complete=True))
    happens(room)
    assert patience(room) == COMPLETE_S
