"""Compute the gradient of a kept batch again, and say which groups and which tensors make it.

Nothing is trained: the policy stays as it is. The batch alone decides, so the answer is the same on every machine.
The gradient of a step is the sum of its groups' gradients. Each group is computed on its own, then all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from services.trainer.engine import StepResult, as_published
from services.trainer.mesh import Mesh
from services.trainer.skipped import Batch
from services.trainer.step import Trainer
from shared.contracts.run import TrainConfig
from shared.model import Transformer

LARGEST = 5  # tensors that a report names


T = TypeVar("T")


class GradientOnly:
    """Measures a step's gradient and throws it away, on one rank. Fulfils step.Optimiser."""

    mesh = Mesh()
    trains_trunk = True

    def __init__(self, model: Transformer, config: TrainConfig, arithmetic: torch.dtype = torch.float32) -> None:
        self.model, self.config, self.arithmetic = model, config, arithmetic
        self.device = next(model.parameters()).device
        self.tensors: dict[str, float] = {}  # norm of the last step's gradient, by parameter

    @property
    def has_mtp(self) -> bool:
        return self.config.mtp and len(self.model.mtp_layers) > 0

    def forward_weights(self) -> AbstractContextManager[None]:
        return as_published(self.model, self.config, self.arithmetic)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def backward_mtp(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, step: int, progress: float = 0.0) -> StepResult:
        self.tensors = {n: float(p.grad.norm()) for n, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        mtp = {name for name in self.tensors if name.startswith("mtp_layers.")}
        trunk = _norm([self.tensors[name] for name in self.tensors.keys() - mtp])
        return StepResult(trunk, _norm([self.tensors[name] for name in mtp]), applied=False, mtp_applied=False)

    def rest(self) -> StepResult:
        self.tensors = {}
        return StepResult(0.0, 0.0, applied=False, mtp_applied=False)

    def from_all(self, found: T) -> list[T]:
        return [found]


@dataclass(frozen=True, slots=True)
class Part:
    """One group of the batch, or the whole batch. `largest`: the parameters with the largest gradients, largest first, and their
    norms; those that are not finite come before all others. `log_ratio`: the largest |log p_trainer - log p_sampler| of a
    sampled token, in nats; nan: no sampled token is finite."""

    name: str
    sequences: int
    tokens: int
    grad_norm: float
    log_ratio: float
    largest: tuple[tuple[str, float], ...]


def replay(model: Transformer, batch: Batch, reference: Transformer | None = None) -> Iterator[Part]:
    """Yield one Part for each group, in the batch's order, then one for the whole batch (its name is empty).

    `model` holds the version that the step began from (Header.serial). `reference`: the base policy, where train.kl > 0.
    Raises ValueError if the batch needs a reference and there is none.
    """
    config = batch.header.train
    engine = GradientOnly(model, config)
    trainer = Trainer(engine, config, reference=reference, mtp_stride=batch.header.mtp_stride)
    for index, name in enumerate([*batch.header.groups, ""]):
        sequences = [s for s in batch.sequences if s.group == index or not name]
        trained = trainer.train(sequences, batch.header.attempts, batch.header.step, progress=batch.header.progress)
        largest = sorted(engine.tensors.items(), key=lambda item: (math.isfinite(item[1]), -item[1]))
        yield Part(
            name=name,
            sequences=len(sequences),
            tokens=int(sum(s.sampled_T.sum() for s in sequences)),
            grad_norm=math.nan if trained.bad_groups else trained.metrics["grad_norm"],
            log_ratio=trained.metrics.get("mismatch_log_ratio_max", math.nan),
            largest=tuple(largest[:LARGEST]),
        )


def _norm(norms: list[float]) -> float:
    return float(np.linalg.norm(norms)) if norms else 0.0
