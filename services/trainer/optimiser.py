"""One part of the policy's optimiser: a DeepSpeed engine over float32 masters, with a clip group of its own.

Why DeepSpeed's engine never sees the forward, and what decides about a step: `engine`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from services.trainer.experts import Experts
from shared.contracts.run import TrainConfig

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
MOMENTS = ("exp_avg", "exp_avg_sq")
EPSILON = 1e-8
LAST_NORM = "norm.weight"  # of the trunk: what the head reads


class WrongState(ValueError):
    """A checkpoint's state does not fit the model; the text names the tensor."""


class _Part(nn.Module):
    """Some of the model's parameters, as DeepSpeed's module: it owns their optimiser. The forward is the model's own."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in named.items():
            self.register_parameter(name.replace(".", "/"), parameter)


class _Replicas:
    """The ranks that hold the same experts, as DeepSpeed asks for those that hold the same parameters (its `mpu`)."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts

    def get_data_parallel_group(self) -> Any:
        return self._experts.data

    def get_data_parallel_world_size(self) -> int:
        return self._experts.data_ranks

    def get_data_parallel_rank(self) -> int:
        return self._experts.mesh.rank // self._experts.mesh.expert

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self._experts.mesh.expert_data_groups[self._experts.mesh.expert_rank]

    def get_model_parallel_group(self) -> None:
        return None

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


