"""A folder for versions that is this process's alone."""

from __future__ import annotations

import fcntl
import itertools
import shutil
import socket
from pathlib import Path
from typing import IO


class Place:
    """`folder` has the same name at every start, so that what a process left that was killed is removed by the next one.

    A replica that somebody has named has its folder by that name. Those without one, of which a machine may have several,
    take the first that nobody holds: the lock ends with its process, whatever ends it, and no child inherits it.
    """

    def __init__(self, parent: Path, name: str) -> None:
        """Blocking."""
        parent.mkdir(parents=True, exist_ok=True)
        self._lock: IO[bytes] | None = None
        self.folder = parent / name if name else self._first_free(parent)
        self.clear()

    def _first_free(self, parent: Path) -> Path:
        for i in itertools.count():
            folder = parent / f"inference-{socket.gethostname()}-{i}"
            lock = folder.with_name(f"{folder.name}.lock").open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            self._lock = lock
            return folder
        raise AssertionError("unreachable")

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def room(self) -> int:
        """Bytes that the folder can hold, what is in it now taken away."""
        held = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        return shutil.disk_usage(self.folder.parent).free + held

    def leave(self) -> None:
        """The folder goes, and another process may have its name."""
        self.clear()
        if self._lock is not None:
            self._lock.close()
            self._lock = None
