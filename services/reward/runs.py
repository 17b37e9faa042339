"""Reward configurations and packs of runs, as `runs.control` announces them. Looked up by id: no group mixes two."""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from services.reward import score
from shared.contracts.messages import RolloutFinished, RunControl
from shared.contracts.run import Ref, RewardConfig, RunConfig
from shared.objects import ObjectMissing, Objects

log = structlog.get_logger()


class UnusableConfig(ValueError):
    """The reward configuration exists and cannot be applied; the text says which field and what is allowed."""


class Runs:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._configs: dict[str, list[RunConfig]] = {}  # in the order in which they were announced
        self._read: set[str] = set()  # checksums

    async def control(self, message: RunControl) -> None:
        if message.config is not None:  # kept when the run is finished: it may be resumed without one
            await self._add(message.run, message.config)

    async def reward(self, run: str, config_id: str) -> RewardConfig | None:
        """None: not announced yet. Raises UnusableConfig."""
        for config in await self._of(run):
            if config.reward.id == config_id:
                try:
                    score.check(config.reward)
                except ValueError as error:
                    raise UnusableConfig(f"reward configuration {config_id!r} of {run}: {error}") from None
                return config.reward
        return None

    async def pack(self, message: RolloutFinished) -> Ref | None:
        """The public part that belongs to the hidden part that the message names; None: unknown."""
        if message.pack is not None:
            return message.pack
        for config in await self._of(message.run):
            if config.pack_hidden == message.pack_hidden:
                return config.pack
            if config.eval_pack_hidden == message.pack_hidden:
                return config.eval_pack
        return None

    async def _of(self, run: str) -> list[RunConfig]:
        """Announced or, for a run that this replica heard nothing of, stored."""
        if run not in self._configs:
            try:
                await self._add(run, await asyncio.to_thread(self._objects.head, f"runs/{run}/config.json"))
            except ObjectMissing:
                return []
        return self._configs[run]

    async def _add(self, run: str, ref: Ref) -> None:
        if ref.checksum in self._read and run in self._configs:
            return
        config = msgspec.json.decode(await asyncio.to_thread(self._objects.get, ref), type=RunConfig)
        self._read.add(ref.checksum)
        self._configs.setdefault(run, []).insert(0, config)  # should two share an id, the latest counts
