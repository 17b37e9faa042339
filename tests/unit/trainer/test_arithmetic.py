"""A step in bf16: its gradient is compared with float32's, and weights and sums stay in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.trainer.engine import Engine
from services.trainer.replay_step import GradientOnly
from services.trainer.step import Trainer
from shared.contracts.run import TrainConfig
from shared.model import published
from tests.unit.trainer.synthetic import policy, sequences

CONFIG = TrainConfig(norm_tokens=10.0, micro_batch_tokens=64)


class Kept(GradientOnly):
    def step(self, step: int, progress: float = 0.0):  # type: ignore[no-untyped-def]
        named = self.model.named_parameters()
        self.flat = torch.cat([p.grad.flatten() for n, p in named if p.grad is not None])
        return super().step(step, progress)


def gradient(arithmetic: torch.dtype) -> torch.Tensor:
    engine = Kept(policy(), CONFIG, arithmetic)
    Trainer(engine, CONFIG).train(sequences(np.random.default_rng(0), 4), 16, 1)
    return engine.flat


def test_the_gradient_in_bf16_points_where_float32s_does_and_is_summed_in_float32() -> None:
    exact, found = gradient(torch.float32), gradient(torch.bfloat16)
    assert found.dtype == torch.float32
    assert float(torch.cosine_similarity(exact, found, 0)) > 0.995
    assert not torch.equal(exact, found)


def test_two_runs_in_bf16_are_equal_and_leave_float32_masters() -> None:
    def run() -> dict[str, torch.Tensor]:
        engine = Engine(policy(), CONFIG, arithmetic=torch.bfloat16)
        for step in (1, 2):
            assert Trainer(engine, CONFIG).train(sequences(np.random.default_rng(0), 4), 16, step).applied
        assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
        return engine.state()

    one, other = run(), run()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_parameters_are_bf16_tensors_in_the_block_alone() -> None:
    model = policy()
    before = [p.detach().clone() for p in model.parameters()]
    with published(model, torch.bfloat16):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_another_arithmetic_is_refused() -> None:
    with pytest.raises(ValueError, match=r"arithmetic: found torch.float16; allowed"):
        Engine(policy(), CONFIG, arithmetic=torch.float16)
