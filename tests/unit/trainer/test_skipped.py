"""Gradients that are not finite, or spikes: nothing moves, and three in a row pause the run with the batch kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from synthetic import RUN, SHAPE, group, policy, run_config, sequences
from typer.testing import CliRunner

from services.trainer import groups, replay_step, skipped, train_cli
from services.trainer.engine import LEAST_STEPS, Engine
from services.trainer.ranks import Options
from services.trainer.step import Trainer
from services.trainer.training import Advance, TrainingRun
from shared import objects as stores
from shared.contracts.messages import Alert, GroupQuarantined
from shared.contracts.run import ALERT_NAMES, ALWAYS_PAUSE, TrainConfig
from shared.objects import Objects

CONFIG = TrainConfig(learning_rate=1e-3, warmup_steps=0, norm_tokens=8.0, spike=4.0)


@pytest.fixture
def training(objects: Objects, tmp_path: Path) -> TrainingRun:
    config = run_config(objects, tmp_path / "base")
    return TrainingRun(objects, config, trainer="t", cache=tmp_path / "cache", options=Options(mtp_stride=1))


def overflowing(training: TrainingRun, number: int) -> groups.LoadedGroup:
    loaded = groups.load(training.objects, group(training.objects, number), SHAPE, TrainConfig())
    huge = [replace(s, advantages_T=np.full_like(s.advantages_T, 3e38)) for s in loaded.sequences]
    return replace(loaded, sequences=tuple(huge))


def alerts(result: Advance) -> list[str]:
    return [message.name for _, message in result.others if isinstance(message, Alert)]


def test_three_steps_in_a_row_without_a_finite_gradient_pause_the_run_and_keep_the_batch(training: TrainingRun) -> None:
    results = [training.advance([overflowing(training, number)]) for number in range(3)]
    assert [alerts(result) for result in results[:2]] == [["gradient_not_finite"]] * 2
    assert alerts(results[2]) == ["gradient_not_finite", "steps_skipped"]
    assert {result.skipped for result in results} == {"not_finite"}
    assert "steps_skipped" in ALWAYS_PAUSE <= set(ALERT_NAMES)
    (stop,) = (m for _, m in results[2].others if isinstance(m, Alert) and m.name == "steps_skipped")
    (key,) = training.objects.list(f"runs/{RUN}/checkpoints/skipped/")
    assert key in stop.what
    kept = skipped.unpack(training.objects.get(training.objects.head(key)))
    assert (kept.header.groups, kept.header.step, kept.header.serial) == (["g-2"], 1, 0)
    again = training.trainer.train(kept.sequences, kept.header.attempts, kept.header.step)
    assert not again.applied  # the same step, from the file alone


def test_a_step_that_moves_ends_the_row(training: TrainingRun) -> None:
    for number in range(6):
        loaded = overflowing(training, number)
        if number == 2:
            loaded = groups.load(training.objects, group(training.objects, number), SHAPE, TrainConfig())
        assert "steps_skipped" not in alerts(training.advance([loaded])) or number == 5


def test_a_spike_is_skipped_and_its_groups_are_named_with_both_norms(objects: Objects, tmp_path: Path) -> None:
    train = msgspec.structs.replace(CONFIG, checkpoint_every=100)
    training = TrainingRun(
        objects,
        run_config(objects, tmp_path / "base", train),
        trainer="t",
        cache=tmp_path / "c",
        options=Options(mtp_stride=1),
    )

    def step(number: int, factor: float = 1.0) -> Advance:
        loaded = groups.load(objects, group(objects, 0), SHAPE, TrainConfig())
        sequences = tuple(replace(s, advantages_T=factor * s.advantages_T) for s in loaded.sequences)
        ready = msgspec.structs.replace(loaded.ready, group=f"g-{number}", problem=f"p-{number}")
        return training.advance([replace(loaded, ready=ready, sequences=sequences)])

    for number in range(LEAST_STEPS):
        assert step(number).committed is not None
    result = step(99, 100.0)
    assert (result.committed, result.skipped, training.step) == (None, "spike", LEAST_STEPS)
    aside, alert = (message for _, message in result.others)
    assert isinstance(aside, GroupQuarantined)
    assert isinstance(alert, Alert)
    assert (aside.group, alert.name) == ("g-99", "gradient_spike")
    assert "found a norm of" in aside.reason
    assert step(100).committed is not None
    assert [alerts(step(number, 100.0))[-1] for number in (101, 102, 103)][-1] == "steps_skipped"
    assert step(104, 100.0).committed is not None  # a person has looked: gradients may have become larger for good


@pytest.mark.parametrize("stage", [0, 1])
def test_what_is_a_spike_survives_a_resume(stage: int) -> None:
    found = sequences(np.random.default_rng(0), groups=3)
    large = [replace(s, advantages_T=50 * s.advantages_T) for s in found]
    engine = Engine(policy(), CONFIG, zero_stage=stage)
    trainer = Trainer(engine, CONFIG)
    first = trainer.train(large, attempts=12, step=1)
    assert first.applied  # nothing to compare it with
    for step in range(2, LEAST_STEPS + 1):
        assert trainer.train(found, attempts=12, step=step).applied
    resumed = Engine(policy(9), CONFIG, zero_stage=stage)
    resumed.load(engine.state())
    for each in (trainer, Trainer(resumed, CONFIG)):
        before = [p.clone() for p in each.engine.model.parameters()]
        trained = each.train(large, attempts=12, step=LEAST_STEPS + 1)
        assert not trained.applied
        assert trained.metrics["grad_norm"] > trained.spike > 0
        assert all(torch.equal(a, b) for a, b in zip(before, each.engine.model.parameters(), strict=True))


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-9], lambda data: b"\x00" * 100])
def test_a_damaged_batch_is_refused(damage: Callable[[bytes], bytes]) -> None:
    header = skipped.Header(
        run="r", incarnation=0, step=1, serial=0, attempts=4, progress=0.0, train=CONFIG, groups=["g", "h"]
    )
    found = sequences(np.random.default_rng(0), groups=2)
    whole = skipped.pack(skipped.Batch(header, found))
    batch = skipped.unpack(whole)
    assert batch.header == header
    for a, b in zip(batch.sequences, found, strict=True):
        assert (a.group, a.temperature) == (b.group, b.temperature)
        assert np.array_equal(a.experts_TLK, b.experts_TLK)
        assert np.array_equal(a.tokens_T, b.tokens_T)
    with pytest.raises(skipped.BadBatch):
        skipped.unpack(damage(whole))


def kept_batch(training: TrainingRun) -> str:
    """Return the key of the batch that the trainer keeps after three steps, of which each has a group that overflows."""
    for turn in range(3):
        good = groups.load(training.objects, group(training.objects, 10 + turn), SHAPE, TrainConfig())
        training.advance([good, overflowing(training, 20 + turn)])
    (key,) = training.objects.list(f"runs/{RUN}/checkpoints/skipped/")
    return key


def test_a_replayed_step_names_the_group_and_moves_nothing(training: TrainingRun, objects: Objects) -> None:
    batch = skipped.unpack(objects.get(objects.head(kept_batch(training))))
    before = [p.clone() for p in training.engine.model.parameters()]
    good, bad, whole = replay_step.replay(training.engine.model, batch)
    assert (good.name, bad.name, whole.name) == ("g-12", "g-22", "")
    assert np.isfinite(good.grad_norm)
    assert not np.isfinite(bad.grad_norm)
    assert not np.isfinite(whole.grad_norm)
    assert not np.isfinite(bad.largest[0][1])
    assert all(torch.equal(a, b) for a, b in zip(before, training.engine.model.parameters(), strict=True))
    assert all(p.grad is None for p in training.engine.model.parameters())


def test_a_replayed_gradient_has_the_norm_that_the_trainer_measured(objects: Objects, tmp_path: Path) -> None:
    found = sequences(np.random.default_rng(0), groups=3)
    model = policy()
    header = skipped.Header(
        run="r", incarnation=0, step=1, serial=0, attempts=12, progress=0.0, train=CONFIG, groups=["a", "b", "c"]
    )
    *parts, whole = replay_step.replay(model, skipped.Batch(header, found))
    trained = Trainer(Engine(model, CONFIG), CONFIG).train(found, attempts=12, step=1)
    assert whole.grad_norm == pytest.approx(trained.metrics["grad_norm"], rel=1e-5)
    assert whole.tokens == sum(part.tokens for part in parts)
    assert [norm for _, norm in whole.largest] == sorted((norm for _, norm in whole.largest), reverse=True)


def test_the_command_reads_the_batch_from_the_store_and_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = stores.connect((tmp_path / "state" / "objects").as_uri())
    monkeypatch.setenv("ETUDE_OBJECTS_URL", (tmp_path / "state" / "objects").as_uri())
    config = run_config(objects, tmp_path / "base")
    objects.put(f"runs/{RUN}/config.json", msgspec.json.encode(config))
    key = kept_batch(TrainingRun(objects, config, trainer="t", cache=tmp_path / "cache", options=Options(mtp_stride=1)))
    file = tmp_path / "batch"
    file.write_bytes(objects.get(objects.head(key)))
    state = ["--state", str(tmp_path / "state")]
    results = [CliRunner().invoke(train_cli.app, ["replay-step", name, "--json", *state]) for name in (key, str(file))]
    assert [result.exit_code for result in results] == [1, 1], results[0].output
    assert results[0].stdout == results[1].stdout
    lines = [json.loads(line) for line in results[0].stdout.splitlines()]
    assert [(line["group"], line["grad_norm"] is None) for line in lines] == [
        ("g-12", False),
        ("g-22", True),
        (None, True),
    ]
    shown = CliRunner().invoke(train_cli.app, ["replay-step", key, *state])
    assert "g-22" in shown.output
    missing = CliRunner().invoke(train_cli.app, ["replay-step", "runs/x", *state])
    assert missing.exit_code == 2
    assert "neither a file nor an object" in missing.output
