"""What the services themselves record of an attempt: rollout and reward with its graders, in one process."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared import telemetry_spans as spans
from shared.contracts import topics
from shared.contracts.tracing import TRACE_HEADER, trace_id
from shared.telemetry_otel import Tracing
from tests.integration import reward_platform, rollout_platform


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    memory = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(memory), service="test", name="test", share=1.0, bus="sqlite")
    monkeypatch.setattr(spans, "_tracing", tracing)
    return memory


@pytest.fixture
def _sandboxes() -> Iterator[None]:
    yield
    reward_platform.FUNCTIONS.close_sync()


def tree(found: list[ReadableSpan], attempt: str) -> dict[str, list[str]]:
    """Of the attempt's trace: each span's name -> the names of those below it. "": below none of them."""
    own = [span for span in found if span.context and f"{span.context.trace_id:032x}" == trace_id(attempt)]
    names = {span.context.span_id: span.name for span in own if span.context}
    below: dict[str, list[str]] = {}
    for span in sorted(own, key=lambda span: span.start_time or 0):
        below.setdefault(names.get(span.parent.span_id, "") if span.parent else "", []).append(span.name)
    return below


def test_an_attempt_at_a_worker(memory: InMemorySpanExporter, tmp_path: Path) -> None:
    rollout_platform.make_checkpoint(tmp_path / "checkpoint")

    async def scenario() -> str:
        async with rollout_platform.platform(tmp_path, tmp_path / "checkpoint") as p:
            async with rollout_platform.Engine(p.repairs, serial=3).running() as engine, p.worker():
                await p.announce(engine)
                key = await p.ask(p.request())
                await p.heard(topics.ROLLOUTS_FINISHED, 1)
                return key.attempt

    attempt = asyncio.run(scenario())
    found = list(memory.get_finished_spans())
    below = tree(found, attempt)
    assert below[""] == ["send rollouts.requested"]
    assert sorted(below["send rollouts.requested"]) == ["attempt", "process rollouts.requested"]
    work = ["claim", "generate", "visible tests", "generate", "store trajectory", "send rollouts.finished"]
    assert below["attempt"] == work
    assert below["claim"] == ["send attempts.progress"]
    generate = next(span for span in found if span.name == "generate")
    assert generate.attributes is not None
    assert generate.attributes["etude.replica"] == "engine"
    assert generate.attributes["etude.tokens"] > 0


def test_an_engine_is_told_what_its_work_belongs_to(memory: InMemorySpanExporter, tmp_path: Path) -> None:
    rollout_platform.make_checkpoint(tmp_path / "checkpoint")
    heard: list[str] = []

    class Engine(rollout_platform.Engine):
        async def generate(self, request):
            heard.append(request.headers.get(TRACE_HEADER, ""))
            return await super().generate(request)

    async def scenario() -> None:
        async with rollout_platform.platform(tmp_path, tmp_path / "checkpoint") as p:
            async with Engine(p.repairs).running() as engine, p.worker():
                await p.announce(engine)
                await p.ask(p.request())
                await p.heard(topics.ROLLOUTS_FINISHED, 1)

    asyncio.run(scenario())
    generations = [span.context for span in memory.get_finished_spans() if span.name == "generate" and span.context]
    assert heard == [spans.Place(context.trace_id, context.span_id).header for context in generations]


@pytest.mark.skipif(not shutil.which("bwrap"), reason="bwrap is not installed")
@pytest.mark.usefixtures("_sandboxes")
def test_an_attempt_is_graded(memory: InMemorySpanExporter, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with reward_platform.platform(tmp_path) as p, p.service():
            await p.announce()
            async with p.grader_here():
                await p.finish("a-1", reward_platform.RIGHT)
                await p.finish("a-2", reward_platform.WRONG)
                await p.outcome("a-1")
                await p.outcome("a-2")
                await p.until_acknowledged()

    asyncio.run(scenario())
    for attempt in ("a-1", "a-2"):
        below = tree(list(memory.get_finished_spans()), attempt)
        assert sorted(below["send rollouts.finished"]) == ["grade", "process rollouts.finished"]
        assert below["grade"] == ["hidden tests", "send rollouts.scored"]
