"""A backup, taken as docs/operations.md says, restored on other servers in another place: the run goes on there."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from infra.servers import debian, fleet, state
from infra.servers.postgres import FOLDERS
from shared.settings import ServiceSettings
from tests.chaos.platform import Platform, running, serving, until
from tests.servers import need

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]  # two sets of servers and two lives of a platform: six minutes
WITHIN_S = 240.0
CARRIED = ("kafka", "minio")  # as files; the ledger as a dump, and Redis not at all


def test_a_backup_restored_elsewhere_continues_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need()  # the programs are here; these are started apart
    here, there, backup = tmp_path / "here", tmp_path / "there", tmp_path / "backup"
    for folder in (here, there, backup):
        folder.mkdir(mode=0o700)
    try:
        use(here, monkeypatch)
        run, trained = asyncio.run(first_life(tmp_path / "state"))
        back_up(here, backup)
        fleet.down(here)
        restore(backup, there)
        use(there, monkeypatch)
        asyncio.run(second_life(tmp_path / "elsewhere", run, trained))
    finally:
        fleet.down(here)
        fleet.down(there)


async def first_life(folder: Path) -> tuple[str, int]:
    """The run, and how many groups it has trained when everything has drained."""
    async with running(folder, seed=1, patience_s=WITHIN_S) as platform:
        await platform.advances(platform.trained, 4, "training", WITHIN_S)
    return platform.run, platform.trained()


async def second_life(folder: Path, run: str, trained: int) -> None:
    async def named(_: ServiceSettings) -> str:
        return run

    async with serving(folder, named) as platform:
        assert platform.trained() == trained
        await until(lambda: platform.trained() >= trained + 8, "the run to go on", WITHIN_S)
        await platform.stop_run(WITHIN_S)
        assert audited(platform) == "0 lost, 0 trained twice, 0 staleness violations"


def audited(platform: Platform) -> str:
    report = platform.audit()
    assert report.sound, report.findings
    return report.summary()


def use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.up(folder=folder)
    for name, value in state.settings(folder).items():
        monkeypatch.setenv(name, value)


def back_up(servers: Path, backup: Path) -> None:
    """All that a person carries away: secrets, a dump, and the files of two servers that stand still."""
    ledger = os.environ["ETUDE_LEDGER"]
    tool("pg_dump", "--format=custom", f"--file={backup / 'etude.dump'}", ledger)
    fleet.down(servers, keep=True)
    for name in CARRIED:
        subprocess.run(["tar", "-C", servers / name, "-cf", backup / f"{name}.tar", "data"], check=True)
    subprocess.run(["cp", servers / "state.json", backup], check=True)


def restore(backup: Path, servers: Path) -> None:
    subprocess.run(["cp", backup / "state.json", servers], check=True)
    for name in CARRIED:
        (servers / name).mkdir()
        subprocess.run(["tar", "-C", servers / name, "-xf", backup / f"{name}.tar"], check=True)
    fleet.up(["postgres"], servers)
    ledger = state.settings(servers)["ETUDE_LEDGER"]
    tool("pg_restore", f"--dbname={ledger}", "--clean", "--if-exists", str(backup / "etude.dump"))


def tool(name: str, *arguments: str) -> None:
    """One of PostgreSQL's own, of the server's version."""
    path = debian.program("postgres", "postgresql", FOLDERS).parent / name
    subprocess.run([path, *arguments], check=True, env={**os.environ, **debian.libraries(path)})
