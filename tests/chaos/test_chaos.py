"""The short form of `make chaos`: every victim killed once; at night also a zombie of each kind, and the servers away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.console import Console

from tests.chaos.__main__ import arguments, strike
from tests.chaos.report import show, sound
from tests.servers import own_platform

pytestmark = pytest.mark.timeout(1800)
NIGHTLY = pytest.mark.nightly


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
    ],
    ids=["kills", "zombies", "bus-and-ledger-away", "objects-and-jobs-away"],
)
def test_a_run_that_is_struck_loses_nothing_and_goes_on(what: str, tmp_path: Path) -> None:
    console = Console(record=True, width=160)
    outcomes, report, trouble = asyncio.run(strike(arguments(what.split()), tmp_path / "state", console))
    show(outcomes, report, trouble, console)
    assert sound(outcomes, report, trouble), console.export_text()
