"""A version that no replica can read is published once more, as a full base: no step is made for it, and none is repeated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic import RUN, SHAPE, group, run_config

from services.trainer import checkpoints, groups
from services.trainer.checkpoints import Superseded
from services.trainer.ranks import Options
from services.trainer.training import TrainingRun
from shared import weights
from shared.contracts.ids import policy_prefix
from shared.contracts.messages import Rollback
from shared.contracts.run import TrainConfig
from shared.objects import Objects

Open = Callable[..., TrainingRun]


@pytest.fixture
def opened(objects: Objects, tmp_path: Path) -> Open:
    """Opens the run as a fresh process would; `back`: a word that it obeys."""
    config = run_config(objects, tmp_path / "base")
    return lambda back=None: TrainingRun(
        objects, config, trainer="t", cache=tmp_path / "cache", options=Options(mtp_stride=1), back=back
    )


def step(training: TrainingRun, number: int) -> None:
    """The `number`-th step: groups 2 number and 2 number + 1."""
    objects = training.objects
    loaded = [groups.load(objects, group(objects, 2 * number + i), SHAPE, TrainConfig()) for i in (0, 1)]
    assert training.advance(loaded).committed
    if training.checkpoint_due:
        training.checkpoint()


def manifest(objects: Objects, serial: int) -> weights.Manifest:
    return weights.read_manifest(objects, objects.head(f"{policy_prefix(RUN, serial)}/manifest.json"))


def test_the_same_weights_lie_under_a_new_serial_as_a_base_and_the_next_step_builds_on_them(
    objects: Objects, opened: Open
) -> None:
    training = opened()
    step(training, 0)
    assert [training.builds_on(serial) for serial in (-1, 0, 1, 2)] == [False, True, True, False]
    lost = manifest(objects, 1)
    objects.delete(lost.parts[0].key)
    trained, state = set(training.trained), training.step
    published = training.publish_again()
    assert (published.serial, published.parent, published.step) == (2, -1, 1)
    assert weights.checksum(weights.rebuild(objects, published.manifest)) == lost.checksum
    assert (training.trained, training.step) == (trained, state)
    assert [training.builds_on(serial) for serial in (0, 1, 2)] == [
        False,
        False,
        True,
    ]  # said again, it is obeyed no more
    step(training, 1)
    assert manifest(objects, 3).parent == 2
    assert weights.rebuild(objects, objects.head(f"{policy_prefix(RUN, 3)}/manifest.json"))


def test_a_step_whose_parent_has_lost_its_manifest_publishes_a_base(objects: Objects, opened: Open) -> None:
    """Its groups may be in the trainer's hand before any replica has reported the loss."""
    training = opened()
    step(training, 0)
    objects.delete(f"{policy_prefix(RUN, 1)}/manifest.json")
    step(training, 1)
    assert (training.step, training.serial, manifest(objects, 2).parent) == (2, 2, -1)
    assert not training.builds_on(1)


def test_a_life_that_begins_obeys_no_word_about_the_versions_of_another(opened: Open) -> None:
    first = opened()
    step(first, 0)  # version 1, damaged; the trainer dies before or after it published version 2
    second = opened()
    assert [second.builds_on(serial) for serial in (0, 1)] == [False, False]
    first.check_not_superseded = lambda: None  # type: ignore[method-assign]  # it had looked before the other began
    with pytest.raises(Superseded):
        first.publish_again()


@pytest.mark.parametrize("saved", [True, False])
def test_one_goes_back_to_it_as_to_the_version_that_its_step_published(
    objects: Objects, opened: Open, saved: bool
) -> None:
    training = opened()
    step(training, 0)
    step(training, 1)
    again = training.publish_again()
    step(training, 2)
    if not saved:
        for key in list(objects.list(f"runs/{RUN}/checkpoints/")):
            objects.delete(key)
    back = opened(Rollback(again.serial, "command"))
    assert (back.step, back.trained) == (2, {"g-0", "g-1", "g-2", "g-3"})
    assert bool(checkpoints.found(objects, RUN))
