"""Clocks that jump: what is given again, and which words count, does not wait for them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine

from services.scheduler.clock import AHEAD_S, Clock
from services.scheduler.desk import Desk
from services.scheduler.store import Store
from shared.contracts import messages as m
from shared.contracts.statuses import Statuses
from tests.unit.scheduler.test_scheduler_intake import Room
from tests.unit.scheduler.world import RUN

HOUR = 3600.0


class Machine:
    """A machine's two clocks: the one that people set, and the one that nobody can."""

    def __init__(self) -> None:
        self.wall, self.steady = 1_700_000_000.0, 50.0

    def clock(self) -> Clock:
        return Clock(lambda: self.wall, lambda: self.steady)

    def wait(self, seconds: float) -> None:
        self.wall, self.steady = self.wall + seconds, self.steady + seconds


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(-2 * HOUR, 2 * HOUR))))
def test_time_never_goes_back_and_never_passes_more_slowly_than_it_does(moves: list[tuple[float, float]]) -> None:
    machine = Machine()
    clock = machine.clock()
    before = clock.now()
    for seconds, jump in moves:
        machine.wait(seconds)
        machine.wall += jump
        now = clock.now()
        assert now >= before
        if jump < -seconds:  # set back behind what was said last
            assert now - before >= seconds - 1e-3
        before = now


def test_a_clock_that_is_set_back_and_set_right_again_leaves_no_trace() -> None:
    machine = Machine()
    clock = machine.clock()
    before = clock.now()
    for jump in (-HOUR, HOUR):
        machine.wall += jump
        machine.wait(10)
        clock.now()
    assert abs(clock.now() - (before + 20)) < 1e-3
    assert abs(clock.now() - machine.wall) < 1e-3


def test_it_goes_on_after_what_the_ledger_holds_unless_that_cannot_be(engine: Engine) -> None:
    machine = Machine()
    room = Room(engine)
    assert Store(engine).newest() == 0.0
    for entered, starts_at in ((HOUR, HOUR), (2 * AHEAD_S, 0.0)):
        room.now = machine.wall + entered
        room.tell(m.RunCommand(run=f"r-{entered}", action="stop"))
        room.begin()
        assert Store(engine).newest() == room.now
        clock = machine.clock()
        clock.not_before(Store(engine).newest())
        assert abs(clock.now() - (machine.wall + starts_at)) < 1e-3


def test_what_a_worker_lost_is_asked_for_again_at_once_although_the_clock_was_set_back(engine: Engine) -> None:
    machine, room = Machine(), Room(engine)
    clock = machine.clock()
    room.now = clock.now()
    room.begin()
    attempt = next(iter(room.ws.attempts.values()))
    key = m.AttemptKey(attempt=attempt.id, epoch=0, group=attempt.group, problem=room.ws.open[attempt.group].problem)
    room.tell(m.AttemptClaimed(run=RUN, key=key, worker="w"))
    machine.wall -= HOUR
    room.now = clock.now()
    room.tell(m.RolloutFailed(run=RUN, key=key, reason="the sandbox died", worker="w"))
    machine.wait(2)
    room.now = clock.now()
    room.tell()
    assert [one.key.epoch for one in room.said if isinstance(one, m.RolloutRequested)] == [1]


def test_words_count_although_the_clock_was_set_back_and_the_scheduler_killed(engine: Engine) -> None:
    """Else a pause would be obeyed by the scheduler alone."""
    machine, room = Machine(), Room(engine)
    clock, reader = machine.clock(), Statuses(lambda: machine.wall)
    counted = []

    def tell(*messages: m.RunCommand) -> None:
        machine.wait(5)
        room.now = clock.now()
        room.tell(*messages)
        counted.extend(reader.hear(one) for one in room.said if isinstance(one, m.RunStatus))

    room.now = clock.now()
    room.begin()
    machine.wall -= HOUR
    for action in ("pause", "resume", "pause", "resume"):
        tell(m.RunCommand(run=RUN, action=action, by="ann"))  # type: ignore[arg-type]
    room.desk, clock = Desk(Store(engine), lambda ref: room.run_config), machine.clock()
    clock.not_before(Store(engine).newest())
    tell(m.RunCommand(run=RUN, action="pause", by="ann"))
    assert counted == [True] * 6  # the new scheduler also announces how the run stands that it found
