"""Block-FP8 from bf16 and back, deterministically: the one place that says how a published matrix becomes FP8.

A matrix [N, K] is cut into blocks of 128 x 128 (smaller at the edges). A block is q * s with q in E4M3, rounded to
nearest even, and s the smallest power of two for which nothing exceeds E4M3's largest number, 448. Because s is a power
of two:

- dividing and multiplying by it are exact, and so `from_blocks` is exact in bf16, on any device and in any kernel;
- what is quantised again stays as it is, even where hardware wants its scales as bare exponents (UE8M0).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shared.weights.manifest import Tensors
from shared.weights.torch_tensors import from_bits, to_bits

BLOCK = 128
SMALL = ("norm", "gate.weight", "e_score_correction_bias", "embed_tokens", "lm_head", "eh_proj")  # stay bf16
LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448 = 0.875 * 2^9


def is_fp8(name: str, dimensions: int) -> bool:
    """Which published tensors become FP8: the large matrices of attention, feed-forward and experts."""
    return dimensions == 2 and not any(part in name for part in SMALL)


def to_blocks(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """(q [N, K] float8_e4m3fn, s [ceil(N / 128), ceil(K / 128)] float32) of a finite matrix of any float type."""
    N, K = weight_NK.shape
    padded = torch.nn.functional.pad(weight_NK.float(), (0, -K % BLOCK, 0, -N % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax((1, 3))
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [0.5, 1)
    # A block of zeros, or of numbers so small that its scale would be none, has the scale of the smallest normal number.
    exponent = torch.where(mantissa <= LARGEST / 512, exponent - 9, exponent - 8).clamp(min=-126)
    s = torch.ldexp(torch.ones_like(largest), exponent)
    q = (blocks / s[:, None, :, None]).view_as(padded)[:N, :K].to(torch.float8_e4m3fn)
    return q.contiguous(), s


def from_blocks(q_NK: Tensor, s: Tensor) -> Tensor:
    """bf16 [N, K]; exact."""
    N, K = q_NK.shape
    scales = s.repeat_interleave(BLOCK, 0)[:N].repeat_interleave(BLOCK, 1)[:, :K]
    return (q_NK.float() * scales).bfloat16()


def in_fp8(tensors: Tensors) -> dict[str, np.ndarray]:
    """Published tensors as an engine in FP8 computes with them: what its blocks stand for, as bf16 bits again."""
    return {
        name: to_bits({"": from_blocks(*to_blocks(from_bits({"": array})[""]))})[""]
        if is_fp8(name, array.ndim)
        else array
        for name, array in tensors.items()
    }
