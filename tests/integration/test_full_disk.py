"""A disk that runs full under an embedded store: a clear error, no damage, and work again when there is space."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.small_disk import STORES

IN_A_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.mark.parametrize("store", list(STORES))
def test_a_full_disk_is_said_damages_nothing_and_is_got_over(store: str, tmp_path: Path) -> None:
    probe = subprocess.run([*IN_A_NAMESPACE, "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True)
    if probe.returncode:
        pytest.skip(f"this machine lets nobody mount a small disk: {probe.stderr.decode().strip()}")
    done = subprocess.run(
        [*IN_A_NAMESPACE, sys.executable, "-m", "tests.integration.small_disk", store, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
