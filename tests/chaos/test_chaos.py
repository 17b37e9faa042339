"""The short form of `make chaos`: every victim killed once; at night also a zombie of each kind, and the servers away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.console import Console

from services.scheduler.audit import Report
from tests.chaos.__main__ import END_WITHIN_S, arguments, strike
from tests.chaos.damage import damage
from tests.chaos.platform import MODULES, running, until
from tests.chaos.report import show, sound
from tests.failures import AuditFailed
from tests.servers import own_platform

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1800)]
NIGHTLY = pytest.mark.nightly


def require_sound(report: Report | None, console: Console) -> None:
    if report is not None and not report.sound:
        raise AuditFailed(console.export_text(clear=False))


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch):
    with own_platform() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield


@pytest.mark.usefixtures("servers")
@pytest.mark.parametrize(
    "what",
    [
        "--kills 5 --every 6 --zombies 0 --outages 0",
        pytest.param("--kills 0 --zombies 3 --outages 0", marks=NIGHTLY),
        pytest.param(
            "--kills 0 --zombies 0 --outages 15 --servers kafka,postgres --modes stopped,frozen", marks=NIGHTLY
        ),
        pytest.param("--kills 0 --zombies 0 --outages 15 --servers minio,redis --modes stopped,frozen", marks=NIGHTLY),
        pytest.param("--kills 0 --zombies 0 --outages 0 --failovers postgres,redis,minio", marks=NIGHTLY),
    ],
    ids=["kills", "zombies", "bus-and-ledger-away", "objects-and-jobs-away", "failovers"],
)
def test_a_run_that_is_struck_loses_nothing_and_goes_on(what: str, tmp_path: Path) -> None:
    console = Console(record=True, width=160)
    outcomes, report, trouble = asyncio.run(strike(arguments(what.split()), tmp_path / "state", console))
    show(outcomes, report, trouble, console)
    require_sound(report, console)
    assert sound(outcomes, report, trouble), console.export_text()


def test_a_run_whose_newest_version_is_damaged_for_good_or_lost_goes_on_by_itself(tmp_path: Path) -> None:
    """On embedded adapters, with two engines."""

    async def scenario(console: Console) -> None:
        async with running(tmp_path / "state", seed=1, patience_s=300.0) as platform:
            platform.start("inference-2", MODULES["inference"])
            await until(lambda: platform.well("inference-2"), "inference-2 to be well", 120.0)
            outcomes = [await damage(platform, "flipped"), await damage(platform, "deleted")]
            await platform.stop_run(END_WITHIN_S)
            report = platform.audit()
        show(outcomes, report, "", console)
        require_sound(report, console)
        assert sound(outcomes, report), console.export_text()

    console = Console(record=True, width=160)
    asyncio.run(scenario(console))
