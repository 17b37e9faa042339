"""The optimiser side of the policy: DeepSpeed over float32 masters, trunk and MTP layers apart.

Two DeepSpeed engines over one model: the trunk, and the MTP layers with a learning rate and a clip group of their own.
Neither sees the other's parameters, so that the trunk's update is bit-equal with and without MTP. The forward runs on the
bf16 values that are published (`shared.model.published`), gradients go straight through to the masters.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from shared.contracts.run import TrainConfig
from shared.model import Transformer, published
from shared.model.checkpoint import KEPT_IN_FLOAT32
from shared.model.fp8 import published_in_fp8

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
MOMENTS = ("exp_avg", "exp_avg_sq")
EPSILON = 1e-8
LAST_NORM = "norm.weight"  # of the trunk: what the head reads


class WrongState(ValueError):
    """A checkpoint's state does not fit the model; the text names the tensor."""


def start_distributed() -> None:
    """One process, no network and no launcher: a gloo group over a store in memory. Under a launcher (WORLD_SIZE is set):
    its group. Repeating it does nothing.

    DeepSpeed builds a shared-memory operator at its first start (up to 2 minutes, needs a compiler); a single process has
    nobody to share memory with, so it is switched off.
    """
    import deepspeed.ops
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import deepspeed

        deepspeed.init_distributed()
        return
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class _Part(nn.Module):
    """Some of the model's modules, as DeepSpeed's module: it owns their optimiser. The forward is the model's own."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


@dataclass(slots=True)
class StepResult:
    grad_norm: float
    mtp_grad_norm: float
    applied: bool  # False: the trunk's gradient was not finite; nothing moved, the MTP layers neither
    mtp_applied: bool  # False: not so, or the MTP layers' own was not finite, and they alone stayed as they were


class _Optimiser:
    """One DeepSpeed engine over `parts`: AdamW, clipping, and its state by parameter name, whatever the ZeRO stage."""

    def __init__(self, parts: Mapping[str, nn.Module], config: TrainConfig, rate: float, stage: int) -> None:
        import deepspeed

        module = _Part(parts)
        self.named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.stage, self.clip = stage, config.clip_norm
        self.config, self.peak = config, rate
        own = {LAST_NORM: config.last_norm_learning_rate}
        self.own_rates = {name: r for name, r in own.items() if r and name in self.named}
        self.base = torch.optim.AdamW(
            self.named.values(), lr=rate, betas=config.betas, eps=EPSILON, weight_decay=config.weight_decay
        )
        self.base.register_step_pre_hook(self._before_step)
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,  # a step has as many micro-batches as its tokens need
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0 if stage == 0 else self.clip,  # stage 0 hides the norm: clipped in _before_step
            "steps_per_print": None,
        }
        self.engine, *_ = deepspeed.initialize(
            model=module, optimizer=self.base, config=settings, dist_init_required=False
        )
        self.grad_norm = 0.0
        self.finite = True
        self._skip = False

    def backward(self, loss: Tensor) -> None:
        """Accumulates. DeepSpeed averages over ranks; the loss is a sum over the global batch, so that is undone."""
        self.engine.backward(loss * self.engine.world_size)

    def step(self, share: float, *, skip: bool = False) -> None:
        """`share`: of the learning rates (warm-up and cool-down). `skip`: the gradients are thrown away, as if not finite."""
        self._skip = skip
        for group in self.base.param_groups:
            group["lr"] = self.peak * share
        before = {name: self._master(self.named[name]).clone() for name in self.own_rates}
        steps = self._steps()
        self.engine.step()
        if self._steps() > steps:
            for name, rate in self.own_rates.items():
                self._set_master(self.named[name], self._moved(before[name], self.named[name], rate * share))
        if self.stage:
            self.grad_norm = float(self.engine.get_global_grad_norm() or 0.0)

    def _moved(self, before: Tensor, p: nn.Parameter, rate: float) -> Tensor:
        """AdamW's step at a rate of its own, from the moments that it has just made. A parameter group would say it shorter,
        but ZeRO steps groups one by one, and neither the look at all gradients nor the moments' links stand that."""
        t, (beta1, beta2) = self._steps(), self.config.betas
        mean, square = (self._moment(p, name) for name in MOMENTS)
        direction = (mean / (1 - beta1**t)) / ((square / (1 - beta2**t)).sqrt() + EPSILON)
        return before * (1 - rate * self.config.weight_decay) - rate * direction

    def _before_step(self, optimiser: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """After the reduction over ranks, before anything moves: clip and look whether all is finite."""
        parameters = [p for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
        if self.stage == 0:
            self.grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.clip)) if parameters else 0.0
            self.finite = bool(np.isfinite(self.grad_norm))
        else:
            self.finite = all(bool(torch.isfinite(p.grad).all()) for p in parameters)
        if self._skip or not self.finite:
            for p in parameters:
                p.grad = None  # AdamW skips a parameter without gradient

    def state(self) -> dict[str, Tensor]:
        """Masters, moments and step count by name; independent of ZeRO stage and ranks."""
        result: dict[str, Tensor] = {}
        for name, p in self.named.items():
            result[name] = p.detach()
            for moment in MOMENTS:
                result[f"{name}:{moment}"] = self._moment(p, moment)
        result[":step"] = torch.tensor(float(self._steps()))
        return result

    def load(self, state: Mapping[str, Tensor]) -> None:
        if self.stage:
            self._make_moments()
        for name, p in self.named.items():
            for key in (name, *(f"{name}:{m}" for m in MOMENTS)):
                if key not in state or state[key].shape != p.shape:
                    raise WrongState(f"checkpoint state {key!r}: found {_shape(state, key)}, expected {tuple(p.shape)}")
            self._load_parameter(p, state[name], {m: state[f"{name}:{m}"] for m in MOMENTS})
        for inner in self.base.state.values():
            inner["step"] = state[":step"].clone()

    def _make_moments(self) -> None:
        """AdamW makes its moments in its first step, and ZeRO links them to the parameters then: ahead of it here."""
        for group in self.base.param_groups:
            for flat in group["params"]:
                moments = {m: torch.zeros_like(flat) for m in MOMENTS}
                self.base.state.setdefault(flat, {"step": torch.tensor(0.0), **moments})
        self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _master(self, p: nn.Parameter) -> Tensor:
        if self.stage == 0:
            return p.detach()
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(p)

    def _set_master(self, p: nn.Parameter, value: Tensor) -> None:
        if self.stage:
            from deepspeed.utils import safe_set_full_fp32_param

            safe_set_full_fp32_param(p, value.to(p.device))
        p.data.copy_(value)

    def _load_parameter(self, p: nn.Parameter, value: Tensor, moments: Mapping[str, Tensor]) -> None:
        self._set_master(p, value)
        if self.stage == 0:
            self.base.state[p] = {"step": torch.tensor(0.0), **{m: x.clone().to(p.device) for m, x in moments.items()}}
            return
        from deepspeed.utils import safe_set_full_optimizer_state

        for moment, x in moments.items():
            safe_set_full_optimizer_state(p, x.to(p.device), moment)

    def _moment(self, p: nn.Parameter, name: str) -> Tensor:
        if self.stage == 0:
            found = self.base.state.get(p, {}).get(name)
        else:
            from deepspeed.utils import safe_get_full_optimizer_state

            found = safe_get_full_optimizer_state(p, name)
        return torch.zeros_like(p) if found is None else found.detach()

    def _steps(self) -> float:
        return max((float(s["step"]) for s in self.base.state.values() if "step" in s), default=0.0)


