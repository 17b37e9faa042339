"""What a trainer that died in the middle of a checkpoint leaves behind does not stay for ever."""

from __future__ import annotations

from pathlib import Path

import torch

from services.trainer import checkpoints
from services.trainer.checkpoints import Incarnation, Resume
from shared.contracts.ids import checkpoint_prefix
from shared.contracts.messages import StepCommitted
from shared.objects import Objects

RUN = "r-test"


def write(objects: Objects, mine: Incarnation, step: int, scratch: Path) -> None:
    committed = StepCommitted(run=RUN, incarnation=mine.incarnation, step=step, serial=step, groups={})
    checkpoints.write(objects, mine, committed, {"w": torch.zeros(2)}, set(), scratch)


def killed_between_state_and_manifest(objects: Objects, mine: Incarnation, step: int) -> None:
    objects.put(f"{checkpoint_prefix(RUN, mine.incarnation, step)}/state.safetensors", b"many bytes")


def claim(objects: Objects) -> Incarnation:
    newest = next(checkpoints.manifests(objects, RUN), None)
    return checkpoints.claim(objects, RUN, "t", Resume(newest, None, frozenset()))


def places(objects: Objects) -> set[str]:
    root = f"runs/{RUN}/checkpoints/"
    return {key.removeprefix(root).partition("/")[0] for key in objects.list(root)}


def test_half_a_checkpoint_of_a_dead_incarnation_goes_with_the_next_whole_one(objects: Objects, tmp_path: Path) -> None:
    first = claim(objects)
    write(objects, first, 2, tmp_path)
    killed_between_state_and_manifest(objects, first, 4)
    second = claim(objects)
    assert (second.incarnation, second.step) == (1, 2)
    write(objects, second, 4, tmp_path)
    assert places(objects) == {"0000-00000002", "0001-00000004"}
    assert [m.step for m in checkpoints.manifests(objects, RUN)] == [4, 2]


def test_what_is_just_being_written_is_left_alone(objects: Objects, tmp_path: Path) -> None:
    """By this incarnation or by one that has superseded it."""
    first = claim(objects)
    write(objects, first, 2, tmp_path)
    second, third = claim(objects), Incarnation(incarnation=2, parent=1, step=2, trainer="t", claimed_at=0.0)
    killed_between_state_and_manifest(objects, second, 3)
    killed_between_state_and_manifest(objects, third, 3)
    write(objects, second, 4, tmp_path)
    assert places(objects) == {"0000-00000002", "0001-00000003", "0001-00000004", "0002-00000003"}


def test_the_file_that_a_killed_trainer_was_writing_goes_with_the_next_checkpoint(
    objects: Objects, tmp_path: Path
) -> None:
    """On a disk of its own, each as large as masters and moments together."""
    room = tmp_path / "trainer"
    left = room / f"{checkpoints.ON_ITS_WAY}killed" / "state.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"many bytes")
    write(objects, claim(objects), 2, room)
    assert list(room.iterdir()) == []
