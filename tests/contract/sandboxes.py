"""The adapters that the contract tests of sandboxes run against. Another one is one entry more (docs/sandboxes.md)."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shared.sandbox import connect, contract
from shared.sandbox.any_loop import AnyLoopSandboxes
from shared.sandbox.bubblewrap_sandboxes import BubblewrapSandboxes
from shared.sandbox.pool import FunctionPool
from shared.sandbox.slot import Slot
from tests import cluster, docker_engine

WORKERS = 2


@dataclass(frozen=True, slots=True)
class OfFunctions:
    """`make`: a pool of WORKERS slots. `strike`: ends every sandbox of it that waits for work, as a machine that fails would.
    `missing`: why it cannot be tried here; empty: it can."""

    make: Callable[[], FunctionPool]
    strike: Callable[[FunctionPool], None]
    missing: str = ""


@dataclass(frozen=True, slots=True)
class OfAgents:
    """Sandboxes that live on. `make`: gets a folder for their files."""

    make: Callable[[Path], contract.Sandboxes]
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
AGENTS = {
    "bubblewrap": OfAgents(lambda state: BubblewrapSandboxes(state, warm=0), NO_BWRAP),
    "bubblewrap, from any loop": OfAgents(lambda state: AnyLoopSandboxes(BubblewrapSandboxes(state, warm=0)), NO_BWRAP),
    "docker": OfAgents(lambda state: docker_engine.sandboxes()),  # it skips where no engine answers
    "kubernetes": OfAgents(lambda state: cluster.sandboxes()),  # against a server of the test: tests/cluster.py
}


def every(adapters: Mapping[str, OfFunctions] | Mapping[str, OfAgents]) -> list[Any]:
    """As parameters of a fixture."""
    return [
        pytest.param(adapter, id=name, marks=pytest.mark.skipif(bool(adapter.missing), reason=adapter.missing))
        for name, adapter in adapters.items()
    ]
