"""When nothing happens: who waits on what is told before the services are gone, and a pause is no stall."""

from __future__ import annotations

import asyncio
import io
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from etude import status as status_command
from etude.demo import conduct
from etude.demo.conduct import Conductor, NoVerdict, Patience, Stalled, TurnedDown, explained, waits
from etude.demo.options import DemoOptions
from etude.demo.prepare import configure
from etude.demo.progress import Progress
from etude.demo.run import Demo
from etude.demo.watch import Practice, say_error
from etude.supervisor import ServiceSpec, Supervisor
from shared import bus as buses
from shared import objects as stores
from shared.bus import Bus
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.run import Purpose, Ref, Sampling
from shared.objects import Objects
from shared.problems import pack as packs
from shared.settings import ServiceSettings
from shared.telemetry import Health
from tests.patience import eventually, patient
from tests.ruling import status

NOW = 1000.0
REF = Ref(key="x", size=1, checksum="0" * 32)


def word(state: str, **more: Any) -> m.RunStatus:
    return status("r", state, **more)


def requested() -> m.RolloutRequested:
    return m.RolloutRequested(
        run="r",
        key=m.AttemptKey(attempt="a", epoch=0, group="g", problem="p", purpose=Purpose.train),
        policy_floor=0,
        reward_config="default",
        sampling=Sampling(),
        pack=REF,
        pack_hidden=REF,
    )


def seen(*messages: tuple[float, m.RunStatus | m.RolloutRequested]) -> Progress:
    progress = Progress()
    for at, message in messages:
        one = msgspec.structs.replace(message, since=at) if isinstance(message, m.RunStatus) else message
        progress.see(one, at)
    return progress


def test_an_evaluation_without_a_verdict_is_told_and_asked_for_anew(tmp_path: Path) -> None:
    settings = ServiceSettings(state=tmp_path)
    config = configure("r", DemoOptions(), REF, (REF, REF), (REF, REF), REF)

    async def evaluator(bus: Bus, objects: Objects, answers: list[dict[str, float]]) -> None:
        requests = bus.deliveries([t.EVALS_REQUESTED], "evaluator", 1)
        for figures in answers:
            delivery = await anext(requests)
            report = objects.put(f"evals/{delivery.message.eval}.json", json.dumps({"figures": figures}).encode())
            ended = m.EvalFinished(run="r", eval=delivery.message.eval, serial=0, report=report, figures=figures)
            await bus.publish(t.EVALS_FINISHED, "r", ended)
            delivery.done()

    async def scenario() -> None:
        bus, objects = buses.connect(settings.bus_url, client="test"), stores.connect(settings.objects_url)
        nothing = {"infrastructure_errors": 18.0, "attempts": 0.0}
        little = {"infrastructure_errors": 2.0, "attempts": 16.0, "pass_at_1": 1.0}
        half = {"infrastructure_errors": 1.0, "attempts": 19.0, "pass_at_1": 0.5}
        answering = asyncio.create_task(evaluator(bus, objects, [nothing, little, half]))
        async with Conductor(bus, objects, "r") as conductor:
            for lost in (18, 2):
                with pytest.raises(NoVerdict, match=f"version 0 came to no verdict: {lost} of 18 attempts were lost"):
                    await conductor.evaluate("before", 0, config, problems=1, samples=1)
            for _ in range(2):  # the second time it is known
                assert (await conductor.evaluate("before", 0, config, problems=1, samples=1))["figures"] == half
        await answering
        await bus.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


async def _said(bus: Bus, state: str) -> None:
    await bus.publish(t.RUNS_STATE, "r", word(state, by="alice", reason="lunch"))


