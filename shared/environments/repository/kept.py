"""What a process keeps of its cache: values in memory, and folders that can be made again on disk.

Invariants:
- A value is made once, however many threads ask for it at a time. Other values are not held up.
- A folder that anyone used in the last week is not removed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from shared.scratch import scratch

UNUSED_S = 7 * 24 * 3600.0  # longer than any run leaves a problem alone that it still practises on

T = TypeVar("T")


class Kept(Generic[T]):
    """Values by folder. When their sizes add up to more than `most`, those used least recently are dropped; one stays
    whatever its size. `size`: of one value, in the unit of `most`."""

    def __init__(self, most: int, size: Callable[[T], int]) -> None:
        self._most, self._size = most, size
        self._values: OrderedDict[Path, T] = OrderedDict()  # used most recently: last
        self._locks: dict[Path, threading.Lock] = {}
        self._order = threading.Lock()

    def get(self, folder: Path, make: Callable[[], T]) -> T:
        """Return the folder's value; make it if it is not here. Raises what `make` raises."""
        with self._locks.setdefault(folder, threading.Lock()):  # setdefault is atomic
            with self._order:
                if folder in self._values:
                    self._values.move_to_end(folder)
                    return self._values[folder]
            value = make()
            with self._order:
                self._values[folder] = value
                while len(self._values) > 1 and sum(map(self._size, self._values.values())) > self._most:
                    self._values.popitem(last=False)
            return value


def used(folder: Path) -> None:
    """Mark a folder as used now, for `sweep`."""
    with contextlib.suppress(OSError):  # of another user, or a cache that is only read
        os.utime(folder)


def sweep(parent: Path) -> None:
    """Remove the folders of `parent` that no process used for a week. Files and folders of `scratch` stay."""
    before = time.time() - UNUSED_S
    with contextlib.suppress(OSError):
        for folder in sorted(parent.iterdir()):
            with contextlib.suppress(OSError):  # gone, or not ours to remove
                if folder.is_dir() and folder.stat().st_mtime < before:
                    with scratch(parent, "sweeping-") as gone:
                        folder.rename(gone / folder.name)  # at once: nobody finds half of it
