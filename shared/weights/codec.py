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
TRY_SPARSE_BELOW = (
    0.5  # share of changed elements above which DENSE is the smaller (measured: they cross near one half)
)


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


def _shuffle(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.dtype.itemsize).T).tobytes()


def _unshuffle(data: memoryview, dtype: np.dtype) -> np.ndarray:
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


def _zigzag(difference: np.ndarray) -> np.ndarray:
    sign = difference >> (difference.dtype.itemsize * 8 - 1)
    return (difference << 1) ^ (0 - sign)


def _unzigzag(values: np.ndarray) -> np.ndarray:
    return (values >> 1) ^ (0 - (values & 1))


def _gap_type(size: int) -> np.dtype:
    return np.dtype(np.uint32 if size < 1 << 32 else np.uint64)


def encode(previous: np.ndarray, current: np.ndarray) -> tuple[Encoding, bytes, int]:
    """Returns (encoding, bytes, number of changed elements), the smaller one of DENSE and SPARSE.

    Both arrays have the same shape and dtype."""
    before, after = bits(previous), bits(current)
    difference = after - before
    changed = np.flatnonzero(difference)
    if not len(changed):
        return Encoding.same, b"", 0
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    if len(changed) < TRY_SPARSE_BELOW * len(difference):
        gaps = np.diff(changed, prepend=0).astype(_gap_type(len(difference)))
        sparse = compressor.compress(_shuffle(gaps) + _shuffle(_zigzag(difference[changed])))
        dense = compressor.compress(_shuffle(_zigzag(difference)))
        if len(sparse) < len(dense):
            return Encoding.sparse, sparse, len(changed)
        return Encoding.dense, dense, len(changed)
    return Encoding.dense, compressor.compress(_shuffle(_zigzag(difference))), len(changed)


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
        where = np.cumsum(_unshuffle(raw[:split], gap_type), dtype=np.uint64)
        # A wrapped sum cannot hide: indices must rise strictly and stay inside.
        if where[-1] >= len(before) or (where[1:] <= where[:-1]).any():
            raise Undecodable("changed indices do not rise or leave the tensor")
        after = before.copy()
        after[where] += _unzigzag(_unshuffle(raw[split:], before.dtype))
    else:
        raise Undecodable(f"encoding {encoding!r} in a delta")
    return after.view(previous.dtype).reshape(previous.shape)
