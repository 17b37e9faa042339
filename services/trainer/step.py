"""One training step: micro-batches forward and backward, the update, and what to report about it.

No I/O. The same function serves the service, the tests and the benchmarks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from services.trainer import loss, packing, replay
from services.trainer.engine import Engine
from services.trainer.layout import Batch, attend_shared, lay_out
from services.trainer.packing import TrainSequence, Unit
from shared.contracts.run import TrainConfig
from shared.model import Output, Transformer


@dataclass(slots=True)
class Figures:
    """Sums over the step's sampled tokens, and what was seen on the way."""

    log_ratio: list[np.ndarray] = field(default_factory=list)
    log_ratio_unreplayed: list[np.ndarray] = field(default_factory=list)
    versions: list[np.ndarray] = field(default_factory=list)
    entropy: float = 0.0
    clipped: int = 0
    replaced: float = 0.0
    fed: int = 0
    sampled: int = 0
    loss: float = 0.0
    mtp_loss: float = 0.0
    mtp_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def clock(self, phase: str, since: float) -> float:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - since
        return now


@dataclass(frozen=True, slots=True)
class Trained:
    """What a step did. `bad_groups`: indices of groups whose loss was not finite; nothing of them was trained. `applied`,
    `mtp_applied`: see engine.StepResult."""

    metrics: dict[str, float]
    bad_groups: frozenset[int]
    applied: bool
    mtp_applied: bool


