"""In which order workers take the test files: what takes long comes first, so that none is left with a long file at the end."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# Several processes of a service, or another program: seconds each. All else takes milliseconds.
_FOLDERS = {"chaos": 0, "end_to_end": 0, "integration": 1, "contract": 2}


class LongFilesFirst(LoadFileScheduling):
    """As `--dist loadfile`, which lets a file stay with one worker; but files keep the order of `by_length`."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # xdist's own order: files of many tests first, which are short here

    def remove_node(self, node: Any) -> str | None:
        """Return the test in which the worker died. It has failed: xdist would run it again, and kill worker after worker."""
        left = [(unit, test) for unit in self.assigned_work[node].values() for test, ended in unit.items() if not ended]
        if left:
            unit, test = left[0]
            unit[test] = True
        super().remove_node(node)
        return left[0][1] if left else None

    def schedule(self) -> None:
        """Give a worker that replaces a dead one two tests at least, or tell it that no more come.

        A worker runs its last test only once it has another or is told to end. xdist gives the new one a single file, and asks
        again only when a test has ended: a file of one test would wait for ever.
        """
        super().schedule()
        if self.collection is None:
            return
        for node in self.nodes:
            while node in self.registered_collections and not node.shutting_down and self._left(node) < 2:
                self._reschedule(node)

    def _left(self, node: Any) -> int:
        return self._pending_of(self.assigned_work[node])


@pytest.hookimpl(optionalhook=True)  # where xdist is not loaded nobody asks
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LongFilesFirst | None:
    return LongFilesFirst(config, log) if config.getoption("dist") == "loadfile" else None


def by_length(items: list[pytest.Item]) -> None:
    """Sort in place. The length of a file is not known: its own time limit, else its folder, stands for it."""
    limits: dict[str, float] = {}
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit = float(marker.args[0]) if marker and marker.args else 0.0
        file = file_of(item.nodeid)
        limits[file] = max(limit, limits.get(file, 0.0))
    items.sort(key=lambda item: (_rank(item.nodeid), -limits[file_of(item.nodeid)]))


def file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


def _rank(nodeid: str) -> int:
    parts = PurePath(file_of(nodeid)).parts
    return _FOLDERS.get(parts[1], 3) if len(parts) > 1 else 3


def is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ
