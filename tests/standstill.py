"""Processes that stand still (SIGSTOP), for tests of what hangs.

The signal alone is not enough: one thread of the process takes it first and then stops the others. On a busy machine a server
goes on answering until that thread has a core.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Protocol

from tests.patience import until


class Signalled(Protocol):
    """`subprocess.Popen` and `psutil.Process` are such."""

    pid: int

    def send_signal(self, number: int, /) -> None: ...


def stand_still(process: Signalled) -> None:
    """Stop the process. No thread of it runs when this returns; a process that has ended stands still too."""
    process.send_signal(signal.SIGSTOP)
    until(lambda: _states(process.pid) <= set("TtZX"), f"process {process.pid} to stand still")


def _states(pid: int) -> set[str]:
    """Return the states of its threads, as /proc names them: T stands still."""
    found = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            found.add(stat.read_text().rpartition(")")[2].split()[0])  # the name before it may hold anything
        except (FileNotFoundError, ProcessLookupError):
            continue  # this thread has ended
    return found
