"""Back to an earlier version: said once, done once, and everything after follows as from any fork."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from synthetic import RUN, SHAPE, group, run_config

from services.trainer import checkpoints, groups, masters, rollback
from services.trainer.ranks import Options
from services.trainer.rollback import Impossible
from services.trainer.training import TrainingRun
from shared import weights
from shared.contracts.messages import IncarnationStarted, PolicyPublished, Rollback, StepCommitted
from shared.contracts.run import RunConfig, TrainConfig
from shared.objects import Objects

Open = Callable[..., TrainingRun]


@pytest.fixture
def config(objects: Objects, tmp_path: Path) -> RunConfig:
    return run_config(objects, tmp_path / "base")


@pytest.fixture
def opened(objects: Objects, config: RunConfig, tmp_path: Path) -> Open:
    """Opens the run as a fresh process would; `back`: a word that it obeys."""
    return lambda back=None: TrainingRun(
        objects, config, trainer="t", cache=tmp_path / "cache", options=Options(mtp_stride=1), back=back
    )


def step(training: TrainingRun, number: int, version: int = 0) -> None:
    """The `number`-th step: groups 2 number and 2 number + 1."""
    loaded = [
        groups.load(training.objects, group(training.objects, 2 * number + i, version=version), SHAPE, TrainConfig())
        for i in (0, 1)
    ]
    assert training.advance(loaded).committed
    if training.checkpoint_due:
        training.checkpoint()


def published(objects: Objects, serial: int) -> str:
    return weights.read_manifest(objects, objects.head(f"runs/{RUN}/policies/{serial:08d}/manifest.json")).checksum


def digest(training: TrainingRun) -> str:
    return weights.checksum(masters.published_bits(training.engine.model))


@pytest.mark.parametrize(("serial", "exact"), [(1, False), (3, False), (4, True)])
def test_the_run_goes_on_from_the_version_under_a_new_serial(
    objects: Objects, opened: Open, serial: int, exact: bool
) -> None:
    """Six steps; the checkpoints of steps 4 and 6 are there."""
    first = opened()
    for number in range(6):
        step(first, number)
    back = opened(Rollback(serial, "word"))
    assert (back.step, back.mine.incarnation, back.mine.parent) == (serial, 1, 0)
    assert back.trained == {f"g-{i}" for i in range(2 * serial)}
    assert published(objects, 7) == published(objects, serial) == digest(back)
    again, begun, version = (message for _, message in back.opening)
    assert isinstance(again, StepCommitted)
    assert (again.incarnation, again.step, again.serial) == (0, serial, serial)
    assert set(again.groups) == {f"g-{2 * serial - 2}", f"g-{2 * serial - 1}"}
    assert begun == IncarnationStarted(run=RUN, incarnation=1, step=serial, parent=0)
    assert isinstance(version, PolicyPublished)
    assert (version.serial, version.parent, version.step) == (7, -1, serial)
    moments = [value for name, value in back.engine.state().items() if name.endswith("exp_avg_sq")]
    assert any(bool(value.any()) for value in moments) is exact
    step(back, serial)  # the groups of the dead branch can be trained again
    assert back.serial == 8


def test_it_is_done_once_and_a_restart_stays_on_the_new_branch(objects: Objects, opened: Open) -> None:
    first = opened()
    for number in range(6):
        step(first, number)
    word = Rollback(3, "word")
    assert rollback.is_pending(objects, RUN, word)
    back = opened(word)
    assert not rollback.is_pending(objects, RUN, word)
    step(back, 3)
    again = opened()  # killed before a checkpoint was due
    assert (again.step, again.mine.incarnation, again.mine.parent) == (3, 2, 1)
    assert again.trained == {f"g-{i}" for i in range(6)}
    assert digest(again) == published(objects, 3)
    assert not rollback.is_pending(objects, RUN, word)
    later = Rollback(2, "later")
    assert rollback.is_pending(objects, RUN, later)


def test_a_crash_between_the_claim_and_its_checkpoint_does_it_again(
    objects: Objects, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened()
    for number in range(4):
        step(first, number)
    word = Rollback(1, "word")
    with monkeypatch.context() as dying:
        dying.setattr(TrainingRun, "checkpoint", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            opened(word)
    assert rollback.is_pending(objects, RUN, word)
    back = opened(word)
    assert (back.step, back.mine.incarnation, back.mine.parent) == (1, 2, 0)
    assert not rollback.is_pending(objects, RUN, word)


def test_back_across_a_fork_and_to_the_version_that_an_incarnation_began_with(objects: Objects, opened: Open) -> None:
    first = opened()
    for number in range(5):
        step(first, number)  # serials 1 to 5; step 5 dies with the process
    second = opened()  # serial 6 is step 4 again
    assert second.step == 4
    for number in range(4, 6):
        step(second, number)  # serials 7 and 8: steps 5 and 6
    back = opened(Rollback(7, "a"))
    assert (back.step, back.mine.parent) == (5, 1)
    assert back.trained == {f"g-{i}" for i in range(10)}
    begun_with = opened(Rollback(6, "b"))
    assert (begun_with.step, begun_with.mine.parent) == (4, 0)
    assert begun_with.trained == {f"g-{i}" for i in range(8)}
    assert digest(begun_with) == published(objects, 4)
    dead = opened(Rollback(5, "c"))  # of the branch that nobody continued
    assert (dead.step, dead.mine.parent) == (5, 0)
    assert dead.trained == {f"g-{i}" for i in range(10)}


def test_what_cannot_be_gone_back_to_is_refused_and_claims_nothing(
    objects: Objects, opened: Open, tmp_path: Path
) -> None:
    training = opened()
    for number in range(3):
        step(training, number)
    for serial, why in ((0, "base policy"), (99, "no manifest")):
        with pytest.raises(Impossible, match=why):
            opened(Rollback(serial, "word"))
    ref = objects.head(f"runs/{RUN}/policies/{1:08d}/manifest.json")
    old = msgspec.structs.replace(weights.read_manifest(objects, ref), notes={})
    objects.put(ref.key, msgspec.json.encode(old))
    with pytest.raises(Impossible, match="older release"):
        opened(Rollback(1, "word"))
    assert len(checkpoints.read_incarnations(objects, RUN)) == 1
    step(training, 3)
