"""Compares the Triton kernel with the plain product on a device: `cpu` by Triton's interpreter, or `cuda`. A process, because
TRITON_INTERPRET counts when triton is imported."""

import sys

import torch

from shared.model.fp8 import per_token
from shared.model.grouped_fp8 import grouped_linear_fp8
from shared.model.moe import grouped_linear
from shared.weights.low_precision import round_matrix

device = sys.argv[1]
torch.manual_seed(0)
for K, N, ends in ((200, 72, [3, 3, 80]), (128, 64, [0, 64, 64])):
    x = (torch.randn(ends[-1], K) * torch.logspace(-3, 3, ends[-1])[:, None]).to(device).requires_grad_()
    weight = torch.randn(len(ends), N, K).to(device).requires_grad_()
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    found, expected = grouped_linear_fp8(x, weight, offsets), grouped_linear(per_token(x), weight, offsets)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5 * float(expected.detach().abs().max()))
    assert not torch.allclose(found, grouped_linear(x, weight, offsets), rtol=1e-3)
    up = torch.randn_like(found)
    for own, plain in zip(
        torch.autograd.grad(found, (x, weight), up), torch.autograd.grad(expected, (x, weight), up), strict=True
    ):
        torch.testing.assert_close(own, plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))

    # In bf16: what the emulation computes in float32 from the same numbers, rounded once.
    narrow_x = x.detach().bfloat16()
    rounded = torch.stack([round_matrix(matrix, "fp8") for matrix in weight.detach()])
    found = grouped_linear_fp8(narrow_x, rounded.bfloat16(), offsets)
    expected = grouped_linear(per_token(narrow_x.float()), rounded, offsets)
    assert found.dtype == torch.bfloat16
    one_rounding = 2**-8 if device == "cuda" else 2**-7  # Triton's interpreter cuts off what bf16 has no bits for
    torch.testing.assert_close(found.float(), expected, rtol=one_rounding, atol=1e-5 * float(expected.abs().max()))
print("equal")
