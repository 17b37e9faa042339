"""MXFP8 and NVFP4 from floats and back, as hardware rounds them: to nearest, ties to even, never at random.

| format | numbers | scale of a block | further scale |
|---|---|---|---|
| MXFP8 | E4M3, to 448 | 32 numbers, E8M0: a power of two | none |
| NVFP4 | E2M1, to 6 | 16 numbers, E4M3 | float32, of the tensor or of each row |

Blocks lie along a row; the last one may be shorter. A block with a number that is not finite comes back as nan.

Sources: OCP Microscaling Formats (MX) Specification 1.0, sections 5.1 and 6.3; arXiv 2506.08027 (MXFP8: scales are rounded up);
arXiv 2509.25149, appendix on the NVFP4 scaling recipe.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

MX_BLOCK, NV_BLOCK = 32, 16
E4M3_MAX, E2M1_MAX = 448.0, 6.0
E8M0_BIAS, E8M0_NAN = 127, 255
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three bits of the magnitude


def to_e4m3(x: Tensor) -> Tensor:
    """Return the nearest float8_e4m3fn, ties to even; what exceeds 448 becomes 448. nan stays."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def to_e2m1(x: Tensor) -> Tensor:
    """Return the codes (sign, two bits of exponent, one of mantissa) of the nearest E2M1 numbers: uint8 below 16. Ties go to the
    even code; what exceeds 6 becomes 6. `x` must not be nan."""
    size = x.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for low, (a, b) in enumerate(itertools.pairwise(E2M1)):
        middle = (a + b) / 2
        code += (size > middle) if low % 2 == 0 else (size >= middle)
    return code | (x.signbit().to(torch.uint8) << 3)


def from_e2m1(code: Tensor) -> Tensor:
    """Return what uint8 codes below 16 stand for, in float32."""
    size = torch.tensor(E2M1, device=code.device)[(code & 7).long()]
    return torch.where(code >= 8, -size, size)


def _blocks(x: Tensor, size: int) -> Tensor:
    """[..., K] as [..., blocks, size] in float32, filled up with zeros."""
    return torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def to_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (q [..., K] float8_e4m3fn, s [..., ceil(K / 32)] float8_e8m0fnu) with x about q * s.

    s = 2^ceil(log2(largest / 448)), the smallest power of two under which nothing exceeds 448 (arXiv 2506.08027; the
    specification's own rule takes the floor, and cuts numbers off). It is kept between 2^-127 and 2^127. x / s is exact."""
    blocks = _blocks(x, MX_BLOCK)
    largest = blocks.abs().amax(-1)
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = torch.where(mantissa <= E4M3_MAX / 512, exponent - 9, exponent - 8).clamp(-E8M0_BIAS, E8M0_BIAS)
    exponent = torch.where(largest.isfinite(), exponent + E8M0_BIAS, E8M0_NAN)
    s = exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
    q = to_e4m3(blocks / s.float()[..., None]).flatten(-2)[..., : x.shape[-1]]
    return q, s


def from_mxfp8(q: Tensor, s: Tensor) -> Tensor:
    """Return q * s in float32, exactly."""
    return q.float() * s.float().repeat_interleave(MX_BLOCK, -1)[..., : q.shape[-1]]


def to_nvfp4(x: Tensor, *, by_row: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes [..., K] uint8 of E2M1, s [..., ceil(K / 16)] float8_e4m3fn, t float32) with x about code * s * t.

    t = largest / (6 * 448), of the whole tensor (a scalar) or, with `by_row`, of each row ([..., 1]). s = E4M3(largest of the
    block / 6 / t). A number is divided by s * t and rounded (arXiv 2509.25149). By row a token's numbers do not depend on which
    other tokens are in the batch."""
    blocks = _blocks(x, NV_BLOCK)
    largest = blocks.abs().amax(-1)
    whole = largest.amax(-1, keepdim=True) if by_row else largest.amax()
    t = whole / (E2M1_MAX * E4M3_MAX)
    t = torch.where(t == 0, 1.0, t)  # zeros, or numbers so small that the scale would be none
    s = to_e4m3(largest / E2M1_MAX / t)
    scale = s.float() * t
    scaled = (
        blocks / torch.where(scale == 0, torch.inf, scale)[..., None]
    )  # a block that is too small for a scale becomes 0
    codes = to_e2m1(scaled.nan_to_num(0.0)).flatten(-2)[..., : x.shape[-1]]
    return codes, s, t


def from_nvfp4(codes: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """Return code * (s * t) in float32."""
    return from_e2m1(codes) * (s.float() * t).repeat_interleave(NV_BLOCK, -1)[..., : codes.shape[-1]]
