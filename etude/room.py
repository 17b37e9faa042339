"""What this machine has free, and whether it lets sandboxes be: asked by `etude doctor`, and by set-up before it downloads.

Standard library only, and nothing newer than Python 3.9: set-up runs on whatever Python is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

MEMORY_GIB = 4.0  # measured: nine processes of the demo hold about 3 GiB together
MEMINFO, CGROUPS = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# A container's limit: folder, what it may hold, what it holds, and what of that is a cache that gives way. Version 2, then 1.
_LIMITS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_gib(meminfo: Path = MEMINFO, cgroups: Path = CGROUPS) -> float | None:
    """Free memory of the machine, or of the container that this runs in where that has less. None: nobody says."""
    found = [
        free for free in (_machine(meminfo), *(_container(cgroups, *names) for names in _LIMITS)) if free is not None
    ]
    return min(found) / 2**30 if found else None


def _machine(meminfo: Path) -> int | None:
    return _field(meminfo, "MemAvailable:", 2**10)


def _container(cgroups: Path, folder: str, limit: str, used: str, cache: str) -> int | None:
    """None: there is no limit."""
    try:
        most = int((cgroups / folder / limit).read_text())
        holds = int((cgroups / folder / used).read_text())
    except (OSError, ValueError):  # "max" is no number
        return None
    return max(0, most - holds + (_field(cgroups / folder / "memory.stat", cache, 1) or 0))


def _field(path: Path, name: str, unit: int) -> int | None:
    try:
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[0] == name:
                return int(words[1]) * unit
    except (OSError, ValueError):
        pass
    return None


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
    """Why bubblewrap can isolate nothing here; empty where it can. The way out is NAMESPACES."""
    try:
        probe = subprocess.run(
            [bwrap, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "true"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not run: {error}"
    if probe.returncode == 0:
        return ""
    said = probe.stderr.strip().splitlines()[-1:] or [f"exit code {probe.returncode}"]
    return f"bwrap cannot make namespaces: {said[0]}"
