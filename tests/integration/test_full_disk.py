"""A disk that runs full under a store, embedded or a server: a clear error, no damage, and work when there is space."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.small_disk import STORES
from tests.integration.small_server_disk import SERVERS, SETTING
from tests.patience import patient
from tests.servers import need

IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.mark.parametrize("store", list(STORES))
def test_a_full_disk_is_said_damages_nothing_and_is_got_over(store: str, tmp_path: Path) -> None:
    _on_a_small_disk("tests.integration.small_disk", store, tmp_path)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("server", list(SERVERS))
def test_a_server_whose_disk_is_full_loses_nothing_and_comes_back(server: str, tmp_path: Path) -> None:
    need(SETTING[server])  # the programs are here; this one is started apart
    _on_a_small_disk("tests.integration.small_server_disk", server, tmp_path)


def _on_a_small_disk(module: str, store: str, folder: Path) -> None:
    probe = subprocess.run([*IN_A_NAMESPACE, "mount", "-t", "tmpfs", "none", str(folder)], capture_output=True)
    if probe.returncode:
        pytest.skip(f"this machine lets nobody mount a small disk: {probe.stderr.decode().strip()}")
    done = subprocess.run(
        [*IN_A_NAMESPACE, sys.executable, "-m", module, store, str(folder)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=patient(600),
    )
    assert done.returncode == 0, done.stderr[-3000:]
