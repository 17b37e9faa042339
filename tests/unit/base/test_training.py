"""Optimiser, losses and phases, on a model that fits in a second."""

import dataclasses
from pathlib import Path

import pytest
import torch

from services.trainer.base.decode import LockStep
from services.trainer.base.launch import Job, Stage, run
from services.trainer.base.loss import distillation_loss, evaluate_rows, language_loss
from services.trainer.base.optim import Muon, MuonAdam, orthogonal
from services.trainer.base.samples import Sample, Samples
from services.trainer.base.settings import MODEL, PRETRAIN
from services.trainer.base.train import Progress, Trainer
from shared.model import ModelConfig, Transformer, causal_rows

TINY = {
    **MODEL,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "head_dim": 16,
}


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig.from_dict({**TINY, "num_attention_heads": 2, "num_key_value_heads": 1}))


def samples(count: int = 40) -> Samples:
    """Counting modulo 7: easy to learn."""
    return Samples.of(Sample([100 + (i + k) % 7 for k in range(20)], [1] * 8 + [2] * 12) for i in range(count))


def test_orthogonalisation_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((48, 16), (16, 48), (3, 24, 24)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.3
        assert values.max() < 1.3


def test_stacked_experts_are_orthogonalised_one_by_one() -> None:
    torch.manual_seed(0)
    stack = torch.randn(4, 12, 20)
    torch.testing.assert_close(orthogonal(stack), torch.stack([orthogonal(m) for m in stack]))


def test_every_matrix_has_an_owner_and_the_work_is_shared() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(8, 8, 8)) for _ in range(6)]
    owners = Muon(parameters, 0.02).owners
    assert sorted(owners) == [0, 0, 0, 1, 1, 1]


def test_the_language_loss_ignores_tokens_without_weight(model: Transformer) -> None:
    tokens, classes = samples(4).rows(torch.arange(4).numpy())
    before, _ = language_loss(model, tokens, classes, 0.0)
    tokens[:, 3] += 1
    masked = classes.clone()
    masked[:, :8] = 0
    first, _ = language_loss(model, tokens, masked, 0.25)
    second, _ = language_loss(model, tokens, masked, 0.0)
    assert float(first.detach()) == float(second.detach())
    assert float(before.detach()) != float(first.detach())


def test_mtp_distillation_has_no_gradient_outside_the_mtp_layers(model: Transformer) -> None:
    loss, agreement = distillation_loss(model, *samples(4).rows(torch.arange(4).numpy()))
    loss.backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert touched
    assert all(name.startswith("mtp_layers.") for name in touched)
    assert 0 <= agreement <= 1


def test_lock_step_decoding_equals_the_whole_forward(model: Transformer) -> None:
    torch.manual_seed(1)
    rows = [torch.randint(0, 2048, (n,)).tolist() for n in (5, 9)]
    engine = LockStep(model, rows, room=4)
    for token in (11, 12):
        engine.step(torch.tensor([token, token]))
    for row, logits in zip(rows, engine.logits_BV, strict=True):
        whole = torch.tensor([*row, 11, 12])
        out = model(whole, torch.arange(len(whole)), causal_rows(1, len(whole)))
        torch.testing.assert_close(model.logits(out.hidden_ND[-1]), logits, rtol=1e-4, atol=1e-5)
    engine.keep([1])
    engine.step(torch.tensor([13]))
    assert engine.logits_BV.shape == (1, 2048)


STEPS = 50  # of a few milliseconds each; what is learnt must not depend on how busy the machine is


def trainer(model: Transformer, state: Path | None) -> Trainer:
    phase = dataclasses.replace(PRETRAIN, warmup_steps=5)
    return Trainer(
        model,
        phase,
        lambda progress: progress.step / STEPS,
        samples(),
        samples(4),
        state,
        lambda line: None,
        seed=1,
        tokens_per_rank=200,
    )


def test_training_learns_and_an_interrupted_phase_goes_on(model: Transformer, tmp_path: Path) -> None:
    first = trainer(model, tmp_path)
    before = evaluate_rows(model, *samples(4).rows(torch.arange(4).numpy()))
    first.run()
    assert first.progress.step == STEPS
    after = evaluate_rows(model, *samples(4).rows(torch.arange(4).numpy()))
    assert after.action_nll < 0.5 * before.action_nll
    first.save(tmp_path)
    torch.manual_seed(9)
    other = Transformer(model.config)
    resumed = trainer(other, tmp_path)
    resumed.run()  # nothing is left of its steps
    assert resumed.progress == first.progress != Progress()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_optimiser_state_survives(model: Transformer) -> None:
    optimizer = MuonAdam(model, 0.02, 0.01, ("mtp_layers.",))
    loss, _ = language_loss(model, *samples(4).rows(torch.arange(4).numpy()), 0.25)
    loss.backward()
    optimizer.step(1.0)
    fresh = MuonAdam(model, 0.02, 0.01, ("mtp_layers.",))
    fresh.restore(optimizer.state())
    assert fresh.state().keys() == optimizer.state().keys()
    assert all(torch.equal(fresh.state()[name], value) for name, value in optimizer.state().items())


def test_two_processes_end_with_the_same_checkpoint_as_each_other(tmp_path: Path) -> None:
    """Rank 0 writes; both must agree on when to stop, or this would hang."""
    samples().save(tmp_path / "s.npz")
    (tmp_path / "tokenizer.json").write_text("{}")
    phase = dataclasses.replace(PRETRAIN, warmup_steps=2)
    stage = Stage(phase, 0.03, tmp_path / "s.npz", tmp_path / "s.npz", tmp_path / "out")
    run(Job((stage,), tmp_path / "work", tmp_path / "tokenizer.json", seed=1, processes=2, tokens_per_rank=100))
    assert (tmp_path / "out" / "etude.json").is_file()
    assert not (tmp_path / "work" / "state.safetensors").exists()
