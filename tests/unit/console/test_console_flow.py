"""The flow picture: what it says follows from what services and the bus say; hostile names stay text."""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from services.console.flow import SERVICES, WAYS, Flow, Snapshot, flow
from services.console.lag import Lags
from services.console.measures import WANTED, read, total
from services.console.neighbours import Neighbour, Wait
from services.console.picture import LINES, PLACES, draw, since
from shared.contracts import messages as m
from shared.contracts import topics as t
from tests.unit.console.conftest import HOSTILE, RUN
from tests.unit.console.serving import console


def neighbour(service: str, text: str = "", *, name: str = "", waits: tuple[Wait, ...] = ()) -> Neighbour:
    state = "waiting" if waits else "ready"
    return Neighbour(name or service, service, "http://x", 1, state, waits, read(text))


def edges(found: Flow) -> Mapping[str, object]:
    return {edge.way.what: edge for edge in found.edges}


def said(found: Flow) -> str:
    root = ElementTree.fromstring(str(draw(found)))
    return " | ".join("".join(text.itertext()) for text in root.iter("text"))


def test_a_service_that_waits_says_on_what_since_when_and_the_way_it_waits_for_stands_out():
    waits = (Wait("inference", 12.4), Wait("objects", 3.0))
    found = flow(Snapshot(1.0, (neighbour("rollout", waits=waits), neighbour("inference"))), None)
    assert "waits on inference | since 12 s" in said(found)
    assert [edge.way.what for edge in found.edges if edge.awaited] == ["tokens"]
    assert {node.service: node.state for node in found.nodes}["scheduler"] == "absent"


def test_counts_are_those_of_the_bus_and_of_the_ledger():
    scheduler = neighbour("scheduler", 'etude_scheduler_groups{run="r",state="waiting"} 5\n')
    lags = {("rollouts.requested", "rollout"): 31, ("groups.ready", "trainer"): 0}
    found = edges(flow(Snapshot(1.0, (scheduler,), lags), None))
    assert (found["rollouts.requested"].waiting, found["groups.ready"].waiting) == (31, 5)
    assert found["rollouts.finished"].waiting is None


def test_rates_and_ages_are_of_what_was_taken_between_two_looks_and_survive_a_restart():
    def worker(name: str, taken: int, age_sum: float) -> Neighbour:
        labels = 'topic="rollouts.requested",group="rollout"'
        text = (
            f'etude_bus_deliveries_total{{{labels},answer="done"}} {taken}\n'
            f"etude_bus_delivery_age_seconds_sum{{{labels}}} {age_sum}\n"
            f"etude_bus_delivery_age_seconds_count{{{labels}}} {taken}\n"
        )
        return neighbour("rollout", text, name=name)

    before = Snapshot(100.0, (worker("a", 100, 50.0), worker("b", 500, 80.0)))
    now = Snapshot(110.0, (worker("a", 110, 70.0), worker("b", 4, 8.0), worker("new", 900, 1.0)))  # b began anew
    edge = edges(flow(now, before))["rollouts.requested"]
    assert edge.per_minute == pytest.approx((10 + 4) * 6)
    assert edge.age_s == pytest.approx((20 + 8) / 14)
    assert edges(flow(now, now))["rollouts.requested"].per_minute is None


def test_what_each_service_has_in_hand_is_said():
    there = (
        neighbour("rollout", 'etude_rollout_running_attempts{run="a"} 30\netude_rollout_running_attempts{run="b"} 7\n'),
        neighbour("inference", 'etude_inference_serial{pool="rollout"} 4\n', name="i0"),
        neighbour("inference", 'etude_inference_serial{pool="rollout"} 6\nsglang:num_running_reqs 12\n', name="i1"),
        neighbour("inference", 'etude_inference_serial{pool="evaluation"} 1\n', name="i2"),
    )
    text = said(flow(Snapshot(1.0, there), None))
    for expected in ("37 attempts in hand", "version 4–6, 12 requests", "3 of 3 ready"):
        assert expected in text


def test_the_picture_knows_every_service_and_way_and_they_do_not_overlap():
    assert set(PLACES) == set(SERVICES)
    assert set(LINES) == {way.what for way in WAYS}
    assert len(set(PLACES.values())) == len(PLACES)


@given(st.text(), st.floats(0, 1e9), st.sampled_from(SERVICES))
def test_whatever_a_service_says_is_text_in_the_picture(what, seconds, service):
    found = flow(Snapshot(1.0, (neighbour(service, waits=(Wait(what + HOSTILE, seconds),)),)), None)
    root = ElementTree.fromstring(str(draw(found)))
    assert {element.tag for element in root.iter()} <= {
        "svg", "defs", "marker", "path", "g", "rect", "text", "tspan", "polyline", "title",
    }  # fmt: skip
    assert not any(name.startswith("on") or name in ("style", "href") for e in root.iter() for name in e.attrib)


@given(st.text())
def test_what_is_no_metrics_text_has_no_series(text):
    assert all(name in WANTED for name, _ in read(text))


def test_a_sum_over_nobody_is_not_known():
    assert total([], "etude_scheduler_attempts") is None
    assert total([read('etude_scheduler_groups{state="open"} NaN\n')], "etude_scheduler_groups", state="ready") is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (0.04, "0.0 s"), (9.5, "9.5 s"), (90, "90 s"), (600, "10 min"), (9000, "2.5 h")],
)
def test_durations_are_said_as_people_say_them(seconds, text):
    assert since(seconds) == text


def test_the_overview_shows_what_lies_on_the_bus_and_refreshes_with_it(world, tmp_path):
    async def scenario():
        async with console(world, tmp_path) as there:
            requests = [
                m.RolloutRequested(
                    run=RUN,
                    key=m.AttemptKey(attempt=f"a-{i}", epoch=0, group="g", problem="p"),
                    policy_floor=0,
                    reward_config="default",
                    sampling=world.config.sampling,
                    pack=world.config.pack,
                    pack_hidden=world.config.pack_hidden,
                )
                for i in range(7)
            ]
            await there.bus.publish_many([(t.ROLLOUTS_REQUESTED, r.key.attempt, r) for r in requests])
            _, _, page = await there.get("/")
            assert "rollouts.requested" in page.text
            assert "7 waiting" in page.text
            async with there.http.get(there.url + "/metrics") as answer:
                assert 'etude_bus_lag_messages{group="rollout",topic="rollouts.requested"} 7.0' in await answer.text()
            assert next(a for tag, a in page.elements if tag == "svg")["role"] == "img"
            assert not any("style" in found for _, found in page.elements)

    asyncio.run(scenario())


def test_a_bus_that_does_not_say_leaves_no_old_count_behind():
    class Silent:
        answers = True

        async def lag(self, topics, group):
            if not self.answers:
                raise OSError("away")
            return {topic.name: 3 for topic in topics}

    async def scenario():
        bus, of = Silent(), {"group": "reward", "topic": "rollouts.finished"}
        lags = Lags(lambda: bus)
        await lags.look()
        assert lags.known["rollouts.finished", "reward"] == 3
        assert REGISTRY.get_sample_value("etude_bus_lag_messages", of) == 3
        bus.answers = False
        await lags.look()
        assert lags.known == {}
        assert REGISTRY.get_sample_value("etude_bus_lag_messages", of) is None

    asyncio.run(scenario())
