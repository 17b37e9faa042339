"""One phase of training: data-parallel, resumable, as long as its budget says (minutes by the clock, in the recipe).

Two processes of one thread each beat one process of two threads wherever anything else runs on the machine, so every
rank computes on one thread and gradients are averaged by gloo. Rank 0 alone decides how far the phase is, so
that all ranks use the same learning rate and stop at the same step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from services.trainer.base.loss import Figures, distillation_loss, evaluate_rows, language_loss
from services.trainer.base.optim import MuonAdam, average_gradients
from services.trainer.base.samples import Samples, batches
from services.trainer.base.settings import ADAM_LR, CLIP, MUON_LR, TOKENS_PER_RANK, Phase
from shared.model import Transformer

CHECK_EVERY_S = 60.0
SAVE_EVERY_S = 180.0


@dataclass(slots=True)
class Progress:
    """Where a phase is. `elapsed_s` counts training alone, without validation and saving."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


Budget = Callable[[Progress], float]  # share of the phase that is done; at 1 it ends


def by_the_clock(minutes: float) -> Budget:
    return lambda progress: progress.elapsed_s / (minutes * 60)


@dataclass(frozen=True, slots=True)
class Report:
    """One line of losses.jsonl."""

    phase: str
    step: int
    minutes: float
    tokens: int
    tokens_per_s: float
    train: float
    action: float
    context: float
    exact: float


class Trainer:
    """Trains `model` through one phase. All ranks construct it alike and call `run`."""

    def __init__(
        self,
        model: Transformer,
        phase: Phase,
        budget: Budget,
        samples: Samples,
        validation: Samples,
        state: Path | None,
        report: Callable[[Report], None],
        seed: int,
        tokens_per_rank: int = TOKENS_PER_RANK,
    ) -> None:
        self.model, self.phase, self.budget = model, phase, budget
        self.samples, self.validation = samples, validation
        self.state, self.report = state, report
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.distil = phase.name == "mtp"
        trunk = tuple({n.split(".")[0] + "." for n, _ in model.named_parameters() if not n.startswith("mtp_layers")})
        self.optimizer = MuonAdam(model, MUON_LR, ADAM_LR, frozen=trunk if self.distil else ("mtp_layers.",))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for parameter in self.optimizer.parameters:
            parameter.requires_grad_(True)
        self.progress = Progress()
        self.feed: Iterator[list[np.ndarray]] = batches(samples.lengths, tokens_per_rank, self.ranks, seed)

    def run(self) -> None:
        self._restore()
        checked = saved = self.progress.elapsed_s if self.progress.step else -CHECK_EVERY_S + 15
        mean = 0.0
        while True:
            began = time.perf_counter()
            fraction = self._together(self.budget(self.progress))
            if fraction >= 1:
                break
            loss, tokens = self._step(fraction)
            self.progress.step += 1
            self.progress.tokens += tokens * self.ranks
            mean = loss if self.progress.step == 1 else 0.98 * mean + 0.02 * loss
            self.progress.elapsed_s += time.perf_counter() - began
            if self.rank == 0 and self.progress.elapsed_s - checked > CHECK_EVERY_S:
                checked = self.progress.elapsed_s
                self.report(self._measure(mean))
            if self.rank == 0 and self.state and self.progress.elapsed_s - saved > SAVE_EVERY_S:
                saved = self.progress.elapsed_s
                self.save(self.state)
        if self.rank == 0:
            self.report(self._measure(mean))

    def _step(self, fraction: float) -> tuple[float, int]:
        rows, classes = self.samples.rows(next(self.feed)[self.rank])
        self.optimizer.zero()
        if self.distil:
            loss, _ = distillation_loss(self.model, rows, classes)
        else:
            loss, _ = language_loss(self.model, rows, classes, self.phase.context_weight)
        loss.backward()
        average_gradients(self.optimizer.parameters, CLIP)
        warm = min(1.0, (self.progress.step + 1) / self.phase.warmup_steps)
        self.optimizer.step(warm * (self.phase.start + (self.phase.end - self.phase.start) * fraction))
        return float(loss.detach()), rows.numel()

    def _together(self, fraction: float) -> float:
        if self.ranks == 1:
            return fraction
        shared = torch.tensor([fraction])
        dist.broadcast(shared, 0)
        return float(shared)

    def _measure(self, mean: float) -> Report:
        p = self.progress
        if self.distil:
            figures = Figures(actions=1, contexts=1, samples=1)
            action, exact = measure_mtp(self.model, self.validation)
            context = 0.0
        else:
            figures = measure(self.model, self.validation)
            action = figures.action_nll / max(1, figures.actions)
            context = figures.context_nll / max(1, figures.contexts)
            exact = figures.exact / max(1, figures.samples)
        return Report(
            phase=self.phase.name,
            step=p.step,
            minutes=p.elapsed_s / 60,
            tokens=p.tokens,
            tokens_per_s=p.tokens / max(p.elapsed_s, 1e-9),
            train=mean,
            action=action,
            context=context,
            exact=exact,
        )

    # Checkpoints of the phase: safetensors and JSON, written aside and renamed.

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{n}": p.detach() for n, p in self.model.named_parameters()} | self.optimizer.state()
        temporary = directory / f".state.{os.getpid()}"
        save_file(
            tensors, temporary, metadata={"phase": self.phase.name, "progress": json.dumps(asdict(self.progress))}
        )
        temporary.replace(directory / "state.safetensors")

    def _restore(self) -> None:
        """Continues a phase that was interrupted; the batches already seen are skipped."""
        path = self.state / "state.safetensors" if self.state else None
        if path is None or not path.is_file():
            return
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        if metadata["phase"] != self.phase.name:
            return
        tensors = load_file(path)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[f"model.{name}"])
        self.optimizer.restore(tensors)
        self.progress = Progress(**json.loads(metadata["progress"]))
        for _ in range(self.progress.step):
            next(self.feed)


def _batches_once(samples: Samples, rows: int = 32) -> Iterator[np.ndarray]:
    order = np.argsort(samples.lengths, kind="stable")
    for start in range(0, len(order), rows):
        yield order[start : start + rows]


def measure(model: Transformer, samples: Samples) -> Figures:
    """Teacher-forced figures over all samples."""
    total: dict[str, float] = {}
    for indices in _batches_once(samples):
        for name, value in asdict(evaluate_rows(model, *samples.rows(indices))).items():
            total[name] = total.get(name, 0) + value
    return Figures(**total)  # type: ignore[arg-type]


@torch.no_grad()
def measure_mtp(model: Transformer, samples: Samples) -> tuple[float, float]:
    """(soft cross-entropy, agreement with the main head), means over batches."""
    results = [distillation_loss(model, *samples.rows(indices)) for indices in _batches_once(samples)]
    return sum(float(loss) for loss, _ in results) / len(results), sum(a for _, a in results) / len(results)