def test_a_paused_run_is_waited_for_and_stalls_only_after_it_goes_on(tmp_path: Path) -> None:
    patience = Patience(give_up_s=0.5)

    async def scenario() -> None:
        settings = ServiceSettings(state=tmp_path)
        bus, objects = buses.connect(settings.bus_url, client="test"), stores.connect(settings.objects_url)
        async with Conductor(bus, objects, "r", patience) as conductor:
            await _said(bus, "paused")
            await eventually(lambda: conductor.progress.paused, "the pause")
            end = asyncio.create_task(conductor.finished())
            await asyncio.wait({end}, timeout=6 * patience.give_up_s)
            assert not end.done()
            assert "paused by alice: lunch" in Practice(conductor.progress).line(NOW)
            await _said(bus, "running")
            with pytest.raises(Stalled, match="waiting for the end of practice"):
                await end
            await _said(bus, "finished")
            await conductor.finished()
        await bus.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_run_that_is_sent_back_while_it_is_paused_is_still_paused() -> None:
    back = word("paused", by="alice", rollback=m.Rollback(1, "back"), number=2**50)
    assert seen((NOW, word("paused", by="alice")), (NOW, back)).paused
    assert not seen((NOW, word("paused")), (NOW + 1, word("running"))).paused
    assert not seen((NOW, word("paused")), (NOW + 1, word("stopping"))).paused


def test_a_demo_that_is_stopped_leaves_only_when_the_scheduler_has_paused_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conduct, "PAUSED_WITHIN_S", 600.0)  # so that nothing but the answer ends it

    async def scenario() -> None:
        settings = ServiceSettings(state=tmp_path)
        bus, objects = buses.connect(settings.bus_url, client="test"), stores.connect(settings.objects_url)
        async with Conductor(bus, objects, "r") as conductor:
            await bus.publish(t.RUNS_STATE, "r", word("running"))
            leaving = asyncio.create_task(conductor.paused())
            commands = bus.deliveries([t.RUNS_COMMANDS], None, 8)
            assert (await anext(commands)).message.action == "pause"
            await asyncio.wait({leaving}, timeout=0.5)
            assert not leaving.done(), "its own command is no answer"
            await bus.publish(t.RUNS_STATE, "r", word("paused", by="etude demo"))
            await leaving
        await bus.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_run_that_the_scheduler_refuses_ends_the_waiting_with_the_reason(tmp_path: Path) -> None:
    why = m.Alert(
        run="r",
        name="configuration",
        severity="critical",
        what="c.json cannot be scheduled",
        examples=["lease_s: found 0"],
    )

    async def scenario() -> None:
        settings = ServiceSettings(state=tmp_path)
        bus, objects = buses.connect(settings.bus_url, client="test"), stores.connect(settings.objects_url)
        async with Conductor(bus, objects, "r") as conductor:
            waiting = asyncio.create_task(conductor.served(0))
            await bus.publish(t.ALERTS, "r", why)
            await bus.publish(t.RUNS_STATE, "r", word("finished"))
            with pytest.raises(TurnedDown, match=r"r has ended before its first attempt: c\.json .*; lease_s: found 0"):
                await waiting
        await bus.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_run_that_was_asked_for_attempts_was_not_refused_whatever_was_said_of_its_settings() -> None:
    alert = m.Alert(run="r", name="configuration", severity="critical", what="no", examples=[])
    progress = seen((NOW, requested()), (NOW, word("finished")))
    progress.see(alert, NOW)
    assert progress.turned_down == ""