class Optimiser:
    """One DeepSpeed engine over `named`: AdamW, clipping, and its state by parameter name, whatever the ZeRO stage. `experts`: the
    parameters are stacks of experts, which may be divided among ranks."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        config: TrainConfig,
        rate: float,
        stage: int,
        experts: Experts | None = None,
    ) -> None:
        self.named = {name: p for name, p in named.items() if p.requires_grad}
        self.stage, self.clip = stage, config.clip_norm
        self.config, self.peak = config, rate
        self.experts = experts if experts is not None and experts.divided else None
        own = {LAST_NORM: config.last_norm_learning_rate}
        self.own_rates = {name: r for name, r in own.items() if r and name in self.named}
        on_cuda = all(p.is_cuda for p in self.named.values())
        self.base = torch.optim.AdamW(
            self.named.values(),
            lr=rate,
            betas=config.betas,
            eps=EPSILON,
            weight_decay=config.weight_decay,
            fused=on_cuda or None,  # one kernel that reads each moment once
        )
        self.base.register_step_pre_hook(self._before_step)
        self.engine = self._start()
        if stage:
            self._make_moments()
        self.world = torch.distributed.get_world_size()
        if stage == 0 and (self.world == 1 or self.experts):
            # One rank would copy every gradient, to sum it with nobody's. Of divided experts it would take all ranks for replicas.
            self.engine.enable_backward_allreduce = False
        self.grad_norm = math.inf
        self.moved = False  # whether the last step moved the masters
        self._allow: Callable[[], bool] = lambda: True

    def _start(self) -> Any:
        import deepspeed
        from deepspeed.utils import groups

        # The norm is ours (_before_step): DeepSpeed would pass over the optimiser where it is not finite, on some ranks alone.
        norm = {"compute_grad_norm": False} if self.stage else {}
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,  # a step has as many micro-batches as its tokens need
            "zero_optimization": {"stage": self.stage, **norm},
            "zero_allow_untested_optimizer": True,
            "gradient_allreduce_op": "sum",  # the loss is a sum over the global batch
            "gradient_clipping": 0.0,  # clipped in _before_step
            "steps_per_print": None,
        }
        replicas = _Replicas(self.experts) if self.experts else None
        engine, *_ = deepspeed.initialize(
            model=_Part(self.named), optimizer=self.base, config=settings, dist_init_required=False, mpu=replicas
        )
        groups.mpu = None  # DeepSpeed keeps it for every engine of the process
        return engine

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients. The loss is a sum over the global batch: ranks add up."""
        self.engine.backward(loss)

    def after_backward(self) -> None:
        """Another engine's `backward` made these gradients: reduce them where the ZeRO stage does so at every backward."""
        if self.stage == 2:
            self.engine._backward_epilogue()

    def step(self, share: float, allow: Callable[[], bool]) -> None:
        """Update the masters, or leave them and throw the gradients away. `share`: of the learning rates (warm-up and cool-down).
        `allow`: asked once `grad_norm` is that of this step; every rank must answer alike."""
        self._allow = allow
        for group in self.base.param_groups:
            group["lr"] = self.peak * share
        before = {name: self._master(self.named[name]).clone() for name in self.own_rates}
        self.moved, self.grad_norm = False, math.inf
        self.engine.step()
        if self.moved:
            for name, rate in self.own_rates.items():
                self._set_master(self.named[name], self._moved(before[name], self.named[name], rate * share))

    def _moved(self, before: Tensor, p: nn.Parameter, rate: float) -> Tensor:
        """AdamW's step at a rate of its own, from the moments that it has just made. A parameter group would say it shorter,
        but ZeRO steps groups one by one, and neither the look at all gradients nor the moments' links stand that."""
        t, (beta1, beta2) = self.steps, self.config.betas
        mean, square = (self._moment(p, name) for name in MOMENTS)
        direction = (mean / (1 - beta1**t)) / ((square / (1 - beta2**t)).sqrt() + EPSILON)
        return before * (1 - rate * self.config.weight_decay) - rate * direction

    def _before_step(self, optimiser: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """After the reduction over ranks, before anything moves: measure the gradient, then clip it or throw it away."""
        parameters = [p for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
        if self.stage == 0 and self.experts:
            for p in parameters:
                torch.distributed.all_reduce(p.grad, group=self.experts.data)
        norm = self._norm([p.grad for p in parameters])
        self.grad_norm = float(norm)
        self.moved = self._allow()
        if self.moved:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
            return
        for p in parameters:
            p.grad = None  # AdamW skips a parameter without gradient

    def _norm(self, gradients: Iterable[Tensor | None]) -> Tensor:
        """Return the norm of the whole gradient. Under ZeRO, and of divided experts, a rank holds a part of it: alone, ranks would
        decide differently whether it is finite, and wait for each other for ever."""
        device = next(iter(self.named.values())).device
        norm = torch.nn.utils.get_total_norm([g for g in gradients if g is not None]).to(device)
        if self.world == 1 or (self.stage == 0 and not self.experts):
            return norm
        square = norm.double().square()
        if self.stage == 0 and self.experts:
            square /= self.experts.data_ranks  # each of them has the same part
        torch.distributed.all_reduce(square)
        return square.sqrt().float()

    def state(self) -> dict[str, Tensor]:
        """Masters, moments and step count by name; on rank 0 independent of ZeRO stage and ranks."""
        result: dict[str, Tensor] = {}
        for name, p in self.named.items():
            result[name] = self._whole(p.detach())
            for moment in MOMENTS:
                result[f"{name}:{moment}"] = self._whole(self._moment(p, moment))
        result[":step"] = torch.tensor(float(self.steps))
        return result

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, p in self.named.items():
            shape = p.shape if self.experts is None else (p.shape[0] * self.experts.mesh.expert, *p.shape[1:])
            for key in (name, *(f"{name}:{m}" for m in MOMENTS)):
                if key not in state or state[key].shape != shape:
                    raise WrongState(f"checkpoint state {key!r}: found {_shape(state, key)}, expected {tuple(shape)}")
            own = self.experts.slice if self.experts else lambda whole: whole
            self._load_parameter(p, own(state[name]), {m: own(state[f"{name}:{m}"]) for m in MOMENTS})
        for moved, inner in self.base.state.items():
            inner["step"] = state[":step"].clone().to(moved.device)

    def _whole(self, own: Tensor) -> Tensor:
        return own if self.experts is None else self.experts.collect(own)

    def _make_moments(self) -> None:
        """AdamW makes its moments in its first step, and ZeRO links them to the parameters then. Here both are done ahead of it: a
        checkpoint may come first, or a step that moves nothing."""
        for group in self.base.param_groups:
            for flat in group["params"]:
                moments = {m: torch.zeros_like(flat) for m in MOMENTS}
                self.base.state.setdefault(flat, {"step": torch.tensor(0.0, device=flat.device), **moments})
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
            own = {m: x.clone().to(p.device) for m, x in moments.items()}
            self.base.state[p] = {"step": torch.tensor(0.0, device=p.device), **own}
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

    @property
    def steps(self) -> float:
        """How many steps the moments are the mean of."""
        return max((float(s["step"]) for s in self.base.state.values() if "step" in s), default=0.0)


def _shape(state: Mapping[str, Tensor], key: str) -> object:
    return tuple(state[key].shape) if key in state else "nothing"
