"""What an attempt needs to know of its run: configuration, chat format, routing shape, problems. Read once, remembered.

All of it comes from the object store by reference or well-known key, so that a worker can serve any run at any time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

import msgspec

from services.rollout.generation import RoutingShape
from shared.contracts.life import RunState
from shared.contracts.messages import RunStatus
from shared.contracts.run import Ref, RunConfig
from shared.contracts.statuses import Statuses
from shared.objects import Objects
from shared.problems import Problem
from shared.problems.pack import Lines
from shared.renderers import Renderer
from shared.renderers.registry import load_renderer
from shared.weights.checkpoint_objects import download_directory

PACKS = 4  # a run's pack and its evaluations': each some megabytes
RUNS = 8
SURE_AFTER_S = 30.0  # a replay of what was broadcast takes a second or two

V = TypeVar("V")
State = Literal["running", "held", "finished"]


@dataclass(frozen=True, slots=True)
class Run:
    config: RunConfig
    renderer: Renderer
    routing: RoutingShape | None


class _Remembered(Generic[V]):
    """The last few values by key; each is made once, by whoever asks first, while the others wait. A failure is not kept."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[str, asyncio.Future[V]] = OrderedDict()

    async def get(self, key: str, make: Callable[[], Awaitable[V]]) -> V:
        if (future := self._values.get(key)) is None:
            future = self._values[key] = asyncio.ensure_future(make())
            while len(self._values) > self._size:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        try:
            return await asyncio.shield(future)
        except BaseException:
            if future.done() and self._values.get(key) is future:
                del self._values[key]
            raise


class Runs:
    def __init__(self, objects: Objects, formats: Path) -> None:
        self._objects = objects
        self._formats = formats
        self._runs: _Remembered[Run] = _Remembered(RUNS)
        self._packs: _Remembered[Lines[Problem]] = _Remembered(PACKS)
        self._statuses = Statuses()
        self._finished_at: dict[str, float] = {}

    def hear(self, status: RunStatus) -> None:
        if not self._statuses.hear(status):
            return
        if status.state is RunState.finished:
            self._finished_at[status.run] = time.monotonic()

    def state(self, run: str) -> State:
        """Whether training attempts may be taken. A run that was not heard of yet is running: somebody asks for attempts.
        One that is finished counts as held for a while: a reader that has just begun hears old statuses first, and the run may
        have been resumed."""
        status = self._statuses.of(run)
        if status is None or status.state is RunState.running:
            return "running"
        sure = status.state is RunState.finished and time.monotonic() - self._finished_at[run] >= SURE_AFTER_S
        return "finished" if sure else "held"

    async def run(self, run: str) -> Run:
        """Raises what the object store raises; ObjectMissing for an unknown run."""
        return await self._runs.get(run, lambda: asyncio.to_thread(self._load, run))

    async def pack(self, pack: Ref) -> Lines[Problem]:
        """The problems of a pack by id, each read when it is asked for. Raises what the object store raises."""
        return await self._packs.get(pack.checksum, lambda: asyncio.to_thread(self._load_pack, pack))

    def _load_pack(self, pack: Ref) -> Lines[Problem]:
        return Lines(self._objects.get(pack), Problem)

    def _load(self, run: str) -> Run:
        config_ref = self._objects.head(f"runs/{run}/config.json")
        config = msgspec.json.decode(self._objects.get(config_ref), type=RunConfig)
        directory = self._formats / config.base.checksum
        download_directory(self._objects, config.base, directory, weights=False)
        model = json.loads((directory / "config.json").read_text())
        return Run(config, load_renderer(directory), RoutingShape.of(model))
