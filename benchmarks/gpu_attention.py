"""Tiles, warps and stages of FlexAttention's kernels: which are fastest for the shapes of benchmarks.gpu_step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from services.trainer import flex
from services.trainer.layout import Block


def _forward(rows: int, keys: int, warps: int, stages: int) -> dict[str, Any]:
    return {"fwd_BLOCK_M": rows, "fwd_BLOCK_N": keys, "fwd_num_warps": warps, "fwd_num_stages": stages}


def _backward(inner: int, outer: int, warps: int, stages: int) -> dict[str, Any]:
    return {
        "bwd_BLOCK_M1": inner, "bwd_BLOCK_N1": outer, "bwd_BLOCK_M2": outer, "bwd_BLOCK_N2": inner,
        "bwd_num_warps": warps, "bwd_num_stages": stages,
    }  # fmt: skip


SAFE: dict[str, Any] = {"ROWS_GUARANTEED_SAFE": True}  # every row sees itself
# Each candidate is a forward and a backward: each is timed alone, and the fastest of both make the choice.
CANDIDATES: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    64: [
        ({}, {}),
        (SAFE | _forward(128, 64, 4, 3), _backward(64, 128, 8, 3)),
        (SAFE | _forward(128, 128, 8, 3), _backward(64, 128, 4, 3)),
        (SAFE | _forward(128, 64, 8, 3), _backward(128, 128, 8, 2)),
        (SAFE | _forward(64, 64, 4, 3), _backward(64, 64, 4, 2)),
    ],
    128: [
        ({}, {}),
        (SAFE | _forward(128, 128, 8, 2), _backward(64, 128, 8, 2)),
        (SAFE | _forward(128, 64, 8, 2), _backward(64, 64, 4, 3)),
        (SAFE | _forward(128, 64, 4, 3), _backward(64, 64, 8, 3)),
    ],
}


def fastest(
    size: int,
    heads: int,
    groups: int,
    rows: int,
    length: int,
    milliseconds: Callable[..., float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Time the candidates over `rows` tokens in documents of `length`. Return the options of the fastest forward and backward."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(rows, n, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, groups, groups)
    )
    blocks = [Block(start, length, ()) for start in range(0, rows, length)]
    mask = flex.block_mask(blocks, np.arange(rows), rows, "cuda")
    scaled = (q.detach() * size**-0.5).requires_grad_()
    slope = torch.randn(rows, heads, size, device="cuda", dtype=torch.bfloat16)
    work = 4 * heads * size * rows * length / 2 / 1e9  # GFLOP of the forward; the backward does 2.5 times that
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    for forward, backward in CANDIDATES[size]:
        flex.OPTIONS[size] = forward | backward
        try:
            run = functools.partial(flex.attend, scaled, k, v, mask)
            back = functools.partial(torch.autograd.grad, run(), (scaled, k, v), slope, retain_graph=True)
            times = {"forward": milliseconds(run), "backward": milliseconds(back)}
        except Exception as error:  # a tile that the card has no room for
            say(f"  head {size}, {forward | backward}: {type(error).__name__}: {str(error)[-200:]}")
            continue
        rates = f"{work / times['forward']:.0f} and {2.5 * work / times['backward']:.0f} TFLOP/s"
        say(f"  head {size}: {times['forward']:.3f} ms, {times['backward']:.3f} ms, {rates}: {forward} {backward}")
        for part, options in (("forward", forward), ("backward", backward)):
            if part not in best or times[part] < best[part][0]:
                best[part] = times[part], options
    return best["forward"][1] | best["backward"][1]
