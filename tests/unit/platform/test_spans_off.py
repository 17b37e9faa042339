"""Without ETUDE_TRACES: no SDK, no span, the same messages. And what stops a start that asks for traces."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared import telemetry_spans as spans
from shared.contracts import codec, topics
from shared.contracts.messages import AttemptCancel
from shared.contracts.tracing import trace_id
from shared.settings import ServiceSettings

ROOT = Path(__file__).resolve().parents[3]
A_SERVICE = """
import asyncio, sys
from shared import bus, objects, ledger, sandbox
from shared.contracts import topics
from shared.contracts.messages import Alert
from shared.settings import ServiceSettings, load
from shared.telemetry import Health, configure_logs
import services.rollout.service, services.reward.service, services.reward.grader, services.scheduler.service

settings = load(ServiceSettings)
configure_logs("test", settings)

async def work():
    async with Health("test", settings) as health:
        messages = bus.connect(settings.bus_url, client=health.name)
        await messages.publish(topics.ALERTS, "k", Alert(run="r", name="n", severity="info", what="w"))
        (await anext(aiter(messages.deliveries([topics.ALERTS], "g", 1)))).done()
        await messages.close()

asyncio.run(work())
ours = ("opentelemetry.sdk.trace", "opentelemetry.exporter", "shared.telemetry_otel", "shared.telemetry_export")
print([name for name in sys.modules if name.startswith(ours)])  # redis looks for the SDK's metrics by itself
"""


def run(code: str, state: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "ETUDE_STATE": str(state),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **environment,
    }
    return subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)


def test_a_service_without_traces_imports_no_sdk(tmp_path: Path) -> None:
    done = run(A_SERVICE, tmp_path, ETUDE_TRACES="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("service", ["services.scheduler", "services.reward.grader"])
def test_traces_without_the_package_end_the_start_and_say_how_to_get_it(tmp_path: Path, service: str) -> None:
    lacking = "import sys, runpy; sys.modules['opentelemetry'] = None; runpy.run_module({!r}, run_name='__main__')"
    done = run(lacking.format(service), tmp_path, ETUDE_TRACES="1", ETUDE_LOGS="json")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "pip install 'etude[traces]'" in line
    assert "ETUDE_TRACES" in line


def test_the_extra_brings_what_is_imported() -> None:
    (extra,) = re.findall(r"^traces = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    names = re.findall(r'"([a-z-]+)', extra)
    pins = (ROOT / "constraints" / "linux.txt").read_text()
    assert names == ["opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"]
    assert all(re.search(rf"^{name}==", pins, re.M) for name in names)


@pytest.mark.parametrize("share", [-0.1, 1.1, "all"])
def test_a_share_is_between_none_and_all(share: object) -> None:
    with pytest.raises(ValidationError):
        ServiceSettings(traces=share)


def test_without_traces_a_span_is_nothing_and_a_message_is_as_it_is() -> None:
    message = AttemptCancel(run="r", attempt="a-1", epoch=0)
    data, headers = codec.encode(topics.ATTEMPTS_CANCEL, message)
    before = dict(headers)
    with spans.span("work", attempt="a-1") as one, spans.span_about("step", "r/0/1", links=iter(())) as another:
        one.note(tokens=3)
        with spans.sending() as sending:
            sending.message(topics.ATTEMPTS_CANCEL, "a-1", message, data, headers)
        assert spans.carry() == {}
    assert one is another is spans.NOTHING
    assert headers == before


def test_links_are_not_even_made_without_traces() -> None:
    def made() -> object:
        raise AssertionError
        yield

    with spans.span_about("step", "r/0/1", links=made()):  # type: ignore[arg-type]
        pass


def test_the_place_of_an_attempt_is_in_its_trace_and_another_one_in_each_of_its_lives() -> None:
    first, second = spans.Place.of("a-1", 0), spans.Place.of("a-1", 1)
    assert f"{first.trace:032x}" == trace_id("a-1")
    assert first.trace == second.trace
    assert first.span != second.span
    assert spans.Place.of("a-1", 0) == first


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1))
def test_a_place_is_read_back_from_its_header(trace: int, span: int) -> None:
    place = spans.Place(trace, span)
    assert spans.Place.read(place.header) == place


@given(st.text() | st.from_regex(r"0[01]-[0-9a-fA-F]{31,33}-[0-9a-f]{15,17}-0[01]", fullmatch=True))
def test_whatever_stands_in_a_header_it_is_a_place_or_none(text: str) -> None:
    place = spans.Place.read(text)
    assert place is None or (place.trace > 0 and place.span > 0 and place.header[:53] == text[:53])


@pytest.mark.parametrize(
    "header", [f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01", f"00-{'1' * 32}-{'1' * 16}-00"]
)
def test_ids_of_zero_and_what_nobody_records_are_no_place(header: str) -> None:
    assert spans.Place.read(header) is None
