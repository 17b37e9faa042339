"""`etude dlq` and `etude topics` on both adapters: what was buried is shown, and comes back once, byte for byte."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from etude import letters, topics
from shared import bus as buses
from shared.bus import kafka_cluster
from shared.contracts import topics as t
from shared.contracts.codec import Raw
from shared.contracts.messages import Alert
from shared.settings import ServiceSettings
from tests.patience import eventually, patient, quiet
from tests.servers import own_platform
from tests.topic_settings import change

pytestmark = pytest.mark.usefixtures("platform_stores")
BAD = Raw(b'{"type":"Alert","run":1,"text":"\xe2\x80\xae\x7f"}', {"schema": "alerts/1.0", "traceparent": "00-ab-cd-01"})


def dlq(state: Path, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(letters.app, [*arguments, "--state", str(state)], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def read(state: Path, count: int, group: str, *sent: Raw) -> list[Alert]:
    """Publishes `sent`, then returns the next readable messages of a group of `alerts`."""

    async def go() -> list[Alert]:
        bus = buses.connect(ServiceSettings(state=state).bus_url, client="test")
        try:
            for raw in sent:
                await bus.publish(letters.as_raw(t.ALERTS), "key", raw)
            deliveries = bus.deliveries([t.ALERTS], group, 10)
            got = []
            async with asyncio.timeout(patient(60)):
                for _ in range(count):
                    got.append(await anext(deliveries))
                    got[-1].done()

            async def none_left() -> bool:  # buried ones count when durable
                return await bus.lag([t.ALERTS], group) == {"alerts": 0}

            await eventually(none_left, "all alerts to be acknowledged", 60)
            return [delivery.message for delivery in got]
        finally:
            await bus.close()

    return asyncio.run(go())


def good(what: str) -> Raw:
    return Raw(
        f'{{"type":"Alert","run":"r","name":"n","severity":"info","what":"{what}"}}'.encode(), {"schema": "alerts/1.0"}
    )


def test_a_buried_message_is_listed_shown_and_put_back_once(tmp_path: Path) -> None:
    assert dlq(tmp_path, "list") == (0, "No dead letters.\n")
    assert [a.what for a in read(tmp_path, 1, "g", BAD, good("one"))] == ["one"]
    code, text = dlq(tmp_path, "list")
    assert code == 0
    assert re.search(r"alerts\W+1\W+1\W", text)
    code, text = dlq(tmp_path, "show", "alerts")
    assert code == 0
    place = text.split()[0]
    for part in ("key key", "Expected `str`, got `int`", "alerts/", "traceparent", "⟨U+202E⟩⟨DEL⟩", '"run":1'):
        assert part in text
    assert dlq(tmp_path, "replay", "alerts") == (0, "alerts: 1 put back.\n")
    assert dlq(tmp_path, "replay", "alerts") == (0, "alerts: 0 put back.\n")
    assert [a.what for a in read(tmp_path, 1, "g", good("two"))] == ["two"]  # what came back is bad still: buried again
    assert dlq(tmp_path, "replay", "alerts", "--offset", place) == (0, "alerts: 1 put back.\n")
    assert dlq(tmp_path, "replay", "alerts", "--offset", "99")[0] == 1

    async def raw() -> list[Raw]:
        bus = buses.connect(ServiceSettings(state=tmp_path).bus_url, client="test")
        try:
            deliveries = bus.deliveries([letters.as_raw(t.ALERTS)], None, 10)
            async with asyncio.timeout(patient(60)):
                return [(await anext(deliveries)).message for _ in range(5)]
        finally:
            await bus.close()

    assert asyncio.run(raw()) == [BAD, good("one"), BAD, good("two"), BAD]


def test_a_letter_that_was_cut_is_never_put_back(tmp_path: Path) -> None:
    async def bury() -> None:
        bus = buses.connect(ServiceSettings(state=tmp_path).bus_url, client="test")
        kept = Raw(BAD.data, {**BAD.headers, "dead-letter-cut": "40 bytes; headers: 9, 2000000 bytes"})
        await bus.publish(buses.dead_letters(t.ALERTS), "key", kept)
        await bus.close()

    asyncio.run(bury())
    code, text = dlq(tmp_path, "replay", "alerts")
    assert code == 0
    assert "alerts: 0 put back.\n" in text
    assert "it was cut" in text
    place = dlq(tmp_path, "show", "alerts")[1].split()[0]
    assert dlq(tmp_path, "replay", "alerts", "--offset", place)[0] == 1


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_replay_while_another_has_the_letters_ends_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    monkeypatch.setattr(letters, "OTHERS_S", 60.0 if goes_on else 4.0)

    looked, of_letters = threading.Event(), letters._next

    async def next_letter(*arguments: Any) -> Any:
        looked.set()
        return await of_letters(*arguments)

    monkeypatch.setattr(letters, "_next", next_letter)

    async def scenario() -> tuple[int, str]:
        bus = buses.connect(ServiceSettings(state=tmp_path).bus_url, client="test")
        dead = buses.dead_letters(t.ALERTS)
        try:
            for _ in range(2):
                await bus.publish(dead, "key", BAD)
            deliveries = bus.deliveries([dead], letters.REPLAYED, 10)  # as another replay does
            async with asyncio.timeout(patient(60)):
                held = [await anext(deliveries) for _ in range(2)]
                second = asyncio.create_task(asyncio.to_thread(dlq, tmp_path, "replay", "alerts"))
                if goes_on:
                    await eventually(looked.is_set, "the second replay to look for letters that are left", 60)
                    await quiet(1.0, "the second replay ends while another holds the letters")
                    assert not second.done()
                    for letter in held:
                        letter.done()
                return await second
        finally:
            await bus.close()

    code, text = asyncio.run(scenario())
    if goes_on:
        assert (code, "alerts: 0 put back.\n" in text, "another replay put the rest back" in text) == (0, True, True)
    else:
        assert (code, "2 letters are left" in text) == (1, True)


def test_an_unknown_topic_is_answered_with_those_that_there_are(tmp_path: Path) -> None:
    code, text = dlq(tmp_path, "show", "alert")
    assert code == 2
    assert "alerts" in text


def insync(state: Path, value: str) -> str:
    """Sets `min.insync.replicas` of `alerts`; returns what it was."""
    return change(ServiceSettings(state=state).bus_url, "alerts", {"min.insync.replicas": value})["min.insync.replicas"]


def test_topics_are_compared_with_their_declaration_and_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: str) -> tuple[int, str]:
        done = CliRunner().invoke(topics.app, [command, "--state", str(tmp_path)], env={"COLUMNS": "200"})
        return done.exit_code, done.output

    if ServiceSettings(state=tmp_path).bus_url.startswith("sqlite"):
        assert run("check")[0] == 0
        return
    code, text = run("check")
    assert code == 1
    assert text.count("missing") == len(topics.wanted())
    code, text = run("apply")
    assert code == 0, text
    assert run("check") == (0, f"{len(topics.wanted())} topics are as declared.\n")
    assert insync(tmp_path, "1") == "1"  # as many as there are copies: the tests' Kafka is alone
    insync(tmp_path, "2")
    code, text = run("check")
    assert code == 1
    assert "min.insync.replicas 2, declared 1" in text
    assert "min.insync.replicas set of 1 topics." in run("apply")[1]
    assert run("check")[0] == 0
    url = ServiceSettings(state=tmp_path).bus_url
    with monkeypatch.context() as patch:
        patch.setenv("ETUDE_BUS", f"{url}?replication=2")
        code, text = run("check")
    assert code == 1
    assert "1 replicas, declared 2" in text
    odd = t.Topic("alerts", (Alert,), partitions=3, retention_h=1)
    monkeypatch.setitem(t.TOPICS, "alerts", odd)
    code, text = run("check")
    assert code == 1
    assert "1 partitions, declared 3" in text
    assert "retention.ms" in text


@pytest.mark.parametrize("platform_stores", ["servers"], indirect=True)
def test_without_the_right_password_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_cluster, "FIRST_CONTACT_MS", int(patient(1_500)))
    with own_platform() as found:
        server = found["ETUDE_BUS"].partition("@")[2]
        monkeypatch.setenv("ETUDE_BUS", f"kafka://etude:wrong@{server}")
        done = CliRunner().invoke(topics.app, ["check", "--state", str(tmp_path)])
    assert done.exit_code == 1
    assert "ETUDE_BUS" in done.output
    assert "user 'etude'" in done.output  # it says no, or hangs up before that was read
    assert "wrong" not in done.output
