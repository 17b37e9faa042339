"""The optimiser side of the policy: DeepSpeed over float32 masters, in three parts.

Three DeepSpeed engines over one model, each with a clip group of its own: the trunk without its experts, the trunk's experts, and
the MTP layers, which have a learning rate of their own too. Experts may be divided among ranks (see `experts`), so their gradients
are summed over fewer ranks than the rest. The trunk's update is bit-equal with and without MTP. The forward runs on the bf16
values that are published (`shared.model.published`), gradients go straight through to the masters.

Invariants:
- Every rank takes the same decision about a step: the gradient's norm, which decides, is that of all ranks.
- A gradient of the trunk or its experts that is not finite, or together a spike, moves nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from services.trainer import loss
from services.trainer.experts import Experts, layers
from services.trainer.mesh import Mesh
from services.trainer.optimiser import Optimiser
from shared.contracts.run import TrainConfig
from shared.model import Transformer, published, published_tensors
from shared.model.checkpoint import KEPT_IN_FLOAT32, published_experts
from shared.model.fp8 import published_in_fp8, round_inputs, round_weights
from shared.model.moe import MixtureOfExperts
from shared.model.rounding import round_bf16
from shared.weights.low_precision import format_of

T = TypeVar("T")
NORMS = "trunk/:norms"  # in the state: gradient norms of the last steps
SPIKE_STEPS, LEAST_STEPS = 32, 8  # norms that a spike is measured against: at most, at least


def start_distributed() -> None:
    """Start one process without network and launcher: a group over a store in memory. Under a launcher (WORLD_SIZE is set):
    its group. Tensors on a CUDA device go through nccl, others through gloo. Repeating it does nothing.

    DeepSpeed would build a shared-memory operator at its first start (up to 2 minutes, needs a compiler). It is switched off.
    """
    import deepspeed.ops
    import torch.distributed as dist

    if dist.is_initialized():
        return
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend)
        return
    os.environ.setdefault("LOCAL_RANK", "0")
    # A group of one process needs no network; without this NCCL fails where loopback is the only interface.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _compute_deterministically() -> None:
    """Make CUDA add in the same order in every run: a resume is promised to be bit-equal. The gathers of rows that many branches
    share (prefixes, embeddings) would otherwise add up their gradients in whichever order threads arrive.

    An operation that cannot do so raises. With a warning alone, torch's attention adds in any order."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Every new tensor would be written twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # parts of a sum are added in float32
    # Compiled functions meet more shapes than torch's 8 (widths, experts without a row, with and without a gradient). Past the
    # limit torch computes them eagerly, without a word, and attention then holds a score for every pair.
    torch._dynamo.config.recompile_limit = 64


@dataclass(slots=True)
class StepResult:
    grad_norm: float  # of the trunk and its experts together
    mtp_grad_norm: float
    applied: bool  # False: that gradient was not finite, or a spike; nothing moved, the MTP layers neither
    mtp_applied: bool  # False: not so, or the MTP layers' own was not finite, and they alone stayed as they were
    spike: float = 0.0  # the norm above which this step's gradient was a spike; 0: it was none


class BrokenWeights(ArithmeticError):
    """A step left a weight that is not finite. The text names step and parameter. The process ends with it: the next one goes on
    from what is durable, which has no such weight."""


def as_published(
    model: Transformer, config: TrainConfig, arithmetic: torch.dtype = torch.float32
) -> contextlib.AbstractContextManager[None]:
    """Return a block in which every parameter has the value that engines compute with (see Engine.forward_weights)."""
    format = format_of(config.fp8)
    if format is None:
        return published(model, arithmetic)
    return published_in_fp8(model, format, arithmetic=arithmetic)


