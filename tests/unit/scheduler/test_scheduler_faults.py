"""A scheduler that stumbles goes on: over a commit that fails, a message that cannot be kept, a request that is lost."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError, OperationalError

from services.scheduler import decisions
from services.scheduler.audit import audit
from services.scheduler.desk import Desk
from services.scheduler.reconciler import PASSED_OVER_S
from services.scheduler.store import Store
from shared.contracts import codec
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.life import RunState
from shared.ledger.transitions import AttemptState, GroupState
from tests.unit.scheduler.test_scheduler_intake import Room
from tests.unit.scheduler.world import REF, RUN, World, config


@pytest.fixture
def room(engine: Engine) -> Room:
    return Room(engine).begin()


@pytest.fixture
def any_room(any_engine: Engine) -> Room:
    return Room(any_engine).begin()


class Away(Store):
    """A ledger that is away for the next `failures` commits."""

    failures = 0

    def commit(self, *arguments: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise OperationalError("COMMIT", {}, sqlite3.OperationalError("disk I/O error"))
        super().commit(*arguments)


def test_after_a_failed_commit_runs_that_no_message_mentions_are_still_decided_for(room: Room) -> None:
    store = Away(room.engine)
    room.desk = Desk(store, lambda ref: room.run_config)
    room.tell()
    store.failures = 1
    other = m.ProblemAdmitted(run="r-other", pack=REF, pack_hidden=REF, problems={"p": ("c", "x")})
    with pytest.raises(OperationalError):
        room.tell(other)
    room.tell(other)
    assert set(room.desk.sets) == {RUN, "r-other"}


# Messages that cannot be kept


def problem(name: str) -> m.ProblemAdmitted:
    return m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems={name: ("c", "x")})


@pytest.mark.parametrize(
    "bad",
    [
        m.StepCommitted(run=RUN, incarnation=0, step=1, serial=2**63, groups={}),
        m.IncarnationStarted(run=RUN, incarnation=2**70, step=0, parent=-1),
        m.PolicyApplied(run=RUN, replica="i", url="", serial=2**64),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_number_that_no_column_holds_is_buried_alone(any_room: Room, bad: Any) -> None:
    refused = any_room.tell(problem("before"), bad, problem("after"))
    assert len(refused) == 1
    assert {"before", "after"} <= set(any_room.ws.catalogue.ids)
    assert any_room.ws.head.state is RunState.running


def test_what_an_earlier_message_broke_is_not_blamed_on_the_one_that_forks(room: Room) -> None:
    fork = m.IncarnationStarted(run=RUN, incarnation=1, step=0, parent=0)
    refused = room.tell(m.StepCommitted(run=RUN, incarnation=0, step=1, serial=2**63, groups={}), fork)
    assert len(refused) == 1
    assert room.ws.head.incarnation == 1


def test_a_group_whose_announcement_is_too_large_for_the_bus_is_dropped(room: Room) -> None:
    group = next(iter(room.ws.open.values()))
    huge = m.Ref(key="k" * 40_000, size=1, checksum="c" * 32)
    *most, last = [room.scored(room.key(a), trajectory=huge) for a in group.attempts]
    assert room.tell(*most) == []
    assert room.tell(last, problem("later")) == []
    assert "later" in room.ws.catalogue
    assert (group.state, "too large" in group.reason) == (GroupState.dropped, True)


def test_so_is_one_that_a_tick_completes(room: Room) -> None:
    """All but one are scored, each small enough to be told; the last fails, and a tick closes the group."""
    group = next(iter(room.ws.open.values()))
    large = m.Ref(key="k" * 30_000, size=1, checksum="c" * 32)
    *most, last = list(group.attempts)
    assert len(most) >= 3
    for attempt in most:
        assert room.tell(room.scored(room.key(attempt), trajectory=large)) == []
    decisions._end(room.ws, last, AttemptState.failed, "lost for good", room.now)
    room.now += 2
    assert room.tell() == []
    assert group.state is GroupState.dropped
    assert "too large" in group.reason


def test_a_commit_that_fails_once_is_tried_again_before_anything_is_blamed(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the answer of an earlier commit was lost and it lands late: a key is taken, and then it is not new."""
    commit, failures = room.desk.store.commit, iter([IntegrityError("insert", {}, Exception("a key is taken"))])

    def once(*arguments: Any) -> None:
        for error in failures:
            raise error
        commit(*arguments)

    monkeypatch.setattr(room.desk.store, "commit", once)
    assert room.tell(problem("later")) == []
    assert "later" in room.ws.catalogue


def test_a_step_that_names_strange_groups_at_length_is_a_fact_all_the_same(room: Room) -> None:
    step = m.StepCommitted(run=RUN, incarnation=0, step=1, serial=1, groups={"g" * 60_000: 0})
    assert room.tell(step) == []
    assert room.sql("select step from steps") == [(1,)]
    (alert,) = [said for said in room.said if isinstance(said, m.Alert)]
    assert alert.name == "unknown_groups"


