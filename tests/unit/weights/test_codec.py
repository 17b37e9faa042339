"""The codec gives back every bit, for any pair of tensors and any encoding it chooses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.weights import codec
from shared.weights.codec import STRETCH, Encoding, Room, Undecodable, decode, encode

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


def large(seed: int, share: float, size: int = 3 * STRETCH + 77) -> tuple[np.ndarray, np.ndarray]:
    """Two bf16 tensors that the compiled loops take, over several stretches; with NaN, infinities and every other pattern."""
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 1 << 16, size, np.uint16)
    after = before.copy()
    where = np.flatnonzero(rng.random(size) < share)
    after[where] += rng.choice(np.array([1, 2, 300, 32768, 65535], np.uint16), len(where))
    return before, after


@pytest.mark.parametrize("share", [1e-6, 1e-4, 0.01, 0.12, 0.3, 0.49, 0.6])
def test_with_and_without_compiled_loops_the_bytes_are_the_same(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = large(1, share)
    after[[0, STRETCH - 1, STRETCH, -1]] += 1  # first and last, and where stretches meet
    assert codec._compiled(before) is not None, "Numba is installed where tests run"
    encoded = encode(before, after)
    decoded = decode(before, *encoded)
    monkeypatch.setattr(codec, "_installed", lambda: None)
    assert encode(before, after) == encoded
    assert (decode(before, *encoded) == after).all()
    assert (decoded == after).all()


def test_a_large_tensor_with_one_change_far_behind_is_sent_as_that() -> None:
    before, _ = large(2, 0.0)
    after = before.copy()
    assert encode(before, after) == (Encoding.same, b"", 0)
    after[-1] ^= 0x8000
    encoding, data, changed = encode(before, after)
    assert (encoding, changed) == (Encoding.sparse, 1)
    assert len(data) < 32
    assert (decode(before, encoding, data, changed) == after).all()


def test_indices_of_a_large_tensor_that_do_not_rise_or_leave_it_are_refused() -> None:
    before, after = large(3, 0.01)
    encoding, data, changed = encode(before, after)
    with pytest.raises(Undecodable):
        decode(before[: len(before) // 2], encoding, data, changed)  # an index outside
    planes = np.frombuffer(codec.unpack(data, changed * 6), np.uint8).copy().reshape(6, changed)
    planes[:4, 5] = 0  # the sixth index is the fifth again
    with pytest.raises(Undecodable):
        decode(before, encoding, codec._compress(planes.reshape(-1)), changed)


def test_decoded_tensors_share_blocks_and_no_byte() -> None:
    room = Room()
    drawn = [large(seed, 0.05, size) for seed, size in enumerate((40_000, 33_333, 1_000_001, 3_000_000, 500, 40_001))]
    found = [decode(before, *encode(before, after), room) for before, after in drawn]
    assert all((one == after).all() for one, (_, after) in zip(found, drawn, strict=True))
    assert not any(np.shares_memory(a, b) for i, a in enumerate(found) for b in found[:i])
