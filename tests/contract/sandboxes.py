"""The adapters that the contract tests of sandboxes run against. Another one is one entry more (docs/sandboxes.md)."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from shared.sandbox import Sandboxes, connect, connect_commands
from shared.sandbox.pool import FunctionPool
from shared.sandbox.slot import Slot

WORKERS = 2


@dataclass(frozen=True, slots=True)
class OfFunctions:
    """`make`: a pool of WORKERS slots. `strike`: ends every sandbox of it that waits for work, as a machine that fails would.
    `missing`: why it cannot be tried here; empty: it can."""

    make: Callable[[], FunctionPool]
    strike: Callable[[FunctionPool], None]
    missing: str = ""


@dataclass(frozen=True, slots=True)
class OfCommands:
    make: Callable[[], Sandboxes]
    missing: str = ""


def _kill_nurseries(pool: FunctionPool) -> None:
    for slot in list(pool._idle.queue):
        assert isinstance(slot, Slot)
        if slot._nursery is not None:
            os.kill(slot._nursery.process.pid, signal.SIGKILL)


NO_BWRAP = "" if shutil.which("bwrap") else "bwrap is not installed"
FUNCTIONS = {
    "bubblewrap": OfFunctions(lambda: connect("bubblewrap", WORKERS), _kill_nurseries, NO_BWRAP),
    "process": OfFunctions(lambda: connect("process", WORKERS), _kill_nurseries),
}
COMMANDS = {"bubblewrap": OfCommands(lambda: connect_commands("bubblewrap"), NO_BWRAP)}


def every(adapters: Mapping[str, OfFunctions] | Mapping[str, OfCommands]) -> list[Any]:
    """As parameters of a fixture."""
    return [
        pytest.param(adapter, id=name, marks=pytest.mark.skipif(bool(adapter.missing), reason=adapter.missing))
        for name, adapter in adapters.items()
    ]