class Trainer:
    """Holds the engine and, for a KL penalty, the frozen reference policy."""

    def __init__(
        self,
        engine: Engine,
        config: TrainConfig,
        *,
        reference: Transformer | None = None,
        mtp_stride: int = 1,
        share_prefixes: bool = True,
    ) -> None:
        if config.kl > 0 and reference is None:
            raise ValueError("a KL penalty needs the reference policy")
        self.engine, self.config, self.reference = engine, config, reference
        self.mtp_stride, self.share_prefixes = mtp_stride, share_prefixes
        shape = engine.model.config
        self.L, self.K = shape.num_moe_layers, shape.num_experts_per_tok

    def train(
        self,
        sequences: Sequence[TrainSequence],
        attempts: int,
        step: int,
        *,
        progress: float = 0.0,
        measure_replay: bool = False,
    ) -> Trained:
        """One update from all sequences of the batch. `attempts` counts the batch's attempts, those without signal too:
        the loss is divided by norm_tokens x attempts. `step` counts from 1. `progress`: of the run, 0 to 1
        (see Engine.step). `measure_replay`: also measures the mismatch
        without router replay, on the first micro-batch."""
        figures = Figures()
        start = time.perf_counter()
        live = [s for s in sequences if self.config.kl > 0 or s.has_signal]
        replayed = self.config.router_replay
        units = packing.form_units(live, replay=replayed, share=self.share_prefixes)
        norm = self.config.norm_tokens * max(1, attempts)
        bad: set[int] = set()
        used: set[int] = set()
        with self.engine.forward_weights():
            for number, part in enumerate(packing.micro_batches(units, self.config.micro_batch_tokens)):
                broken = self._micro_batch(part, norm, figures, step + number, measure_replay and number == 0)
                bad |= broken
                used |= {s.group for unit in part for s in unit.sequences} - broken
        now = time.perf_counter()
        result = self.engine.step(step, progress)
        figures.clock("optimiser", now)
        shared = packing.sharing(units)
        metrics = self._report(figures, shared, result.grad_norm, result.mtp_grad_norm)
        metrics["seconds_train"] = time.perf_counter() - start
        # A group that is cut over micro-batches may have moved the weights before it broke. Then it was trained, if not
        # whole, and its problem must not come again.
        return Trained(metrics, frozenset(bad - used), result.applied, result.mtp_applied)

    def _micro_batch(self, units: list[Unit], norm: float, figures: Figures, turn: int, measure: bool) -> set[int]:
        """Accumulates gradients. Returns the groups that were left out because their numbers are not finite."""
        bad: set[int] = set()
        while units:
            now = time.perf_counter()
            follow = [self.engine.has_mtp and (turn + i) % self.mtp_stride == 0 for i in range(len(units))]
            batch = lay_out(units, follow=follow, device=self.engine.device)
            out = self._forward(self.engine.model, batch, self.config.router_replay)
            logprobs, entropy = self._logprobs(self.engine.model, out, batch)
            broken = set(batch.group_S[~torch.isfinite(logprobs.detach()).cpu().numpy()].tolist())
            now = figures.clock("forward", now)
            if not broken:
                break
            bad |= broken
            units = [u for u in units if u.sequences[0].group not in broken]
        if not units:
            return bad
        reference = self._reference_logprobs(batch)
        value = loss.policy_loss(
            logprobs,
            batch.sampled_logprobs_S,
            reference,
            batch.advantage_S,
            clip=self.config.importance_clip,
            floor=self.config.importance_floor,
            kl=self.config.kl,
            norm=norm,
        )
        now = figures.clock("reference", now)
        self.engine.backward(value)
        now = figures.clock("backward", now)
        if batch.mtp is not None:
            self._follow(batch, out, norm, figures)
            now = figures.clock("mtp", now)
        self._note(figures, batch, out, logprobs.detach(), entropy, float(value.detach()))
        if measure and self.config.router_replay and self.L:
            with torch.no_grad():
                own = self._forward(self.engine.model, batch, False)
                again, _ = self._logprobs(self.engine.model, own, batch)
            figures.log_ratio_unreplayed.append((again - batch.sampled_logprobs_S).cpu().numpy())
        return bad

    def _forward(self, model: Transformer, batch: Batch, replayed: bool) -> Output:
        recorded = None
        if replayed:
            recorded = replay.build(batch.units, self.L, self.K, self.config.replay_tau, self.engine.device)
        attend = attend_shared(batch.blocks, self.engine.device)
        return model(batch.tokens_N, batch.positions_N, attend, recorded)

    @staticmethod
    def _logprobs(model: Transformer, out: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden_SD = out.hidden_ND.index_select(0, batch.predict_S)
        return loss.token_logprobs(hidden_SD, model.head(), batch.target_S, batch.temperature_S)

    def _reference_logprobs(self, batch: Batch) -> Tensor | None:
        """Under the recorded routing too: the penalty compares the policies, not two selections of experts."""
        if self.config.kl == 0:
            return None
        assert self.reference is not None
        with torch.no_grad():
            out = self._forward(self.reference, batch, self.config.router_replay)
            return self._logprobs(self.reference, out, batch)[0]

    def _follow(self, batch: Batch, out: Output, norm: float, figures: Figures) -> None:
        """The MTP layer matches the main head's distribution one position on; its gradient ends in its own weights."""
        mtp, model = batch.mtp, self.engine.model
        assert mtp is not None
        residual = out.residual_ND.detach().index_select(0, mtp.source_M)
        hidden = model.mtp(residual, mtp.next_M, mtp.positions_M, attend_shared(mtp.blocks, self.engine.device))
        teacher = out.hidden_ND.detach().index_select(0, mtp.teacher_R)
        value = loss.follow_loss(hidden.index_select(0, mtp.student_R), teacher, model.head())
        self.engine.backward_mtp(value / norm)
        figures.mtp_loss += float(value.detach())
        figures.mtp_tokens += len(mtp.student_R)

    def _note(
        self, figures: Figures, batch: Batch, out: Output, logprobs: Tensor, entropy: Tensor, value: float
    ) -> None:
        log_ratio = (logprobs - batch.sampled_logprobs_S).cpu().numpy()
        figures.log_ratio.append(log_ratio)
        figures.versions.append(batch.version_S)
        figures.entropy += float(entropy.sum())
        figures.clipped += int((log_ratio > np.log(self.config.importance_clip)).sum())
        if self.config.importance_floor > 0:
            figures.clipped += int((log_ratio < np.log(self.config.importance_floor)).sum())
        figures.replaced += out.replaced * len(batch.tokens_N)
        figures.fed += len(batch.tokens_N)
        figures.sampled += len(batch.target_S)
        figures.loss += value

    @staticmethod
    def _report(figures: Figures, shared: packing.Sharing, grad_norm: float, mtp_grad_norm: float) -> dict[str, float]:
        tokens = max(1, figures.sampled)
        log_ratio = np.concatenate(figures.log_ratio) if figures.log_ratio else np.zeros(0)
        metrics = {
            "loss": figures.loss,
            "grad_norm": grad_norm,
            "entropy": figures.entropy / tokens,
            "tokens_sampled": float(figures.sampled),
            "tokens_fed": float(figures.fed),
            "prefix_saved_share": shared.saved_share,
            "prefix_lost_share": shared.lost_share,
            "importance_clipped_share": figures.clipped / tokens,
            "replay_replaced_share": figures.replaced / max(1, figures.fed),
            **{f"mismatch_{name}": value for name, value in loss.mismatch(log_ratio).items()},
            **{f"seconds_{phase}": seconds for phase, seconds in figures.seconds.items()},
        }
        metrics |= _by_version(log_ratio, figures.versions)
        if figures.mtp_tokens:
            metrics |= {"mtp_loss": figures.mtp_loss / figures.mtp_tokens, "mtp_grad_norm": mtp_grad_norm}
        if figures.log_ratio_unreplayed:
            first = loss.mismatch(np.concatenate(figures.log_ratio_unreplayed))
            metrics |= {f"mismatch_unreplayed_{name}": value for name, value in first.items()}
        return metrics


def _by_version(log_ratio: np.ndarray, versions: list[np.ndarray]) -> dict[str, float]:
    """Mismatch per policy version that sampled: `mismatch_k3_version_<serial>` and its p99."""
    if not len(log_ratio):
        return {}
    serials = np.concatenate(versions)
    result: dict[str, float] = {}
    for serial in np.unique(serials):
        figures = loss.mismatch(log_ratio[serials == serial])
        result[f"mismatch_k3_version_{serial}"] = figures["k3"]
        result[f"mismatch_p99_version_{serial}"] = figures["log_ratio_p99"]
    return result
