"""What the weight agent and the service need of an engine, whichever it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from aiohttp import web

from services.inference.wire import UpdateRequest
from shared.model import ModelConfig
from shared.settings import Told
from shared.telemetry import Health

Bits = dict[str, np.ndarray]


class CannotServe(Told):
    """A checkpoint that this engine cannot serve with these settings, or on this machine: which, what was found, what is allowed.
    What served before goes on."""


class CannotStart(CannotServe):
    """The engine did not come up with it. Nothing serves: what served before had to be ended first."""


class Live(Protocol):
    """The weights that sample. One call at a time."""

    @property
    def serial(self) -> int:
        """Of the version that samples."""

    @property
    def model(self) -> ModelConfig:
        """Its shape: that of everything which can be loaded."""

    @property
    def bits(self) -> Bits:
        """Its published tensors: what the next delta is applied to."""

    async def load(self, serial: int, bits: Bits, expected: str) -> float:
        """Returns when this version samples and was verified to hash to `expected`: the pause in seconds. Where it raises
        WeightsError, what sampled before goes on, nothing of the new version with it."""

    async def checksum(self) -> tuple[int, str]:
        """(serial, checksum) of the weights that sample, read from the engine itself. Raises WeightsError where they are
        not those of any version."""

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Shown:
    """What answers requests, and goes on while the engine of another run is started and loaded."""

    live: Live
    run: str
    directory: Path


@dataclass(frozen=True, slots=True)
class Facts:
    """What the HTTP side of an engine asks the service: what is served, another version, the live checksum,
    weights from a folder."""

    describe: Callable[[], dict[str, Any]]
    pin: Callable[[int], Awaitable[dict[str, Any]]]
    checksums: Callable[[], Awaitable[dict[str, Any]]]
    update: Callable[[UpdateRequest], Awaitable[dict[str, Any]]]


class Server(Protocol):
    """HTTP. `idle` is set while no generation is open; a draining server takes no new ones. `broken` is set, with the reason in
    `broken_by`, where the engine can go on no more and only a new process helps."""

    app: web.Application
    idle: asyncio.Event
    broken: asyncio.Event
    broken_by: str
    draining: bool


class Engine(Protocol):
    """An engine as the service wires it."""

    @property
    def server(self) -> Server: ...

    @property
    def serving(self) -> bool:
        """Whether there is something that answers requests."""

    async def start(self, directory: Path, health: Health) -> Live:
        """With the weights of a checkpoint directory, as serial 0. What served before goes on until `serve`, where there is room
        for both (`serving`); in any case where the directory is no checkpoint that can be served: raises UnknownModel,
        CannotServe. Where that is found only after what served before has ended: CannotStart."""

    def serve(self, live: Live) -> None:
        """From here on it answers requests, and nothing before it. `live`: what was started last."""

    async def close(self) -> None: ...