def test_no_message_is_buried_for_what_fails_without_it(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> set[str]:
        raise RuntimeError("a defect of our own")

    monkeypatch.setattr("services.scheduler.decisions.decide", broken)
    with pytest.raises(RuntimeError, match="a defect of our own"):
        room.tell(problem("later"))


@pytest.mark.parametrize("serial", [2**53 + 1, 2**63, 10**400, -1])
def test_numbers_beyond_the_bounds_are_no_messages(serial: int) -> None:
    good = m.StepCommitted(run=RUN, incarnation=0, step=1, serial=7, groups={})
    data, headers = codec.encode(t.STEPS_COMMITTED, good)
    with pytest.raises(codec.UnreadableMessage, match="serial"):
        codec.decode(t.STEPS_COMMITTED, data.replace(b'"serial":7', b'"serial":%d' % serial), headers)


def test_a_group_makes_no_move_that_the_table_does_not_have(room: Room) -> None:
    group = next(iter(room.ws.open.values()))
    with pytest.raises(ValueError, match="cannot go from open to quarantined; allowed: dropped, ready"):
        group.enter(GroupState.quarantined)


# Requests that are lost before their claim


def wait(room: Room, seconds: float) -> None:
    until = room.now + seconds
    while room.now < until:
        room.now += 2
        beat = {a.id: (a.epoch, -1) for a in room.ws.attempts.values() if a.state is AttemptState.claimed}
        room.tell(m.AttemptHeartbeat(run=RUN, worker="w", attempts=beat))


def claim_all_but(room: Room, lost: str) -> None:
    others = [a for a in room.ws.attempts.values() if a.id != lost and a.state is AttemptState.requested]
    room.now += 2
    room.tell(*[m.AttemptClaimed(run=RUN, key=room.key(a, a.epoch), worker="w") for a in others])


@pytest.fixture
def short(engine: Engine) -> Room:
    """Attempts of at most a minute, so that what is passed over for `PASSED_OVER_S` is."""
    room = Room(engine, config(group_size=2))
    room.desk = Desk(Store(engine), lambda ref: room.run_config, attempt_s=60)
    return room.begin()


def test_a_request_that_was_lost_before_its_claim_is_asked_for_again(short: Room) -> None:
    lost = short.any()
    claim_all_but(short, lost.id)
    wait(short, PASSED_OVER_S - 10)
    assert (lost.epoch, lost.state) == (0, AttemptState.requested)
    wait(short, 20)
    assert (lost.epoch, lost.state) == (1, AttemptState.requested)
    assert short.sql(f"select kind from events where subject = '{lost.id}' and epoch = 0 order by sequence") == [
        ("attempt.requested",),
        ("attempt.lost",),
    ]


def test_a_restarted_scheduler_still_knows_that_a_request_was_passed_over(short: Room) -> None:
    lost = short.any()
    claim_all_but(short, lost.id)
    short.desk = Desk(Store(short.engine), lambda ref: short.run_config, attempt_s=60)
    short.tell()
    wait(short, PASSED_OVER_S + 10)
    assert short.ws.attempts[lost.id].epoch == 1


def test_a_queue_that_moves_slowly_has_lost_nothing(short: Room) -> None:
    """One is taken up now and then: the last of them waits far longer than the limit, and is neither lost nor late."""
    queue = sorted(short.ws.attempts.values(), key=lambda a: a.id)
    for attempt in queue[:-1]:
        short.tell(m.AttemptClaimed(run=RUN, key=short.key(attempt, 0), worker="w"))
        wait(short, PASSED_OVER_S - 20)
    assert short.now > 2 * PASSED_OVER_S
    assert (queue[-1].epoch, queue[-1].state) == (0, AttemptState.requested)


def test_a_paused_run_gives_no_reason_to_ask_the_bus_for_its_lag(short: Room) -> None:
    claim_all_but(short, short.any().id)
    short.tell(m.RunCommand(run=RUN, action="pause", by="alice"))
    wait(short, 2 * PASSED_OVER_S)
    assert not short.desk.overdue(short.now)


def test_while_no_worker_takes_anything_up_a_request_waits(short: Room) -> None:
    wait(short, 3 * PASSED_OVER_S)
    assert {(a.epoch, a.state) for a in short.ws.attempts.values()} == {(0, AttemptState.requested)}


def test_while_a_run_is_paused_no_request_is_lost(short: Room) -> None:
    lost = short.any()
    claim_all_but(short, lost.id)
    short.tell(m.RunCommand(run=RUN, action="pause", by="alice"))
    wait(short, 2 * PASSED_OVER_S)
    short.tell(m.RunCommand(run=RUN, action="resume", by="alice"))
    wait(short, PASSED_OVER_S - 10)
    assert lost.epoch == 0
    wait(short, 20)
    assert lost.epoch == 1


def test_a_run_that_loses_requests_trains_to_its_end(engine: Engine) -> None:
    world = World(engine, config(max_steps=4, max_staleness=0), seed=5)
    world.desk = Desk(Store(engine), lambda ref: world.run_config, attempt_s=60)
    world.start()
    while not world.queue:
        world.now += 1
        world.schedule()
    for _ in range(4):  # a whole group: the bus forgets what nobody has claimed yet
        world.queue.pop()
    world.run_until("finished", ticks=int(4 * PASSED_OVER_S))
    assert world.step == 4
    assert audit(engine, RUN, max_staleness=0).findings == []
