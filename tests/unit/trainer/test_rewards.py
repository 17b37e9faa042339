"""Reward configurations as the trainer finds them: by the id that a group names."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.trainer import groups, rewards
from services.trainer.groups import Untrainable
from services.trainer.rewards import NotAnnounced, Rewards, UnknownReward
from shared import objects as stores
from shared.contracts.run import Credit, LengthPenalty, Ref, RewardConfig, RunConfig, TrainConfig
from shared.objects import Objects
from tests.unit.trainer.synthetic import SHAPE, group


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return stores.connect(f"file:{tmp_path}")


def stored(objects: Objects, number: int, reward: RewardConfig) -> Ref:
    ref = Ref(key="k", size=0, checksum="0" * 32)
    config = RunConfig(run="r", base=ref, pack=ref, pack_hidden=ref, reward=reward)
    return objects.put(f"runs/r/config-{number}.json", msgspec.json.encode(config))


def test_a_group_is_charged_by_the_reward_that_it_was_scored_under(objects: Objects) -> None:
    announced = [stored(objects, 1, RewardConfig()), stored(objects, 2, RewardConfig(id="free", length=None))]
    found = Rewards(objects, lambda: announced)
    assert found.length("default") == LengthPenalty()
    assert found.length("free") is None
    assert found.length("") is None  # an announcement of before
    announced.append(stored(objects, 3, RewardConfig(id="dear", length=LengthPenalty(weight=0.5))))  # in mid-run
    assert found.length("dear") == LengthPenalty(weight=0.5)


def test_a_reward_that_was_not_announced_is_waited_for_and_then_named(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Rewards(objects, lambda refs=[stored(objects, 1, RewardConfig())]: refs)
    with pytest.raises(NotAnnounced, match="'other' is in none of the 1 configurations"):
        found.length("other")
    monkeypatch.setattr(rewards, "PATIENCE_S", -1.0)
    with pytest.raises(UnknownReward):
        found.length("other")


def test_a_group_of_an_unknown_reward_is_set_aside_by_name(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "PATIENCE_S", -1.0)
    announced = msgspec.structs.replace(group(objects, 1, rewards=(1.0, 0.0)), reward_config="other")
    lengths = Rewards(objects, list).length
    with pytest.raises(Untrainable, match="reward configuration 'other'"):
        groups.load(objects, announced, SHAPE, TrainConfig(credit=Credit(per="turn")), lengths)
    assert groups.load(objects, announced, SHAPE, TrainConfig(), lengths).has_signal  # credit by attempt asks for none
