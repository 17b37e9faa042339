"""MXFP8 and NVFP4: every number of the small types, and roundings that are worked out by hand or by exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.weights.microscale import (
    E2M1,
    MX_BLOCK,
    NV_BLOCK,
    from_e2m1,
    from_mxfp8,
    from_nvfp4,
    to_e2m1,
    to_e4m3,
    to_mxfp8,
    to_nvfp4,
)


def e4m3(code: int) -> Fraction | None:
    """By the definition: sign, four bits of exponent (bias 7), three of mantissa; all ones are nan."""
    sign, exponent, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    if exponent == 0:
        return sign * Fraction(mantissa, 8) / 64
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def test_all_256_numbers_of_e4m3_are_those_of_its_definition_and_stay_as_they_are() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    for code, value in enumerate(values.tolist()):
        expected = e4m3(code)
        assert value != value if expected is None else Fraction(value) == expected
    finite = values.isfinite()
    assert finite.sum() == 254
    assert torch.equal(to_e4m3(values[finite]).view(torch.uint8), codes[finite])


def test_between_two_numbers_of_e4m3_the_nearer_is_taken_and_in_the_middle_the_even_code() -> None:
    positive = torch.arange(127, dtype=torch.uint8)  # 0 to 448
    low, high = positive[:-1], positive[1:]
    a, b = (x.view(torch.float8_e4m3fn).float() for x in (low, high))
    middle = (a + b) / 2
    assert torch.equal(to_e4m3(middle).view(torch.uint8), torch.where(low % 2 == 0, low, high))
    assert torch.equal(to_e4m3(torch.nextafter(middle, a)).view(torch.uint8), low)
    assert torch.equal(to_e4m3(torch.nextafter(middle, b)).view(torch.uint8), high)
    assert to_e4m3(torch.tensor([1e9, -1e9])).float().tolist() == [448.0, -448.0]


def test_all_16_numbers_of_e2m1_and_their_middles() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = from_e2m1(codes)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.equal(to_e2m1(values), codes)
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert from_e2m1(to_e2m1(middles)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]  # the even code
    assert from_e2m1(to_e2m1(-middles)).tolist() == [0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]
    up, down = (torch.nextafter(middles, torch.tensor(end)) for end in (torch.inf, 0.0))
    assert from_e2m1(to_e2m1(up)).tolist() == list(E2M1[1:])
    assert from_e2m1(to_e2m1(down)).tolist() == list(E2M1[:-1])
    assert from_e2m1(to_e2m1(torch.tensor([7.0, -1e9]))).tolist() == [6.0, -6.0]


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [
        (448.0, 0),
        (448.1, 1),
        (896.0, 1),
        (1.0, -8),
        (1.75, -8),
        (1.76, -7),
        (2.0**-130, -127),
        (3.0e38, 120),
        (0.0, -9),
    ],
)
def test_the_scale_of_a_block_is_the_smallest_power_of_two_that_cuts_nothing_off(largest: float, exponent: int) -> None:
    x = torch.zeros(1, MX_BLOCK)
    x[0, 5] = largest
    q, s = to_mxfp8(x)
    assert s.view(torch.uint8).item() == exponent + 127
    assert q.float().abs().max() <= 448
    assert from_mxfp8(q, s)[0, 5] == pytest.approx(largest, rel=1 / 16, abs=2.0**-135)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 100), st.integers(0, 1 << 30), st.integers(-30, 30))
def test_mxfp8_takes_the_nearest_number_that_the_scale_allows_and_rounds_once(
    rows: int, width: int, seed: int, power: int
) -> None:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    q, s = to_mxfp8(x)
    found = from_mxfp8(q, s)
    assert torch.equal(from_mxfp8(*to_mxfp8(found)), found)
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    table = table[table.isfinite()]
    scale = s.double().repeat_interleave(MX_BLOCK, -1)[:, :width]
    nearest = (table * scale[..., None] - x.double()[..., None]).abs().amin(-1)
    assert torch.equal((found.double() - x.double()).abs(), nearest)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 60), st.integers(0, 1 << 30), st.integers(-30, 30), st.booleans())
def test_nvfp4_takes_the_nearest_number_under_the_two_scales(
    rows: int, width: int, seed: int, power: int, by_row: bool
) -> None:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    codes, s, t = to_nvfp4(x, by_row=by_row)
    whole = x.abs().amax(-1, keepdim=True) if by_row else x.abs().max()
    assert torch.equal(t, whole / (6 * 448))
    blocks = torch.nn.functional.pad(x, (0, -width % NV_BLOCK)).unflatten(-1, (-1, NV_BLOCK))
    assert torch.equal(s.float(), (blocks.abs().amax(-1) / 6 / t).to(torch.float8_e4m3fn).float())
    scale = (s.float() * t).repeat_interleave(NV_BLOCK, -1)[:, :width]
    table = torch.tensor([*E2M1, *(-v for v in E2M1)]).double()
    nearest = (table * scale.double()[..., None] - x.double()[..., None]).abs().amin(-1)
    error = (from_nvfp4(codes, s, t).double() - x.double()).abs()
    assert (error <= nearest + 1e-6 * scale.double()).all()


def test_by_row_a_row_is_rounded_alike_in_every_batch_and_by_tensor_it_is_not() -> None:
    x = torch.randn(1, 48, generator=torch.Generator().manual_seed(0))
    beside = torch.cat([x, 100 * x.flip(-1)])
    assert torch.equal(from_mxfp8(*to_mxfp8(x))[0], from_mxfp8(*to_mxfp8(beside))[0])
    assert torch.equal(from_nvfp4(*to_nvfp4(x, by_row=True))[0], from_nvfp4(*to_nvfp4(beside, by_row=True))[0])
    assert not torch.equal(from_nvfp4(*to_nvfp4(x))[0], from_nvfp4(*to_nvfp4(beside))[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_stays_visible(bad: float) -> None:
    x = torch.ones(2, 64)
    x[0, 3] = bad
    assert from_mxfp8(*to_mxfp8(x))[0, :32].isnan().all()
    assert from_nvfp4(*to_nvfp4(x, by_row=True))[0, :16].isnan().all()
    assert from_mxfp8(*to_mxfp8(x))[1].isfinite().all()
    assert from_nvfp4(*to_nvfp4(x, by_row=True))[1].isfinite().all()


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(3, 40)
    assert torch.equal(from_mxfp8(*to_mxfp8(zeros)), zeros)
    assert torch.equal(from_nvfp4(*to_nvfp4(zeros)), zeros)
    assert torch.equal(from_nvfp4(*to_nvfp4(zeros, by_row=True)), zeros)
