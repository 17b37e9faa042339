"""The experts' product on CUDA in emulated FP8: a Triton kernel that rounds each row's input as it reads it.

Equal to `grouped_linear(per_token(x), weight, ends)` but for the order of float32 sums: the same groups of 128 numbers, IEEE
division, E4M3 to nearest even. The rounded rows are never written to memory. Gradients pass the rounding unchanged.

Weights in bf16 are multiplied by the tensor cores: an E4M3 number is a bf16 number, and its group's scale is applied to the float32
sum over the group. The emulation in bf16 rounds the scaled number once more, so the kernel is the more exact of the two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from shared.weights.blocks import LARGEST

GROUP = 128
LEAST = 1e-10  # as shared.model.fp8.LEAST

# Of a program's tile rows and columns, then warps and stages.
Tile = tuple[int, int, int, int]
TILES: dict[torch.dtype, Tile] = {torch.bfloat16: (64, 256, 8, 2)}  # the fastest of six on an H200
PLAIN: Tile = (64, 64, 4, 2)


@triton.jit
def _to_e4m3(q):  # type: ignore[no-untyped-def]
    """The nearest E4M3 number of at most 448, ties to even, in float32. Exact arithmetic: casts round differently by device. A step
    between E4M3 numbers is 2^-3 of a number's power of two, at least 2^-9. Adding 1.5 * 2^23 rounds to a whole number."""
    exponent = tl.maximum(((q.to(tl.int32, bitcast=True) >> 23) & 255) - 127, -6)
    step = ((exponent + 124) << 23).to(tl.float32, bitcast=True)
    per_step = ((130 - exponent) << 23).to(tl.float32, bitcast=True)
    return ((q * per_step + 12582912.0) - 12582912.0) * step


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x_MK, w_ENK, out_MN, expert_T, first_T, end_T, K, N, E, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TENSOR_CORES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert = tl.load(expert_T + tile)
    if expert < E:
        rows = tl.load(first_T + tile) + tl.arange(0, ROWS)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mine, inside = rows < tl.load(end_T + tile), columns < N
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, K, GROUP):
            k = start + tl.arange(0, GROUP)
            there = k < K
            at = rows[:, None].to(tl.int64) * K + k[None, :]
            x = tl.load(x_MK + at, mask=mine[:, None] & there[None, :], other=0.0).to(tl.float32)
            scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), LEAST), LARGEST)
            q = tl.div_rn(x, scale[:, None] + tl.zeros((ROWS, GROUP), dtype=tl.float32))
            q = _to_e4m3(tl.minimum(tl.maximum(q, -LARGEST), LARGEST))
            at = (expert.to(tl.int64) * N + columns[None, :]) * K + k[:, None]
            w = tl.load(w_ENK + at, mask=inside[None, :] & there[:, None], other=0.0)
            if TENSOR_CORES:
                total += tl.dot(q.to(tl.bfloat16), w) * scale[:, None]
            else:
                total += tl.dot(q * scale[:, None], w.to(tl.float32), input_precision="ieee")
        at = rows[:, None].to(tl.int64) * N + columns[None, :]
        tl.store(out_MN + at, total.to(out_MN.dtype.element_ty), mask=mine[:, None] & inside[None, :])


def _forward(x_MK: Tensor, w_ENK: Tensor, ends_E: Tensor) -> Tensor:
    (M, K), (E, N, _) = x_MK.shape, w_ENK.shape
    out = x_MK.new_empty(M, N)
    if M == 0:
        return out
    ROWS, COLUMNS, warps, stages = TILES.get(w_ENK.dtype, PLAIN)
    starts = torch.cat((ends_E.new_zeros(1), ends_E[:-1]))
    tiles = (ends_E - starts + ROWS - 1) // ROWS  # of each expert
    last = tiles.cumsum(0)
    most = triton.cdiv(M, ROWS) + E  # known without asking the device; programs beyond the last tile do nothing
    tile = torch.arange(most, device=x_MK.device)
    expert = torch.searchsorted(last, tile, right=True)
    known = expert.clamp(max=E - 1)
    first = starts[known] + (tile - (last - tiles)[known]) * ROWS
    _product[(most, triton.cdiv(N, COLUMNS))](
        x_MK.contiguous(), w_ENK.contiguous(), out, expert.int(), first.int(), ends_E[known].int(), K, N, E,
        LARGEST=LARGEST, LEAST=LEAST, GROUP=GROUP, ROWS=ROWS, COLUMNS=COLUMNS,
        TENSOR_CORES=w_ENK.is_cuda and w_ENK.dtype == torch.bfloat16,  # Triton's interpreter multiplies no bf16
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _forward(x, weight, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        from shared.model.fp8 import per_token

        x, weight, ends = ctx.saved_tensors
        grad = gradients[0].contiguous()
        return F.grouped_mm(grad, weight, offs=ends), F.grouped_mm(grad.T, per_token(x), offs=ends), None


def grouped_linear_fp8(x_MD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """As shared.model.moe.grouped_linear, with x rounded per row and 128 numbers. `weight_EOD` is rounded already."""
    found: Tensor = _Grouped.apply(x_MD, weight_EOD, ends_E)
    return found
