"""A run of all services on real servers, each with its own Kafka user and object key, and nothing else allowed."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import pytest

from etude.demo import DemoOptions
from etude.demo.conduct import Conductor
from etude.start import announce
from etude.supervisor import SERVICES, ServiceSpec, Supervisor
from services.scheduler.audit import audit
from shared import bus as buses
from shared import ledger
from shared import objects as stores
from shared.contracts.run import RunConfig
from shared.settings import ServiceSettings
from tests.end_to_end import problems
from tests.integration.access_world import World, log, world
from tests.patience import patient
from tests.servers import need, own_jobs, own_schema

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
WITHIN_S = 600.0
REFUSED = re.compile(r"AccessDenied|AuthorizationFailed|may neither use nor make")


def test_a_run_needs_no_more_than_each_service_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = need()
    jobs = own_jobs()
    with world(tmp_path / "keys") as made, own_schema(found["ETUDE_LEDGER"]) as records:
        for name in ("ETUDE_LEDGER", "ETUDE_JOBS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in made.keys["cli"].items():  # who starts the run is one of those with few rights
            monkeypatch.setenv(name, value)
        since = log().stat().st_size
        said = (tmp_path / "supervisor.log").open("w")
        with said, Supervisor(tmp_path / "state", say=lambda text: print(text, file=said, flush=True)) as supervisor:
            supervisor.start(ServiceSpec(name, module, own(made, name, records, jobs)) for name, module in SERVICES)
            run = asyncio.run(practise(tmp_path))
        assert audit(ledger.connect(records), run, max_staleness=2).sound
        logs = {path.name: path.read_text(errors="replace") for path in (tmp_path / "state" / "logs").iterdir()}
        assert len(logs) == len(SERVICES)
        assert not {name: REFUSED.findall(text)[:3] for name, text in logs.items() if REFUSED.search(text)}
        assert made.refused(since) == []


def own(made: World, name: str, records: str, jobs: str) -> dict[str, str]:
    """The variables of one service: no address that it does not need, and no secret of another."""
    others = {"scheduler": {"ETUDE_LEDGER": records}, "reward": {"ETUDE_JOBS": jobs}, "grader": {"ETUDE_JOBS": jobs}}
    return {"ETUDE_BUS": "", **made.keys[name], **others.get(name, {})}


async def practise(folder: Path) -> str:
    """A few steps and an evaluation; returns the run's id when it has ended."""
    problems.write(folder / "problems.jsonl", per_function=16)
    settings = ServiceSettings(state=folder / "state")
    options = DemoOptions(
        minutes=0, steps=4, groups_per_step=2, group_size=4, problems=folder / "problems.jsonl", state=settings.state
    )
    run = await announce(options, settings)
    objects = stores.connect(settings.objects_url)
    config = msgspec.json.decode(objects.get(objects.head(f"runs/{run}/config.json")), type=RunConfig)
    bus = buses.connect(settings.bus_url, client="test-cli")
    try:
        async with asyncio.timeout(patient(WITHIN_S)), Conductor(bus, objects, run) as conductor:
            await conductor.served(0)
            report = await conductor.evaluate("eval", 0, config, problems=4, samples=1)
            assert report["figures"]
            await conductor.finished()
            assert len(conductor.progress.steps) >= 4
    finally:
        await bus.close()
    return run
