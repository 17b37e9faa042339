"""The codec gives back every bit, for any pair of tensors and any encoding it chooses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.weights.codec import Encoding, Undecodable, decode, encode

SHAPES = st.sampled_from([(1,), (7,), (64,), (3, 5), (2, 3, 4), (257, 3), (0, 4)])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Two tensors of one shape and dtype, from equal through nearly equal to unrelated."""
    shape, seed = draw(SHAPES), draw(st.integers(0, 2**32 - 1))
    share = draw(st.sampled_from([0.0, 0.01, 0.2, 0.9, 1.0]))
    step = draw(st.sampled_from([1, 3, 2**16 - 1]))
    unsigned = draw(st.sampled_from([np.uint16, np.uint32]))
    rng = np.random.default_rng(seed)
    before = rng.integers(0, np.iinfo(unsigned).max, shape, dtype=unsigned, endpoint=True)
    moved = rng.integers(-step, step, shape, endpoint=True).astype(unsigned)
    after = np.where(rng.random(shape) < share, before + moved, before)
    kind = np.float32 if unsigned is np.uint32 else np.uint16
    return before.view(kind), after.view(kind)


@given(pairs())
@settings(max_examples=200, deadline=None)
def test_every_bit_comes_back_and_the_input_stays(pair: tuple[np.ndarray, np.ndarray]) -> None:
    before, after = pair
    kept = before.copy()
    encoding, data, changed = encode(before, after)
    result = decode(before, encoding, data, changed)
    assert result.dtype == after.dtype
    assert result.shape == after.shape
    assert result.tobytes() == after.tobytes()
    assert before.tobytes() == kept.tobytes()


def test_nan_payloads_infinities_and_negative_zero_survive() -> None:
    before = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF], np.uint16)
    after = before[::-1].copy()
    assert (decode(before, *encode(before, after)) == after).all()


def test_few_changes_are_sent_as_indices_and_none_as_nothing() -> None:
    before = np.arange(10_000, dtype=np.uint16)
    after = before.copy()
    assert encode(before, after) == (Encoding.same, b"", 0)
    after[[5, 9_000]] += 1
    encoding, data, changed = encode(before, after)
    assert (encoding, changed) == (Encoding.sparse, 2)
    assert len(data) < 64
    assert encode(before, before + np.arange(10_000, dtype=np.uint16) % 3 + 1)[0] is Encoding.dense


def test_what_does_not_decode_is_refused() -> None:
    before = np.arange(1_000, dtype=np.uint16)
    after = before.copy()
    after[[3, 500]] += 2
    encoding, data, changed = encode(before, after)
    with pytest.raises(Undecodable):
        decode(before, encoding, data, changed + 1)
    with pytest.raises(Undecodable):
        decode(before, encoding, data[:-1], changed)
    with pytest.raises(Undecodable):
        decode(before[:400], encoding, data, changed)  # an index outside
    with pytest.raises(Undecodable):
        decode(before, Encoding.dense, data, changed)
    with pytest.raises(Undecodable):
        decode(before, Encoding.same, data, changed)
    with pytest.raises(Undecodable):
        decode(before, Encoding.full, data, changed)