def test_a_demo_that_goes_on_after_practice_measures_the_last_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = ServiceSettings(state=tmp_path)
        bus, objects = buses.connect(settings.bus_url, client="test"), stores.connect(settings.objects_url)
        pack = objects.put("pack", packs.write([]))
        config = configure("r", DemoOptions(), REF, (REF, REF), (pack, pack), REF)
        for serial in (0, 3):
            published = m.PolicyPublished(run="r", serial=serial, step=serial, incarnation=1, parent=-1, manifest=REF)
            await bus.publish(t.POLICIES_PUBLISHED, "r", published)
        served = m.PolicyApplied(run="r", replica="a", url="http://127.0.0.1:1", serial=3)
        await bus.publish(t.POLICIES_APPLIED, "r", served)
        demo = Demo(DemoOptions(state=tmp_path, resume=True), Console(file=io.StringIO()))
        demo.memory = {"phase": "after", "config": {"key": "x", "size": 1, "checksum": REF.checksum}}
        async with Conductor(bus, objects, "r") as conductor:
            going_on = asyncio.create_task(demo._conduct(conductor, Supervisor(tmp_path), config, objects))
            asked = await anext(bus.deliveries([t.EVALS_REQUESTED], None, 1))
            going_on.cancel()
            await asyncio.wait({going_on})
        assert (asked.message.eval, asked.message.serial) == ("after", 3)
        await bus.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_pause_of_the_demo_itself_asks_nobody_to_resume_it() -> None:
    line = Practice(seen((NOW, word("paused", by="etude demo")))).line(NOW)
    assert line == "paused by the demo itself, which resumes it when the services are ready"
    assert "`etude resume`" in Practice(seen((NOW, word("paused", by="etude pause")))).line(NOW)


def test_the_bar_of_practice_stands_still_while_the_run_is_paused() -> None:
    before = [(NOW, word("running")), (NOW, word("paused")), (NOW + 50, word("running")), (NOW + 60, requested())]
    assert Practice(seen(*before)).done(NOW + 160) == 100
    paused = [*before, (NOW + 160, word("paused")), (NOW + 161, word("paused"))]
    assert Practice(seen(*paused)).done(NOW + 500) == 100
    resumed = [*paused, (NOW + 500, word("running"))]
    assert Practice(seen(*resumed)).done(NOW + 520) == 120
    # Topics have no order among each other: who begins to listen late may hear the request last.
    assert Practice(seen(*reversed(resumed[:3]), *resumed[4:], resumed[3])).done(NOW + 520) == 120


def test_a_stall_says_what_each_service_waited_on_since_when_and_the_way_on(tmp_path: Path) -> None:
    out = io.StringIO()
    demo = Demo(DemoOptions(state=tmp_path), Console(file=out))

    async def scenario() -> None:
        async with Health("trainer", ServiceSettings(state=tmp_path, name="trainer")) as health:
            health.wait_on("groups [of r]")
            async with (
                Health("reward", ServiceSettings(state=tmp_path, name="reward")),
                explained(tmp_path, demo.stalled()),
            ):
                raise Stalled("no message for 300 s while waiting for the end of practice")

    with pytest.raises(Stalled) as stall:
        asyncio.run(scenario())
    say_error(demo.console, stall.value)
    first, trainer, ready, way_out = out.getvalue().splitlines()
    assert first == "no message for 300 s while waiting for the end of practice"
    assert trainer.startswith("  trainer waits on groups [of r] since ")
    assert trainer.endswith("(0 s)")
    assert ready == "  ready, waiting on nothing: reward"
    assert way_out == (
        f"`etude logs NAME --state {tmp_path}` shows what a service said last; "
        f"`etude demo --resume --state {tmp_path}` tries again."
    )


def test_a_service_that_comes_and_goes_is_told_although_it_waits_on_nothing() -> None:
    down = {"name": "grader", "state": "down", "waits": [], "restarts": 0}
    flapping = {"name": "trainer", "state": "ready", "waits": [], "restarts": 7}
    assert waits([down, flapping]) == "  grader is down\n  trainer is ready, started again 7 times"
    assert waits([]) == "  no service was running"


def test_the_logs_of_a_stopped_demo_are_there_to_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "logs" / "sleeper.log"
    with Supervisor(tmp_path, say=lambda _: None) as supervisor:
        supervisor.start([ServiceSpec("sleeper", "this")])
        deadline = time.monotonic() + patient(20)
        while not (log.exists() and "Zen" in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
    status_command.show_logs(tmp_path, "sleeper", follow=False, lines=40)
    assert "The Zen of Python" in capsys.readouterr().out
