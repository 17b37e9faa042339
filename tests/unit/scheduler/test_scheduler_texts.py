"""Whatever text a message brings, the ledger, the workers and the console say the same of its run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from etude.standing import Standings
from services.console.board import Board
from shared import storable
from shared.contracts import codec
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.life import RunState, after
from tests.unit.scheduler.test_scheduler_intake import Room
from tests.unit.scheduler.world import REF, RUN

LONG = "".join(
    random.Random(0).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=20_000)
)  # no index takes it, compressed or not
TEXTS = st.one_of(
    st.text(st.characters(codec=None, exclude_categories=()), max_size=30),
    st.sampled_from(
        (
            "\0",
            "slow\0",
            "\\u0000",
            "\\\0",
            "\ud800",
            "\udcff\0",
            "\x1b[2J\x07",
            "\u202eabc\u2066",
            LONG,
            "\0" * 9000,
            "x" * 2**20,
        )
    ),
)
AFTER = m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems={"later": ("c", "x")})


def messages(room: Room, word: str) -> Iterator[Any]:
    """Everything that carries a text of somebody's."""
    state, ref = room.ws.head.state, msgspec.structs.replace(REF, key=word)
    if after(state, "pause") and state is RunState.running:
        yield m.RunCommand(run=RUN, action="pause", reason=word, by=word, id=word)
    yield m.RunCommand(run=RUN, action="rollback", serial=0, reason=word, by=word, id=word or "i")
    yield m.RunCommand(run=RUN, action="resume", reason=word, by=word)
    yield m.Alert(run=RUN, name=word, severity="critical", what=word, examples=[word])
    yield m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems={word: (word, word)})
    yield m.PolicyApplied(run=RUN, replica=word, url=word, serial=0, ok=False, reason=word)
    yield m.PolicyPromoted(run=RUN, serial=0, reason=word, by=word)
    yield m.GroupQuarantined(run=RUN, group=word, reason=word)
    attempt = next((a for a in room.ws.attempts.values() if a.group in room.ws.open), None)
    if attempt is not None:
        key = room.key(attempt, attempt.epoch)
        yield m.AttemptClaimed(run=RUN, key=key, worker=word)
        yield m.AttemptHeartbeat(run=RUN, worker=word, attempts={attempt.id: (0, 0), word: (0, 0)}, silent=[word])
        yield m.RolloutFailed(run=RUN, key=key, reason=word, worker=word)
        verdict = m.Verdict(solved=False, passed=0, total=1, error=word, notes=[word], failed=[word])
        yield room.scored(key, 0.0, verdict=verdict, terms={"solved": 0.0, word: 0.0}, found=[word], trajectory=ref)
    yield m.PolicyPublished(run=RUN, serial=3, incarnation=0, step=0, parent=-1, manifest=ref)
    yield m.RunStatus(run=RUN, state=state, number=1, reason=word, by=word, answers=word)
    yield m.StepCommitted(run=RUN, incarnation=0, step=1, serial=9, groups={}, metrics={word: 1.0})
    yield m.RunCommand(run=f"r-{word}", action="start", config=REF, reason=word, by=word)


def sent(message: Any) -> tuple[t.Topic, Any] | None:
    """The message as a foreign service writes it and we read it. None: no reader of ours takes it."""
    topic = next(topic for topic in t.TOPICS.values() if isinstance(message, topic.types))
    data = json.dumps(msgspec.to_builtins(message)).encode()
    try:
        return topic, codec.decode(topic, data, {codec.SCHEMA_HEADER: f"{topic.name}/1.0"})
    except codec.UnreadableMessage:
        return None


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(word=TEXTS)
def test_ledger_workers_and_console_agree_after_any_text(any_engine: Engine, word: str) -> None:
    room = Room(any_engine).begin()
    if room.ws.head.state is RunState.paused:
        room.tell(m.RunCommand(run=RUN, action="resume"))
    board, standings = Board(10), Standings()
    for message in room.said:
        board.apply(message)
        standings.hear(message, 0.0)
    for message in list(messages(room, word)):
        for form in (sent(message), ours(message)):
            if form is None:
                continue
            topic, read = form
            room.now += 1
            refused = room.tell(read)
            board.apply(read)
            standings.hear(read, 0.0)
            for status in (said for said in room.said if isinstance(said, m.RunStatus)):
                (_, heard) = ours(status) or pytest.fail("the scheduler said what nobody reads")
                board.apply(heard)
                standings.hear(heard, 0.0)
            in_ledger = dict(room.sql("select run_id, state from runs"))
            for run, one in room.desk.sets.items():
                assert in_ledger[storable.text(run)] == one.head.state, (topic.name, refused)
            for state in in_ledger.values():
                assert state in tuple(RunState)
            known = standings.of(RUN)
            if known is not None:
                assert (known.state, board.runs[RUN].state) == (in_ledger[RUN],) * 2, (topic.name, refused)
            if isinstance(read, m.RunCommand) and not refused and read.run == RUN:
                assert room.sql(f"select reason from runs where run_id = '{RUN}'")[0][0] == room.ws.head.reason
    assert room.tell(AFTER) == []
    assert "later" in room.ws.catalogue


def ours(message: Any) -> tuple[t.Topic, Any] | None:
    """The message as our own services write and read it."""
    topic = next(topic for topic in t.TOPICS.values() if isinstance(message, topic.types))
    try:
        data, headers = codec.encode(topic, message)
    except codec.MessageTooLarge:
        return None
    read = codec.decode(topic, data, headers)
    assert b"\\u0000" not in data.replace(b"\\\\", b"")
    return topic, read


@given(st.text(st.characters(codec=None, exclude_categories=())))
def test_a_storable_text_is_the_same_again_and_in_json(value: str) -> None:
    fit = storable.text(value)
    assert "\0" not in fit
    assert storable.text(fit) == fit == fit.encode().decode()
    assert msgspec.json.decode(storable.to_json({"a": [value]})) == {"a": [fit]}


def test_text_that_looks_like_an_escape_stays() -> None:
    assert msgspec.json.decode(storable.to_json("\\u0000 \\\\u0000")) == "\\u0000 \\\\u0000"
