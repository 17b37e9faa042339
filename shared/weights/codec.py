"""One tensor's difference to bytes and back, bit-exact.

Between RL steps a bf16 weight moves by a few units in the last place, if at all. Read as unsigned integers, current
minus previous (wrapping) is then a tiny signed number; zigzag makes it a tiny unsigned one, the byte shuffle puts the
nearly constant high bytes side by side, and zstd-1 takes the rest. An XOR would spread a carry over many bits.

    SAME    nothing
    DENSE   zstd(shuffle(zigzag(current - previous)))                        every element
    SPARSE  zstd(shuffle(gaps) + shuffle(zigzag(current - previous)[changed]))   changed elements only

`gaps` are the differences of the changed flat indices (the first one counts from 0), uint32, or uint64 for tensors of
2^32 elements and more. All integers are little-endian.
"""

from __future__ import annotations

import sys
from enum import StrEnum

import numpy as np
import zstandard

if sys.byteorder != "little":  # the format is little-endian, and so is every machine that torch runs on
    raise ImportError("shared.weights needs a little-endian machine")

LEVEL = 1  # higher levels gain about 2 % of size for several times the time
# Share of changed elements at which DENSE becomes the smaller: near one half, a little earlier or later with what the changes
# are. Between these two both are made, and the smaller one is kept; outside one of them is enough.
SPARSE_BELOW, DENSE_ABOVE = 0.25, 0.5


class Encoding(StrEnum):
    full = "full"  # in a base: the raw bytes, at `start` of the unpacked safetensors part
    same = "same"
    dense = "dense"
    sparse = "sparse"


class Undecodable(ValueError):
    """The bytes are not what the encoding promises."""


def bits(array: np.ndarray) -> np.ndarray:
    """The elements' bits as a flat array of uint16 or uint32. No copy for contiguous input."""
    unsigned = {2: np.uint16, 4: np.uint32}.get(array.dtype.itemsize)
    if unsigned is None:
        raise TypeError(f"element size {array.dtype.itemsize}; allowed: 2 (bf16 as uint16) and 4 (float32)")
    return np.ascontiguousarray(array).reshape(-1).view(unsigned)


def _shuffle(values: np.ndarray) -> np.ndarray:
    """Return all lowest bytes, then all second bytes, and so on: [itemsize x values] uint8."""
    planes = np.empty((values.dtype.itemsize, len(values)), np.uint8)
    for place, plane in enumerate(planes):
        np.right_shift(values, 8 * place, out=plane, casting="unsafe")
    return planes.reshape(-1)


def _unshuffle(data: memoryview, dtype: np.dtype) -> np.ndarray:
    """Inverse of `_shuffle`. High bytes are mostly all zero, and then cost nothing."""
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    values = planes[0].astype(dtype)
    for place in range(1, dtype.itemsize):
        if planes[place].any():
            values |= planes[place].astype(dtype) << 8 * place
    return values


def _zigzag(difference: np.ndarray) -> np.ndarray:
    sign = difference >> (difference.dtype.itemsize * 8 - 1)
    values = difference << 1
    values ^= np.negative(sign, out=sign)
    return values


def _unzigzag(values: np.ndarray) -> np.ndarray:
    return (values >> 1) ^ (0 - (values & 1))


def _positions(gaps: np.ndarray, size: int) -> np.ndarray:
    """Return the changed indices [changed] int64. Raises Undecodable unless they rise strictly from 0 or more to below `size`."""
    where = np.cumsum(gaps, dtype=np.int64)
    # A sum that wraps around cannot hide: it falls.
    if where[0] < 0 or where[-1] >= size or (where[1:] <= where[:-1]).any():
        raise Undecodable("changed indices do not rise or leave the tensor")
    return where


def _gap_type(size: int) -> np.dtype:
    return np.dtype(np.uint32 if size < 1 << 32 else np.uint64)


def encode(previous: np.ndarray, current: np.ndarray) -> tuple[Encoding, bytes, int]:
    """Return (encoding, bytes, number of changed elements). Both arrays have the same shape and dtype.

    The share of changed elements chooses: below SPARSE_BELOW it is SPARSE, from DENSE_ABOVE on DENSE. Between the two both are
    made and the smaller one is returned."""
    before, after = bits(previous), bits(current)
    changed = np.flatnonzero(before != after)
    share = len(changed) / max(1, len(before))
    if not len(changed):
        return Encoding.same, b"", 0
    found = []
    if share < DENSE_ABOVE:
        found.append((Encoding.sparse, _sparse(before, after, changed)))
    if share >= SPARSE_BELOW:
        found.append((Encoding.dense, _compress(_shuffle(_zigzag(after - before)))))
    encoding, data = min(found, key=lambda pair: len(pair[1]))
    return encoding, data, len(changed)


def _sparse(before: np.ndarray, after: np.ndarray, changed: np.ndarray) -> bytes:
    gaps = np.empty(len(changed), _gap_type(len(before)))
    gaps[0] = changed[0]
    np.subtract(changed[1:], changed[:-1], out=gaps[1:], casting="unsafe")
    difference = after[changed]
    difference -= before[changed]
    return _compress(np.concatenate((_shuffle(gaps), _shuffle(_zigzag(difference)))))


def _compress(data: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(data.data)


def unpack(data: bytes | memoryview, size: int) -> bytes:
    """zstd frame of exactly `size` bytes; nothing larger is ever allocated."""
    try:
        if zstandard.get_frame_parameters(data).content_size != size:
            raise Undecodable(f"the frame does not hold {size} bytes")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Undecodable(str(error)) from None


def decode(previous: np.ndarray, encoding: Encoding, data: bytes | memoryview, changed: int) -> np.ndarray:
    """Inverse of `encode`; `previous` stays as it is. Raises Undecodable; the caller checks the result's checksum."""
    before = bits(previous)
    if encoding is Encoding.same:
        if len(data):
            raise Undecodable(f"{len(data)} bytes for an unchanged tensor")
        return previous
    width = before.dtype.itemsize
    if encoding is Encoding.dense:
        raw = memoryview(unpack(data, before.nbytes))
        after = before + _unzigzag(_unshuffle(raw, before.dtype))
    elif encoding is Encoding.sparse:
        gap_type = _gap_type(len(before))
        if not 0 < changed <= len(before):
            raise Undecodable(f"{changed} changed elements of {len(before)}")
        split = changed * gap_type.itemsize
        raw = memoryview(unpack(data, split + changed * width))
        where = _positions(_unshuffle(raw[:split], gap_type), len(before))
        after = before.copy()
        after[where] += _unzigzag(_unshuffle(raw[split:], before.dtype))
    else:
        raise Undecodable(f"encoding {encoding!r} in a delta")
    return after.view(previous.dtype).reshape(previous.shape)
