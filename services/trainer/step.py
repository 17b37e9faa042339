"""One training step: micro-batches forward and backward, the update, and what to report about it.

No I/O. The same function serves the service, the tests and the benchmarks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from services.trainer import loss, packing, replay
from services.trainer.balance import balancing_loss
from services.trainer.context import Context
from services.trainer.dealing import Cost, deal
from services.trainer.engine import StepResult, freeze
from services.trainer.layout import Batch, lay_out
from services.trainer.mesh import Mesh
from services.trainer.packing import TrainSequence, Unit
from shared.contracts.run import TrainConfig
from shared.model import Output, Transformer

T = TypeVar("T")


class Optimiser(Protocol):
    """What a step needs to train with: `engine.Engine`, or `replay_step.GradientOnly`, which leaves the policy as it is."""

    @property
    def model(self) -> Transformer: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def has_mtp(self) -> bool: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def trains_trunk(self) -> bool: ...
    @property
    def arithmetic(self) -> torch.dtype: ...
    def forward_weights(self) -> AbstractContextManager[None]: ...
    def backward(self, loss: Tensor) -> None: ...
    def backward_mtp(self, loss: Tensor) -> None: ...
    def step(self, step: int, progress: float = 0.0) -> StepResult: ...
    def rest(self) -> StepResult: ...
    def from_all(self, found: T) -> list[T]: ...


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

    @staticmethod
    def sum(parts: Sequence[Figures]) -> Figures:
        """Return the figures of all ranks as one's; seconds are those of the slowest rank, phase by phase."""
        if len(parts) == 1:
            return parts[0]
        total = Figures()
        for part in parts:
            for name in ("entropy", "clipped", "replaced", "fed", "sampled", "loss", "mtp_loss", "mtp_tokens"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
            for name in ("log_ratio", "log_ratio_unreplayed", "versions"):
                getattr(total, name).extend(getattr(part, name))
            for phase, seconds in part.seconds.items():
                total.seconds[phase] = max(total.seconds.get(phase, 0.0), seconds)
        return total

    def clock(self, phase: str, since: float) -> float:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - since
        return now


@dataclass(frozen=True, slots=True)
class Trained:
    """What a step did. `bad_groups`: indices of groups whose loss was not finite; nothing of them was trained. `applied`,
    `mtp_applied`, `spike`: see engine.StepResult."""

    metrics: dict[str, float]
    bad_groups: frozenset[int]
    applied: bool
    mtp_applied: bool
    spike: float = 0.0


class Trainer:
    """Holds the engine and, for a KL penalty, the frozen reference policy."""

    def __init__(
        self,
        engine: Optimiser,
        config: TrainConfig,
        *,
        reference: Transformer | None = None,
        mtp_stride: int = 1,
        share_prefixes: bool = True,
        supervised: bool = False,
        balance: float = 0.0,
    ) -> None:
        """`supervised`: the loss is the negative log-likelihood, weighted by the advantages. There is no sampler to correct for,
        and every sequence is a unit of its own. `balance`: weight of the routers' load-balancing loss, if supervised."""
        if config.kl > 0 and reference is None:
            raise ValueError("a KL penalty needs the reference policy")
        if not config.norm_tokens > 0:
            raise ValueError(f"norm_tokens: found {config.norm_tokens:g}; allowed: more than 0 (RunConfig.normaliser)")
        self.engine, self.config = engine, config
        self.reference = None if reference is None else freeze(reference, config, engine.arithmetic)
        self.mtp_stride, self.share_prefixes = mtp_stride, share_prefixes
        self.supervised, self.balance = supervised, balance
        shape = engine.model.config
        self.L, self.K = shape.num_moe_layers, shape.num_experts_per_tok
        self.cost = Cost.of(engine.model)
        self.context = Context(engine.mesh)

    def train(
        self,
        sequences: Sequence[TrainSequence],
        attempts: float,
        step: int,
        *,
        progress: float = 0.0,
        measure_replay: bool = False,
    ) -> Trained:
        """Make one update from all sequences of the batch. `attempts` counts the batch's attempts, those without signal too:
        the loss is divided by norm_tokens x attempts. `step` counts from 1. `progress`: of the run, 0 to 1 (see Engine.step).
        A batch in which no sequence has signal moves nothing, momentum neither.
        `measure_replay`: also measure the mismatch without router replay, on the first micro-batch.

        Every rank calls it with the same batch, computes its part, and returns the same result."""
        figures = Figures()
        start = time.perf_counter()
        live = [s for s in sequences if self.config.kl > 0 or s.has_signal]
        replayed = self.config.router_replay
        if self.supervised:
            units = packing.whole(live)
        else:
            units = packing.form_units(live, replay=replayed, share=self.share_prefixes)
        norm = self.config.norm_tokens * max(1, attempts)
        bad: set[int] = set()
        used: set[int] = set()
        mesh = self.engine.mesh
        dealt = deal(units, mesh.data, self.config.micro_batch_tokens, self.cost)
        followed = self._followed(units, step)
        figures.clock("packing", start)
        with self.engine.forward_weights():
            for number, part in enumerate(dealt[mesh.data_rank]):
                broken = self._micro_batch(part, norm, figures, followed, measure_replay and number == 0)
                bad |= broken
                used |= {s.group for unit in part for s in unit.sequences} - broken
        now = time.perf_counter()
        every_bad, every_used = zip(*self.engine.from_all((bad, used)), strict=True)
        bad, used = set().union(*every_bad), set().union(*every_used)
        result = self.engine.step(step, progress) if used else self.engine.rest()
        figures.clock("optimiser", now)
        shared = packing.sharing(units, [part for parts in dealt for part in parts])
        figures = Figures.sum(self.engine.from_all(figures))
        metrics = self._report(figures, shared, result.grad_norm, result.mtp_grad_norm)
        metrics["seconds_train"] = time.perf_counter() - start
        # A group that is cut over micro-batches may have moved the weights before it broke. Then it was trained, if not
        # whole, and its problem must not come again.
        return Trained(metrics, frozenset(bad - used), result.applied, result.mtp_applied, result.spike)

    def _followed(self, units: Sequence[Unit], step: int) -> set[int]:
        """Return the groups whose units the MTP layer follows in this step: those of every `mtp_stride`-th unit. Which they are
        depends on neither ranks nor micro-batches."""
        if not self.engine.has_mtp:
            return set()
        order = dict.fromkeys(unit.sequences[0].group for unit in units)
        return {group for at, group in enumerate(order) if (step + at) % self.mtp_stride == 0}

    def _micro_batch(
        self, units: list[Unit], norm: float, figures: Figures, followed: set[int], measure: bool
    ) -> set[int]:
        """Accumulates gradients. Returns the groups that were left out because their numbers are not finite.

        Where experts are divided, a rank without units computes a batch of no rows: others may send it theirs."""
        bad: set[int] = set()
        together = self.engine.mesh.expert > 1
        while units or together:
            now = time.perf_counter()
            follow = [unit.sequences[0].group in followed for unit in units]
            batch = self.context.cut(lay_out(units, follow=follow, device=self.engine.device))
            now = figures.clock("packing", now)
            with torch.set_grad_enabled(self.engine.trains_trunk):
                out = self._forward(self.engine.model, batch, self.config.router_replay)
                logprobs, entropy = self._logprobs(self.engine.model, out, batch)
            broken = set(batch.group_S[~torch.isfinite(logprobs.detach()).cpu().numpy()].tolist())
            broken = self._agreed(broken)
            now = figures.clock("forward", now)
            if not broken:
                break
            bad |= broken
            units = [u for u in units if u.sequences[0].group not in broken]
        if not units and not together:
            self._nothing(trunk=self.engine.trains_trunk)
            return bad
        if self.supervised:
            value = loss.supervised_loss(logprobs, batch.advantage_S, norm=norm)
        else:
            value = self._policy_loss(batch, logprobs, norm)
        now = figures.clock("reference", now)
        if self.engine.trains_trunk:
            self.engine.backward(value + self._balance(batch, out, norm))
        now = figures.clock("backward", now)
        if batch.mtp is not None:
            self._follow(batch, out, norm, figures)
            now = figures.clock("mtp", now)
        elif self.engine.mesh.world > 1 and self.engine.has_mtp:
            self._nothing(trunk=False)
        self._note(figures, batch, out, logprobs.detach(), entropy, float(value.detach()))
        if measure and self.config.router_replay and self.L:
            with torch.no_grad():
                own = self._forward(self.engine.model, batch, False)
                again, _ = self._logprobs(self.engine.model, own, batch)
            figures.log_ratio_unreplayed.append((again - batch.sampled_logprobs_S).cpu().numpy())
        return bad

    def _policy_loss(self, batch: Batch, logprobs: Tensor, norm: float) -> Tensor:
        return loss.policy_loss(
            logprobs,
            batch.sampled_logprobs_S,
            self._reference_logprobs(batch),
            batch.advantage_S,
            clip=self.config.importance_clip,
            floor=self.config.importance_floor,
            kl=self.config.kl,
            norm=norm,
            charge=(lambda k1_S: self._to_go(batch, k1_S)) if self.config.kl_charge == "to_go" else None,
        )

    def _to_go(self, batch: Batch, k1_S: Tensor) -> Tensor:
        """Return each token's sum over itself and the later tokens of its sequence, whichever ranks hold those."""
        place = torch.as_tensor(batch.place_S, device=k1_S.device)
        whole = k1_S.new_zeros(sum(batch.lengths), dtype=torch.float64)
        whole[place] = k1_S.double()
        whole = self.context.add_up(whole)
        return torch.as_tensor(loss.to_go(whole.cpu().numpy(), batch.lengths), device=k1_S.device)[place].to(k1_S.dtype)

    def _balance(self, batch: Batch, out: Output, norm: float) -> Tensor | float:
        """Return the routers' load-balancing loss: of each sequence, by its share of the step's targets."""
        if not self.balance or not out.router_logits or not batch.units:
            return 0.0
        fed = [unit.fed for unit in batch.units]
        weights = [sum(float(s.advantages_T[s.sampled_T].sum()) for s in unit.sequences) / norm for unit in batch.units]
        sequence_N = np.repeat(np.arange(len(fed)), fed)[self.context.rows(sum(fed))]
        device = self.engine.device
        return self.balance * balancing_loss(
            out.router_logits,
            out.experts_NLK,
            torch.as_tensor(sequence_N, device=device),
            torch.tensor(fed, dtype=torch.float32, device=device),
            torch.tensor(weights, dtype=torch.float32, device=device),
            self.context.add_up,
        )

    def _agreed(self, broken: set[int]) -> set[int]:
        """Return what any of the ranks found that compute this micro-batch together."""
        if self.engine.mesh.expert > 1:  # data parts too: all of them repeat the forward, or none
            return set().union(*self.engine.from_all(broken))
        return self.context.union(broken)

    def _nothing(self, trunk: bool = True) -> None:
        """Take part in the reductions of a backward with a gradient of zero. One rank alone has nobody to wait for it."""
        if self.engine.mesh.world == 1:
            return
        head = [p for name, p in self.engine.model.named_parameters() if name.startswith("mtp_layers.")]
        if trunk:
            own = {id(p) for p in head}
            self.engine.backward(loss.nothing(p for p in self.engine.model.parameters() if id(p) not in own))
        if self.engine.has_mtp:
            self.engine.backward_mtp(loss.nothing(head))

    def _forward(self, model: Transformer, batch: Batch, replayed: bool) -> Output:
        recorded = None
        if replayed:
            recorded = replay.build(batch.units, self.L, self.K, self.config.replay_tau, self.engine.device)
            recorded = self.context.cut_replay(recorded)
        attend = self.context.attend(batch.blocks, self.engine.device)
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
        assert batch.mtp is not None
        mtp, model = self.context.cut_mtp(batch.mtp), self.engine.model
        N = sum(unit.fed for unit in batch.units)
        residual, final = (self.context.gather(x.detach(), N) for x in (out.residual_ND, out.hidden_ND))
        attend = self.context.attend(mtp.blocks, self.engine.device)
        hidden = model.mtp(residual.index_select(0, mtp.source_M), mtp.next_M, mtp.positions_M, attend)
        teacher = final.index_select(0, mtp.teacher_R)
        value = loss.follow_loss(hidden.index_select(0, mtp.student_R), teacher, model.head())
        self.engine.backward_mtp(value / norm)
        figures.mtp_loss += float(value.detach())
        figures.mtp_tokens += len(mtp.student_R)

    def _note(
        self, figures: Figures, batch: Batch, out: Output, logprobs: Tensor, entropy: Tensor, value: float
    ) -> None:
        figures.entropy += float(entropy.sum())
        if not self.supervised:
            log_ratio = (logprobs - batch.sampled_logprobs_S).cpu().numpy()
            figures.log_ratio.append(log_ratio)
            figures.versions.append(batch.version_S)
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
