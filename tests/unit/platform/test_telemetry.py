"""What machines and people are told: addresses, waits, and how old a message was when it was taken."""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.request

import pytest
from prometheus_client import REGISTRY
from pydantic import ValidationError

from services.inference import metrics as engine
from services.reward import metrics as reward
from shared import bus
from shared.contracts import topics
from shared.contracts.messages import Alert
from shared.contracts.tracing import trace_id
from shared.settings import ServiceSettings
from shared.telemetry import Health


@pytest.mark.parametrize(
    ("host", "advertise", "reachable"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("0.0.0.0", "", socket.gethostname()),
        ("::", "", socket.gethostname()),
        ("0.0.0.0", "10.1.2.3", "10.1.2.3"),
    ],
)
def test_others_are_told_an_address_that_they_can_reach(host, advertise, reachable):
    assert ServiceSettings(host=host, advertise=advertise).reachable == reachable


def test_a_setting_of_a_wrong_kind_is_refused():
    with pytest.raises(ValidationError):
        ServiceSettings(port=70000)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_what_a_service_waits_on_is_a_series_until_it_has_come(tmp_path):
    health = Health("test", ServiceSettings(state=tmp_path))
    assert value("etude_health_ready") == 1
    before = time.time()
    health.wait_on("a bus")
    health.wait_on("a bus")
    assert value("etude_health_ready") == 0
    since = value("etude_health_waiting_since_seconds", on="a bus")
    assert since is not None
    assert before <= since <= time.time()
    health.clear("a bus")
    health.clear("a bus")
    assert value("etude_health_ready") == 1
    assert value("etude_health_waiting_since_seconds", on="a bus") is None


def test_metrics_are_served(tmp_path):
    async def scrape() -> str:
        async with Health("test", ServiceSettings(state=tmp_path)) as health:
            return await asyncio.to_thread(lambda: urllib.request.urlopen(f"{health.url}/metrics").read().decode())

    text = asyncio.run(scrape())
    assert "# HELP etude_health_ready " in text


def test_who_asks_for_openmetrics_gets_the_trace_of_a_graded_attempt_and_others_the_plain_text(tmp_path):
    reward.note_graded("a-0123", 0.2)

    async def scrape(accept: str) -> tuple[str, str]:
        async with Health("test", ServiceSettings(state=tmp_path)) as health:
            request = urllib.request.Request(f"{health.url}/metrics", headers={"Accept": accept})
            answer = await asyncio.to_thread(lambda: urllib.request.urlopen(request))
            return answer.headers["Content-Type"], answer.read().decode()

    kind, text = asyncio.run(
        scrape("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1")
    )
    assert kind.startswith("application/openmetrics-text")
    assert f'# {{trace_id="{trace_id("a-0123")}"}} 0.2' in text
    assert text.endswith("# EOF\n")
    kind, text = asyncio.run(scrape("*/*"))
    assert kind.startswith("text/plain")
    assert 'etude_reward_grading_seconds_bucket{le="0.25"}' in text
    assert "trace_id" not in text
    assert "_created" not in text


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text;version=1.0.0", "application/openmetrics-text", "*/*"]
)
def test_a_metric_has_sglangs_name_in_whatever_form_it_is_asked_for(tmp_path, accept):
    engine.GENERATED_TOKENS.inc(0)

    async def scrape() -> str:
        async with Health("test", ServiceSettings(state=tmp_path)) as health:
            request = urllib.request.Request(f"{health.url}/metrics", headers={"Accept": accept})
            return await asyncio.to_thread(lambda: urllib.request.urlopen(request).read().decode())

    assert "\nsglang:generation_tokens_total " in asyncio.run(scrape())


def test_members_of_a_group_count_what_they_take_and_answer_and_readers_from_the_start_do_not(tmp_path):
    topic, group = topics.ALERTS, "counting"

    async def scenario() -> None:
        messages = bus.connect(f"sqlite:{tmp_path / 'bus.db'}", client="test")
        alert = Alert(run="r", name="n", severity="info", what="w")
        await messages.publish_many([(topic, "k", alert)] * 2)
        taken = aiter(messages.deliveries([topic], group, 4))
        (await anext(taken)).done()
        (await anext(taken)).bury("for the test")
        reader = aiter(messages.deliveries([topic], None, 4))
        (await anext(reader)).done()
        await messages.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert value("etude_bus_delivery_age_seconds_count", topic=topic.name, group=group) == 2
    assert (value("etude_bus_delivery_age_seconds_sum", topic=topic.name, group=group) or 99) < 60
    assert value("etude_bus_deliveries_total", topic=topic.name, group=group, answer="done") == 1
    assert value("etude_bus_deliveries_total", topic=topic.name, group=group, answer="buried") == 1
    assert value("etude_bus_deliveries_total", topic=topic.name, group="None", answer="done") is None
