"""Configurations that runs announce, in a store that is away or damaged at that moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from services.reward.runs import Runs
from shared.contracts.run import Ref, RewardConfig, RunConfig
from shared.objects import ObjectsUnavailable
from shared.objects.directory import DirectoryObjects
from tests.ruling import status

REF = Ref(key="k", size=1, checksum="0" * 32)


class SometimesAway(DirectoryObjects):
    away = False

    def get(self, ref: Ref) -> bytes:
        if self.away:
            raise ObjectsUnavailable("the store is away")
        return super().get(ref)


def put(objects: DirectoryObjects, name: str, reward: str) -> Ref:
    config = RunConfig(run="r", base=REF, pack=REF, pack_hidden=REF, reward=RewardConfig(id=reward))
    return objects.put(f"runs/r/{name}.json", msgspec.json.encode(config))


def test_a_configuration_announced_while_the_store_is_away_is_known_once_the_store_is_back(tmp_path: Path) -> None:
    """Else every attempt under a new reward would be given up until the service is started again."""
    objects = SometimesAway(tmp_path)
    first, second = put(objects, "config", "first"), put(objects, "config-2", "second")

    async def scenario() -> None:
        runs = Runs(objects)
        runs.hear(status("r", "running", first))
        assert await runs.reward("r", "first")
        objects.away = True
        runs.hear(status("r", "running", first, second))
        with pytest.raises(OSError, match="away"):
            await runs.reward("r", "second")
        objects.away = False
        assert await runs.reward("r", "second")

    asyncio.run(scenario())


def test_a_damaged_configuration_leaves_the_others_of_its_run_in_force_and_may_be_restored(tmp_path: Path) -> None:
    objects = DirectoryObjects(tmp_path)
    first, second = put(objects, "config", "first"), put(objects, "config-2", "second")
    whole = objects.get(second)
    objects.put(second.key, b"{")

    async def scenario() -> None:
        runs = Runs(objects)
        runs.hear(status("r", "running", first, second))
        assert await runs.reward("r", "first")
        assert await runs.reward("r", "second") is None
        objects.put(second.key, whole)
        assert await runs.reward("r", "second")

    asyncio.run(scenario())


def test_of_two_configurations_with_one_id_the_latest_counts(tmp_path: Path) -> None:
    objects = DirectoryObjects(tmp_path)
    config = RunConfig(run="r", base=REF, pack=REF, pack_hidden=REF, reward=RewardConfig(id="same", solved=2.0))
    first, second = put(objects, "config", "same"), objects.put("runs/r/config-2.json", msgspec.json.encode(config))

    async def scenario() -> None:
        runs = Runs(objects)
        for configs in ((first,), (first, second)):
            runs.hear(status("r", "running", *configs))
        assert await runs.reward("r", "same") == config.reward

    asyncio.run(scenario())
