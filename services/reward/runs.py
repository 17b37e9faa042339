"""Reward configurations and packs of runs, as `runs.state` announces them. Looked up by id: no group mixes two."""

from __future__ import annotations

import asyncio

import msgspec
import structlog

from services.reward import score
from shared.contracts.messages import RolloutFinished, RunStatus
from shared.contracts.run import Ref, RewardConfig, RunConfig
from shared.objects import ObjectDamaged, ObjectMissing, Objects

log = structlog.get_logger()


class UnusableConfig(ValueError):
    """The reward configuration exists and cannot be applied; the text says which field and what is allowed."""


class Runs:
    """What was announced is remembered at once and read when it is needed: an object store that is away, or an object that
    is damaged, at the moment of a word costs nobody the word."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        # run -> checksum -> …, in the order in which they were announced
        self._announced: dict[str, dict[str, Ref]] = {}
        self._configs: dict[str, RunConfig] = {}  # by checksum
        self._warned: set[str] = set()  # checksums

    def hear(self, status: RunStatus) -> None:
        for config in status.configs:  # kept when the run is finished: it may be resumed
            self._announced.setdefault(status.run, {}).setdefault(config.checksum, config)

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
        """Announced or, for a run that this replica heard nothing of, stored; the latest first: should two share an id, it
        counts. Raises OSError while the store is away."""
        if run not in self._announced:
            try:
                ref = await asyncio.to_thread(self._objects.head, f"runs/{run}/config.json")
            except ObjectMissing:
                return []
            self._announced.setdefault(run, {}).setdefault(ref.checksum, ref)
        found = [await self._read(run, ref) for ref in reversed(self._announced[run].values())]
        return [config for config in found if config is not None]

    async def _read(self, run: str, ref: Ref) -> RunConfig | None:
        """None: it cannot be read as it is now, which is said once; who needs it looks again."""
        if ref.checksum not in self._configs:
            try:
                data = await asyncio.to_thread(self._objects.get, ref)
                self._configs[ref.checksum] = msgspec.json.decode(data, type=RunConfig)
            except (ObjectMissing, ObjectDamaged, msgspec.MsgspecError) as error:
                if ref.checksum not in self._warned:
                    log.warning("config_unreadable", run=run, key=ref.key, error=f"{type(error).__name__}: {error}")
                self._warned.add(ref.checksum)
                return None
        return self._configs[ref.checksum]