class Engine:
    """The policy in training. `with engine.forward_weights():` surround every forward and backward of a step."""

    def __init__(
        self,
        model: Transformer,
        config: TrainConfig,
        *,
        zero_stage: int = 0,
        context_ranks: int = 1,
        expert_ranks: int = 1,
        schedule: Callable[[float], float] | None = None,
        trains_trunk: bool = True,
        arithmetic: torch.dtype = torch.float32,
    ) -> None:
        """`context_ranks`: how many ranks share a sequence. `expert_ranks`: how many divide the experts; the model forgets those
        of the others. `schedule`: share of all learning rates by progress, in place of the run's cool-down. `trains_trunk`:
        False if only the MTP layers learn. `arithmetic`: of forward and backward, float32 or bfloat16. Raises mesh.BadMesh."""
        if arithmetic not in (torch.float32, torch.bfloat16):
            raise ValueError(f"arithmetic: found {arithmetic}; allowed: torch.float32, torch.bfloat16")
        if zero_stage not in (0, 1, 2):
            raise ValueError(f"zero_stage: found {zero_stage}; allowed: 0, 1, 2")
        start_distributed()
        self.mesh = Mesh.of(
            torch.distributed.get_rank(), torch.distributed.get_world_size(), context_ranks, expert_ranks
        )
        self.model, self.config = model, config
        self.schedule, self.trains_trunk, self.arithmetic = schedule, trains_trunk, arithmetic
        self.before_step: Callable[[], None] = lambda: None  # waits for whoever still reads what `state` lent
        self.device = next(model.parameters()).device
        if self.device.type == "cuda":
            _compute_deterministically()
        self.experts = Experts(self.mesh)
        self.experts.divide(model)
        of_experts = {id(p) for layer in layers(model) for p in (layer.gate_up, layer.down)}
        trunk: dict[str, nn.Parameter] = {}
        experts: dict[str, nn.Parameter] = {}
        mtp: dict[str, nn.Parameter] = {}
        for name, p in model.named_parameters():
            part = mtp if name.startswith("mtp_layers.") else experts if id(p) in of_experts else trunk
            part[name] = p
        self._trunk = Optimiser(trunk, config, config.learning_rate, zero_stage)
        self._experts: Optimiser | None = None
        if experts:
            self._experts = Optimiser(experts, config, config.learning_rate, zero_stage, self.experts)
        self._mtp: Optimiser | None = None
        if config.mtp and mtp:
            self._mtp = Optimiser(mtp, config, config.mtp_learning_rate, zero_stage)
        self._norms: deque[float] = deque(maxlen=SPIKE_STEPS)  # of steps that moved something

    @property
    def has_mtp(self) -> bool:
        return self._mtp is not None

    @contextlib.contextmanager
    def forward_weights(self) -> Iterator[None]:
        """Give every parameter its published bf16 value until the block ends; then the masters return.

        With `train.fp8` the matrices that engines hold in FP8 get the values that those engines compute with. The
        inputs of their products are rounded as the engines round them.
        """
        with as_published(self.model, self.config, self.arithmetic):
            yield

    def backward(self, loss: Tensor) -> None:
        self._trunk.backward(loss)
        if self._experts is not None:
            self._experts.after_backward()

    def backward_mtp(self, loss: Tensor) -> None:
        assert self._mtp is not None
        self._mtp.backward(loss)

    def step(self, step: int, progress: float = 0.0) -> StepResult:
        """Update the masters once; `step` counts from 1. Linear warm-up, then constant; a linear cool-down over the last
        `cooldown` of the run, of which `progress` (0 to 1) is over. The MTP layers follow at full rate to the end.

        Fresh moments are warmed up too, at whichever step of the run: Adam's first step moves every weight by the whole rate.
        Some sequence had a gradient: else call `rest`. Raises BrokenWeights."""
        self.before_step()
        leading = self._trunk if self.trains_trunk else self._mtp
        assert leading is not None
        warm = min(1.0, min(step, leading.steps + 1) / max(1, self.config.warmup_steps))
        left = (1.0 - progress) / self.config.cooldown if self.config.cooldown else 1.0
        share = warm * min(1.0, max(0.0, left))
        if self.schedule is not None:
            share = warm = warm * self.schedule(progress)
        limit = math.inf
        if self.config.spike and len(self._norms) >= LEAST_STEPS:
            limit = self.config.spike * statistics.median(self._norms)

        def norm() -> float:
            return math.hypot(self._trunk.grad_norm, self._experts.grad_norm if self._experts else 0.0)

        def both() -> bool:
            """Neither the trunk nor its experts move before both norms are known: the experts step within the trunk's step."""
            if self._experts is None:
                return norm() <= limit and math.isfinite(norm())
            self._experts.step(share, lambda: norm() <= limit and math.isfinite(norm()))
            return self._experts.moved

        if self.trains_trunk:
            self._trunk.step(share, both)
        applied = mtp_applied = self._trunk.moved or not self.trains_trunk
        if self.trains_trunk and applied and norm() > 0:
            self._norms.append(norm())
        if (mtp := self._mtp) is not None:
            mtp.step(warm, lambda: applied and math.isfinite(mtp.grad_norm))
            mtp_applied = mtp.moved
        self._require_finite(step)
        return StepResult(
            grad_norm=norm() if self.trains_trunk else 0.0,
            mtp_grad_norm=self._mtp.grad_norm if self._mtp else 0.0,
            applied=applied,
            mtp_applied=mtp_applied,
            spike=limit if math.isfinite(norm()) and norm() > limit else 0.0,
        )

    def _require_finite(self, step: int) -> None:
        """Every rank calls it: none goes on alone."""
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        found = None
        # One pass. A norm that is not finite may be a sum that overflowed: then every weight is looked at.
        if not math.isfinite(torch.nn.utils.get_total_norm(weights.values())):
            found = next((name for name, weight in weights.items() if not weight.isfinite().all()), None)
        if broken := [name for name in self.from_all(found) if name]:
            raise BrokenWeights(
                f"step {step}: the update left {broken[0]!r} with a value that is not finite; nothing of it is kept"
            )

    def rest(self) -> StepResult:
        """Make no step, where no sequence of the batch had a gradient: neither masters nor moments move, whatever the layout.
        (Some ranks hold gradients of zero, others none.) Every rank calls it."""
        trunk = (self._trunk, self._experts) if self.trains_trunk else ()
        for part in (*trunk, self._mtp):
            if part is not None:
                part.backward(loss.nothing(part.named.values()))
                part.step(0.0, lambda: False)
        return StepResult(grad_norm=0.0, mtp_grad_norm=0.0, applied=True, mtp_applied=True)

    def forget_norms(self) -> None:
        """Measure spikes against the steps to come alone: gradients may have become larger for good."""
        self._norms.clear()

    def from_all(self, found: T) -> list[T]:
        """Return what each rank found, by rank. Every rank calls it, in the same order."""
        if self.mesh.world == 1:
            return [found]
        all_of_them: list[Any] = [None] * self.mesh.world
        torch.distributed.all_gather_object(all_of_them, found)
        return all_of_them

    def published(self) -> dict[str, Tensor]:
        """Return the masters under their published names. Of divided experts rank 0 has them all, in bf16 on the host, and the
        other ranks have their own. Every rank calls it."""
        found = published_tensors(self.model)
        for number, layer in enumerate(self.model.layers):
            if self.experts.divided and isinstance(layer.mlp, MixtureOfExperts):
                stacks = [self.experts.collect(w.detach().bfloat16()) for w in (layer.mlp.gate_up, layer.mlp.down)]
                if self.mesh.rank == 0:
                    found |= published_experts(number, *stacks)
        return found

    def state(self, *, borrow: bool = False) -> dict[str, Tensor]:
        """Return all that a resume needs, by name, on the host. Every rank calls it; what rank 0 gets is whole, whatever the
        layout. `borrow`: tensors that lie there anyway are not copied; they hold until the next `step`."""
        result: dict[str, Tensor] = {}
        for prefix, part in (("trunk", self._trunk), ("trunk", self._experts), ("mtp", self._mtp)):
            if part is not None:
                result |= {f"{prefix}/{k}": v for k, v in part.state().items()}
        result[NORMS] = torch.tensor(list(self._norms))
        result |= {f"frozen/{n}": p.detach() for n, p in self._frozen().items()}
        result |= {f"buffer/{n}": b for n, b in self.model.named_buffers() if n.endswith(KEPT_IN_FLOAT32)}
        on_host = {name: tensor.to("cpu", torch.float32).contiguous() for name, tensor in result.items()}
        return on_host if borrow else {name: tensor.clone() for name, tensor in on_host.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of `state`. Raises WrongState, naming the tensor."""
        for prefix, part in (("trunk/", self._trunk), ("trunk/", self._experts), ("mtp/", self._mtp)):
            if part is not None:
                part.load({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
        self._norms = deque(state[NORMS].tolist() if NORMS in state else (), SPIKE_STEPS)
        for prefix, found in (
            ("frozen/", self._frozen()),
            ("buffer/", dict(self.model.named_buffers())),
        ):
            for key, value in state.items():
                if key.startswith(prefix) and key.removeprefix(prefix) in found:
                    found[key.removeprefix(prefix)].data.copy_(value)

    def _frozen(self) -> dict[str, nn.Parameter]:
        """MTP layers that this run does not train."""
        return {} if self._mtp else {n: p for n, p in self.model.named_parameters() if n.startswith("mtp_layers.")}


def freeze(model: Transformer, config: TrainConfig, arithmetic: torch.dtype = torch.float32) -> Transformer:
    """Return the model as a reference that is never trained: it computes as the policy in training does, in its arithmetic. Without
    them a KL penalty would see roundings as a difference of policies (in FP8 0.017 nats a token at step 0)."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = round_bf16(parameter.data).to(arithmetic)
    if (format := format_of(config.fp8)) and not model.emulates:
        round_weights(model, format)
        round_inputs(model, format)
    return model