def _shape(state: Mapping[str, Tensor], key: str) -> object:
    return tuple(state[key].shape) if key in state else "nothing"


class Engine:
    """The policy in training. `with engine.forward_weights():` surround every forward and backward of a step."""

    def __init__(self, model: Transformer, config: TrainConfig, *, zero_stage: int = 0) -> None:
        if zero_stage not in (0, 1):
            raise ValueError(f"zero_stage: found {zero_stage}; allowed: 0, 1")
        start_distributed()
        self.model, self.config = model, config
        self.device = next(model.parameters()).device
        trunk = {n: m for n, m in model.named_children() if n != "mtp_layers"}
        self._trunk = _Optimiser(trunk, config, config.learning_rate, zero_stage)
        self._mtp: _Optimiser | None = None
        if config.mtp and len(model.mtp_layers):
            self._mtp = _Optimiser({"mtp_layers": model.mtp_layers}, config, config.mtp_learning_rate, zero_stage)

    @property
    def has_mtp(self) -> bool:
        return self._mtp is not None

    @contextlib.contextmanager
    def forward_weights(self) -> Iterator[None]:
        """Every parameter holds its bf16 value, the one that is published; with `train.fp8` what FP8 engines make of it, and they
        round the inputs of the same products."""
        with (published_in_fp8 if self.config.fp8 else published)(self.model):
            yield

    def backward(self, loss: Tensor) -> None:
        self._trunk.backward(loss)

    def backward_mtp(self, loss: Tensor) -> None:
        assert self._mtp is not None
        self._mtp.backward(loss)

    def step(self, step: int, progress: float = 0.0) -> StepResult:
        """One update of the masters; `step` counts from 1. Linear warm-up, then constant; a linear cool-down over the last
        `cooldown` of the run, of which `progress` (0 to 1) is over. The MTP layers follow at full rate to the end."""
        warm = min(1.0, step / max(1, self.config.warmup_steps))
        left = (1.0 - progress) / self.config.cooldown if self.config.cooldown else 1.0
        self._trunk.step(warm * min(1.0, max(0.0, left)))
        applied = mtp_applied = self._trunk.finite
        if self._mtp is not None:
            self._mtp.step(warm, skip=not applied)
            mtp_applied = applied and self._mtp.finite
        return StepResult(self._trunk.grad_norm, self._mtp.grad_norm if self._mtp else 0.0, applied, mtp_applied)

    def state(self) -> dict[str, Tensor]:
        """All that a resume needs, by name, on the host."""
        result = {f"trunk/{k}": v for k, v in self._trunk.state().items()}
        if self._mtp is not None:
            result |= {f"mtp/{k}": v for k, v in self._mtp.state().items()}
        result |= {f"frozen/{n}": p.detach() for n, p in self._frozen().items()}
        result |= {f"buffer/{n}": b for n, b in self.model.named_buffers() if n.endswith(KEPT_IN_FLOAT32)}
        return {name: tensor.to("cpu", torch.float32).contiguous().clone() for name, tensor in result.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of `state`. Raises WrongState, naming the tensor."""
        self._trunk.load({k.removeprefix("trunk/"): v for k, v in state.items() if k.startswith("trunk/")})
        if self._mtp is not None:
            self._mtp.load({k.removeprefix("mtp/"): v for k, v in state.items() if k.startswith("mtp/")})
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
