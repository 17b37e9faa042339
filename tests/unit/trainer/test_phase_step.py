"""The step of a phase: its gradient is that of cross-entropy, documents stay apart, MTP moves nothing else."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from synthetic import SHAPE, V, policy
from test_numerics import assert_close

from services.trainer import packing
from services.trainer.engine import Engine
from services.trainer.layout import lay_out
from services.trainer.packing import TrainSequence
from services.trainer.phases.data import supervised
from services.trainer.replay_step import GradientOnly
from services.trainer.step import Trainer
from shared.contracts.run import TrainConfig
from shared.model import Transformer, causal_rows, published

CONFIG = TrainConfig(
    learning_rate=1e-2, warmup_steps=0, norm_tokens=1.0, micro_batch_tokens=20, router_replay=False, mtp=False
)


def documents(seed: int, sizes: tuple[int, ...] = (9, 2, 14, 5)) -> list[TrainSequence]:
    rng = np.random.default_rng(seed)
    found = []
    for group, size in enumerate(sizes):
        weight = np.where(rng.random(size) < 0.3, 0.25, 1.0).astype(np.float32)
        weight[0] = 0.0
        found.append(replace(supervised(rng.integers(0, V, size), weight), group=group))
    return found


def weights(found: list[TrainSequence]) -> float:
    return sum(float(s.advantages_T.sum()) for s in found)


class _Kept(GradientOnly):
    """Keeps the gradient of its last step."""

    def step(self, step: int, progress: float = 0.0):  # type: ignore[no-untyped-def]
        self.gradient = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        return super().step(step, progress)


def by_step(model: Transformer, found: list[TrainSequence], config: TrainConfig = CONFIG) -> tuple[dict, float]:
    engine = _Kept(model, config)
    trained = Trainer(engine, config, supervised=True).train(found, weights(found), 1)
    return engine.gradient, trained.metrics["loss"]


def by_hand(model: Transformer, found: list[TrainSequence]) -> tuple[dict, float]:
    """Cross-entropy, document by document, with none of the trainer's layout."""
    model.zero_grad()
    total = torch.zeros(())
    with published(model):
        for s in found:
            tokens = torch.as_tensor(s.tokens_T)
            T = len(tokens) - 1
            out = model(tokens[:-1], torch.arange(T), causal_rows(1, T))
            nll = F.cross_entropy(model.logits(out.hidden_ND), tokens[1:], reduction="none")
            total = total + (nll * torch.as_tensor(s.advantages_T[1:])).sum() / weights(found)
        total.backward()
    gradient = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradient, float(total.detach())


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_cross_entropy_whatever_documents_share_a_micro_batch(seed: int) -> None:
    model, found = policy(), documents(seed)
    gradient, value = by_step(model, found)
    expected, by_formula = by_hand(model, found)
    assert_close(gradient, expected)
    assert value == pytest.approx(by_formula, rel=1e-5)
    together, _ = by_step(model, found, replace_tokens(1000))
    assert_close(together, expected)


def replace_tokens(most: int) -> TrainConfig:
    return msgspec.structs.replace(CONFIG, micro_batch_tokens=most)


def test_the_mtp_layer_learns_from_every_target_but_the_first() -> None:
    found = [
        replace(supervised(np.arange(n), np.r_[0.0, np.ones(n - 1)].astype(np.float32)), group=0) for n in (7, 2, 3)
    ]
    mtp = lay_out(packing.whole(found), follow=[True] * 3).mtp
    assert mtp is not None
    assert len(mtp.student_R) == 5 + 0 + 1
    batch = lay_out(packing.whole(found), follow=[True] * 3)
    fed = batch.tokens_N.numpy()
    # The student at source t reads x_{t+1}; its teacher is position t + 1, which was fed just that token.
    assert (fed[mtp.teacher_R.numpy()] == mtp.next_M.numpy()[mtp.student_R.numpy()]).all()
    assert (mtp.teacher_R.numpy() == mtp.source_M.numpy()[mtp.student_R.numpy()] + 1).all()


def trained(config: TrainConfig, *, trunk: bool = True, steps: int = 2) -> tuple[dict[str, torch.Tensor], dict]:
    model = policy()
    engine = Engine(model, config, trains_trunk=trunk, schedule=lambda progress: 1.0 - progress / 2)
    trainer = Trainer(engine, config, supervised=True, balance=0.01)
    metrics = {}
    for step in range(1, steps + 1):
        found = documents(step)
        metrics = trainer.train(found, weights(found), step, progress=step / 4).metrics
    return {name: p.detach().clone() for name, p in model.named_parameters()}, metrics


def test_mtp_in_the_same_step_leaves_the_trunk_bit_equal() -> None:
    without, _ = trained(CONFIG)
    joint, metrics = trained(msgspec.structs.replace(CONFIG, mtp=True))
    assert metrics["mtp_loss"] > 0
    for name, value in without.items():
        assert torch.equal(value, joint[name]) == (not name.startswith("mtp_layers.")), name


def test_the_mtp_phase_moves_the_mtp_layers_alone() -> None:
    start = {name: p.detach().clone() for name, p in policy().named_parameters()}
    after, metrics = trained(msgspec.structs.replace(CONFIG, mtp=True), trunk=False)
    assert metrics["mtp_grad_norm"] > 0
    for name, value in start.items():
        assert torch.equal(value, after[name]) == (not name.startswith("mtp_layers.")), name


def test_routers_are_balanced_by_a_loss_of_their_own() -> None:
    assert SHAPE.num_moe_layers
    balanced, _ = trained(CONFIG, steps=1)
    engine = Engine(policy(), CONFIG, schedule=lambda progress: 1.0 - progress / 2)
    found = documents(1)
    Trainer(engine, CONFIG, supervised=True).train(found, weights(found), 1, progress=0.25)
    plain = dict(engine.model.named_parameters())
    moved = [name for name, value in balanced.items() if not torch.equal(value, plain[name].detach())]
    assert any("gate.weight" in name for name in moved)
