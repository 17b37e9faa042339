"""What this machine has free, and whether it lets sandboxes be: asked by `etude doctor`, and by set-up before it downloads.

Standard library only, and nothing newer than Python 3.9: set-up runs on whatever Python is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from shared import memory, namespaces

MEMORY_GIB = 4.0  # measured: nine processes of the demo hold about 3 GiB together


def memory_gib() -> float | None:
    """Free, of the machine or of the container that this runs in. None: nobody says."""
    free = memory.free_bytes()
    return None if free is None else free / 2**30


def nearest(path: Path) -> Path:
    """It, or what there is above it."""
    path = path.resolve()
    while not os.path.exists(path):  # not Path's own, which raises where a folder above cannot be read
        path = path.parent
    return path


def may_write(folder: Path) -> bool:
    """Whether it can be written, or made."""
    there = nearest(folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def disk_gib(folder: Path) -> tuple[Path, float]:
    """The nearest folder that exists, and what is free on its disk."""
    folder = nearest(folder)
    return folder, shutil.disk_usage(folder).free / 2**30


NAMESPACES = (
    "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0), or run in a container that allows them (docs/sandboxes.md)"
)


def without_namespaces(bwrap: str) -> str:
    """Why bubblewrap can isolate nothing here, with what the system says of it; empty where it can. The way out is NAMESPACES."""
    said = _tried(bwrap)
    return f"bwrap cannot make namespaces: {said}" if said else ""


def without_proc(bwrap: str) -> str:
    """Why a sandbox can have no /proc of its own, which commands and agents need and functions do not; empty where it can."""
    return _tried(bwrap, "--proc", "/proc")


def _tried(bwrap: str, *more: str) -> str:
    """Return what bubblewrap said last, and what that means; empty: it works."""
    try:
        probe = subprocess.run(
            [bwrap, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", *more, "true"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not run: {error}"
    if probe.returncode == 0:
        return ""
    said = (probe.stderr.strip().splitlines()[-1:] or [f"exit code {probe.returncode}"])[0]
    hint = namespaces.hint(said)
    return f"{said}; {hint}" if hint else said
