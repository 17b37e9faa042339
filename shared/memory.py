"""How much memory is free: on this machine, or in the container that this runs in where that has less.

Standard library only, and nothing newer than Python 3.9: set-up asks on whatever Python is there.
"""

from __future__ import annotations

from pathlib import Path

MEMINFO, CGROUPS = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# A container's limit: folder, what it may hold, what it holds, and what of that are cached files, which give way. Version 2,
# then 1.
_LIMITS = (
    ("", ("memory.max", "memory.current", ("inactive_file", "active_file"))),
    ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))),
)


def free_bytes(meminfo: Path = MEMINFO, cgroups: Path = CGROUPS) -> int | None:
    """None: nobody says."""
    limits = (_container(cgroups / folder, *names) for folder, names in _LIMITS)
    found = (_field(meminfo, "MemAvailable:", 2**10), *limits)
    return min((free for free in found if free is not None), default=None)


def _container(folder: Path, limit: str, used: str, cached: tuple[str, ...]) -> int | None:
    """None: there is no limit."""
    try:
        most = int((folder / limit).read_text())
        holds = int((folder / used).read_text())
    except (OSError, ValueError):  # "max" is no number
        return None
    return max(0, most - holds + sum(_field(folder / "memory.stat", name, 1) or 0 for name in cached))


def _field(path: Path, name: str, unit: int) -> int | None:
    try:
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[0] == name:
                return int(words[1]) * unit
    except (OSError, ValueError):
        pass
    return None
