"""Elementwise functions that CUDA runs as one kernel.

Eager torch reads and writes device memory once for every operation. torch.compile makes one kernel of a function. Only
computing in 16 bits on CUDA uses it. Elsewhere, and in the float32 that everything is compared with, a function runs as it is
written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
HALF = (torch.bfloat16, torch.float16)


def is_half_on_cuda(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in HALF


def compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, compiled at its first call (seconds). The first call with another number of rows compiles it once
    more, for any number of rows."""

    @functools.cache
    def made() -> Callable[..., Any]:
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        found: T = made()(*args, **kwargs)
        return found

    return call


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, compiled where its first argument is in 16 bits on CUDA."""
    quick = compiled(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        first = args[0]
        if isinstance(first, Tensor) and is_half_on_cuda(first):
            return quick(*args, **kwargs)
        return function(*args, **kwargs)

    return call
