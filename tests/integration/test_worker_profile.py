"""The seccomp profile of the workers' containers, held by the kernel: a sandbox starts under it, and it allows nothing idle.

The process is what a worker's container has: no capability, no privilege to gain, not root. (A container engine is not
needed for that; what it adds, its own mounts above all, is not tried here.)
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.under_profile import library
from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]
PROFILE = ROOT / "infra" / "docker" / "seccomp-worker.json"
NEEDED = ("clone", "mount", "pivot_root", "sethostname", "umount2")

try:
    library()
except OSError:
    pytest.skip("no libseccomp.so.2 here", allow_module_level=True)
if not shutil.which("bwrap"):
    pytest.skip("no bubblewrap here", allow_module_level=True)


def under_profile(*without: str) -> str:
    unprivileged = [
        "bwrap",
        "--unshare-user",
        "--uid",
        "10001",
        "--gid",
        "10001",
        "--cap-drop",
        "ALL",
        "--dev-bind",
        "/",
        "/",
    ]
    command = [*unprivileged, sys.executable, "-m", "tests.integration.under_profile", str(PROFILE), *without]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_sandbox_starts_and_works_under_the_profile():
    assert under_profile() == "returned 42\n"


@pytest.mark.parametrize("call", NEEDED)
def test_without_any_one_of_the_calls_that_it_allows_no_sandbox_starts(call):
    assert under_profile(call).startswith("refused")
