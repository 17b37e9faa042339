"""Weights from a folder on request, SGLang's `update_weights_from_disk`, for a replica that takes none from a run.

Invariants:
- Everything is read and compared before anything is loaded; the load itself is that of a version (`Live.load`): verified, and
  what sampled before goes on where it fails.
- Serials grow: what a cache holds is keyed by them.
- A replica that was given weights stands for no run from then on: they would be taken for the run's own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from pathlib import Path

import structlog

from services.inference import swap_metrics as metrics
from services.inference.live import Bits, Live
from services.inference.published import bits_of
from services.inference.weights_agent import WeightsAgent
from services.inference.wire import BadRequest, Conflict, Unavailable, UpdateRequest
from shared.model import ModelConfig, load_checkpoint
from shared.model.checkpoint import stored_tensors
from shared.model.config import UnknownModel
from shared.weights import WeightsError, checksum

LAST_SERIAL = (1 << 31) - 1  # the cache keeps one a position, in 32 bits
OF_FRESH_ONES = frozenset({"raw", "initializer_range"})  # fields of a configuration that loaded weights have no part in

log = structlog.get_logger()


class Updates:
    """One at a time."""

    def __init__(self, agent: WeightsAgent) -> None:
        self._agent = agent
        self._one = asyncio.Lock()

    async def load(self, asked: UpdateRequest) -> tuple[int, float]:
        """Returns when the folder's weights sample: their serial, and the pause in seconds. Raises BadRequest; Conflict where
        this replica's weights come from a run; Unavailable where they could not be loaded, and what served goes on."""
        async with self._one:
            agent, folder = self._agent, Path(asked.model_path)
            live = self._own()
            serial = _serial(asked.weight_version, live.serial)
            try:
                bits, digest = await asyncio.to_thread(_read, folder, live)
            except UnknownModel as error:
                raise BadRequest(f"model_path: {error}") from None
            self._own()  # a run may have begun meanwhile
            agent.following.nobody = True
            try:
                pause = await live.load(serial, bits, digest)
            except (WeightsError, OSError) as error:
                raise Unavailable(f"model_path: {error}; version {live.serial} goes on") from None
            finally:
                agent.following.nobody = live.serial > 0
                agent.look()  # a run may have begun meanwhile
            assert agent.shown is not None
            agent.shown = dataclasses.replace(agent.shown, directory=folder)
        metrics.SERIAL.labels(agent.settings.pool).set(serial)
        metrics.SWAPS.inc()
        metrics.SWAP_PAUSE.observe(pause)
        log.info("weights_given", folder=str(folder), serial=serial, checksum=digest, pause_s=round(pause, 6))
        return serial, pause

    def _own(self) -> Live:
        """What serves, of a replica that is nobody else's. Raises Conflict, Unavailable."""
        agent = self._agent
        if agent.settings.checkpoint is None:
            of = f" {agent.run_id}" if agent.run_id else ""
            raise Conflict(
                f"model_path: this replica takes its weights from the run{of} that it follows; allowed: on one that serves a "
                "checkpoint (ETUDE_CHECKPOINT)"
            )
        if agent.run_id:
            raise Conflict(
                f"model_path: run {agent.run_id} takes this replica's checkpoint for its version 0; allowed: on one that no run "
                "knows of, with a state directory and a bus of its own (ETUDE_STATE, ETUDE_BUS)"
            )
        if agent.live is None or agent.shown is None:
            raise Unavailable("no weights yet; /readyz says what is waited for")
        return agent.live


def _serial(asked: str | int | None, served: int) -> int:
    """The next one, or what was asked for. Raises BadRequest."""
    if asked is None:
        return served + 1
    if re.fullmatch(r"[0-9]{1,10}", str(asked)) and served < int(asked) <= LAST_SERIAL:
        return int(asked)
    raise BadRequest(f"weight_version: found {asked!r}; allowed: a whole number, {served + 1}..{LAST_SERIAL}")


def _read(folder: Path, live: Live) -> tuple[Bits, str]:
    """The folder's tensors in their published form, and their checksum. An MTP layer that the files lack stays the one that
    serves. Raises UnknownModel, also for another architecture. Blocking."""
    if (odd := _difference(ModelConfig.load(folder), live.model)) is not None:
        raise UnknownModel(f"{odd}, as in the model that is served", folder)
    stored, served = stored_tensors(folder), live.bits
    bits = {name: found if name in stored else served[name] for name, found in bits_of(load_checkpoint(folder)).items()}
    return bits, checksum(bits)


def _difference(found: ModelConfig, served: ModelConfig) -> str | None:
    for name in (field.name for field in dataclasses.fields(ModelConfig)):
        mine, theirs = getattr(served, name), getattr(found, name)
        if name not in OF_FRESH_ONES and mine != theirs:
            return f"config.json: {name}: found {theirs!r}; allowed: {mine!r}"
    return None
