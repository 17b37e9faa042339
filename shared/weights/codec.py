"""One tensor's difference to bytes and back, bit-exact.

Between RL steps a bf16 weight moves by a few units in the last place, if at all. Read as unsigned integers, current
minus previous (wrapping) is then a tiny signed number; zigzag makes it a tiny unsigned one, the byte shuffle puts the
nearly constant high bytes side by side, and zstd-1 takes the rest. An XOR would spread a carry over many bits.

    SAME    nothing
    DENSE   zstd(shuffle(zigzag(current - previous)))                        every element
    SPARSE  zstd(shuffle(gaps) + shuffle(zigzag(current - previous)[changed]))   changed elements only

`gaps` are the differences of the changed flat indices (the first one counts from 0), uint32, or uint64 for tensors of
2^32 elements and more. All integers are little-endian.

Large bf16 tensors go through the loops of `compiled`, where Numba is installed; the bytes are the same without it.
"""

from __future__ import annotations

import functools
import sys
from enum import StrEnum
from types import ModuleType

import numpy as np
import zstandard

if sys.byteorder != "little":  # the format is little-endian, and so is every machine that torch runs on
    raise ImportError("shared.weights needs a little-endian machine")

LEVEL = 1  # higher levels gain about 2 % of size for several times the time
# Share of changed elements at which DENSE becomes the smaller: near one half, a little earlier or later with what the changes
# are. Between these two both are made, and the smaller one is kept; outside one of them is enough.
SPARSE_BELOW, DENSE_ABOVE = 0.25, 0.5
LEAST_COMPILED = (
    1 << 14
)  # elements; of smaller tensors NumPy is as fast, and a process with nothing larger loads no Numba
STRETCH = 1 << 17  # elements encoded at a time: both versions of them stay in the cache


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


@functools.cache
def _installed() -> ModuleType | None:
    try:
        from shared.weights import compiled
    except ImportError:
        return None
    return compiled


def _compiled(flat: np.ndarray) -> ModuleType | None:
    """Return the compiled loops if they take this tensor, or None."""
    return _installed() if flat.dtype == np.uint16 and LEAST_COMPILED <= len(flat) < 1 << 32 else None


def _planes(compiled: ModuleType, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return what SPARSE compresses, uint8 [6, changed]: a stretch at a time, so that each is read from memory once."""
    found, last = [np.empty((6, 0), np.uint8)], 0
    differ, marks = np.empty(STRETCH, bool), np.zeros(STRETCH // 8, np.uint8)  # a byte, then a bit for each element
    for start in range(0, len(before), STRETCH):
        old, new = before[start : start + STRETCH], after[start : start + STRETCH]
        count = np.count_nonzero(np.not_equal(old, new, out=differ[: len(old)]))
        if not count:
            continue
        differ[len(old) :] = False
        marks[:] = np.packbits(differ, bitorder="little")
        where, planes = np.empty(count, np.uint32), np.empty((6, count), np.uint8)
        compiled.positions(marks.view(np.uint64), where)
        compiled.gap_planes(where, np.uint32(start - last), *planes[:4])
        compiled.difference_planes(where, old, new, *planes[4:])
        last = start + int(where[-1])
        found.append(planes)
    return np.concatenate(found, 1)


class Room:
    """Memory for decoded tensors, taken in large blocks. The operating system gives those out as few huge pages; a tensor of a
    megabyte by itself comes in hundreds of small ones, which take longer to get than to fill. A block lives as long as any of its
    tensors."""

    BLOCK, LEAST = 16 << 20, 64 << 10  # bytes. Smaller tensors often stay unchanged, and would keep a whole block

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def like(self, flat: np.ndarray) -> np.ndarray:
        """Return an array of this one's length and dtype, its content undefined."""
        if not self.LEAST <= flat.nbytes <= self.BLOCK // 4:
            return np.empty_like(flat)
        if len(self._left) < flat.nbytes:
            self._left = np.empty(self.BLOCK, np.uint8)
        taken, self._left = np.split(self._left, [flat.nbytes])
        if self._left.nbytes:  # the next one begins on a cache line
            self._left = self._left[-taken.nbytes % 64 :]
        return taken.view(flat.dtype)


def encode(previous: np.ndarray, current: np.ndarray) -> tuple[Encoding, bytes, int]:
    """Return (encoding, bytes, number of changed elements). Both arrays have the same shape and dtype.

    The share of changed elements chooses: below SPARSE_BELOW it is SPARSE, from DENSE_ABOVE on DENSE. Between the two both are
    made and the smaller one is returned."""
    before, after = bits(previous), bits(current)
    if (compiled := _compiled(before)) is None:
        where = np.flatnonzero(before != after)
        changed = len(where)
    else:
        planes = _planes(compiled, before, after)
        changed = planes.shape[1]
    share = changed / max(1, len(before))
    if not changed:
        return Encoding.same, b"", 0
    found = []
    if share < DENSE_ABOVE:
        sparse = _compress(planes.reshape(-1)) if compiled else _sparse(before, after, where)
        found.append((Encoding.sparse, sparse))
    if share >= SPARSE_BELOW:
        found.append((Encoding.dense, _compress(_shuffle(_zigzag(after - before)))))
    encoding, data = min(found, key=lambda pair: len(pair[1]))
    return encoding, data, changed


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


def decode(
    previous: np.ndarray, encoding: Encoding, data: bytes | memoryview, changed: int, room: Room | None = None
) -> np.ndarray:
    """Inverse of `encode`; `previous` stays as it is. Raises Undecodable; the caller checks the result's checksum. `room`: where
    the result goes; None: into memory of its own."""
    before = bits(previous)
    if encoding is Encoding.same:
        if len(data):
            raise Undecodable(f"{len(data)} bytes for an unchanged tensor")
        return previous
    width = before.dtype.itemsize
    place = np.empty_like if room is None else room.like
    if encoding is Encoding.dense:
        raw = memoryview(unpack(data, before.nbytes))
        after = np.add(before, _unzigzag(_unshuffle(raw, before.dtype)), out=place(before))
    elif encoding is Encoding.sparse:
        gap_type = _gap_type(len(before))
        if not 0 < changed <= len(before):
            raise Undecodable(f"{changed} changed elements of {len(before)}")
        split = changed * gap_type.itemsize
        raw = memoryview(unpack(data, split + changed * width))
        after = place(before)
        after[:] = before
        compiled = _compiled(before)
        if compiled is None:
            where = _positions(_unshuffle(raw[:split], gap_type), len(before))
            after[where] += _unzigzag(_unshuffle(raw[split:], before.dtype))
        else:
            planes = np.frombuffer(raw, np.uint8).reshape(6, changed)
            if not compiled.apply(planes[:4].reshape(-1), *planes[4:], after):
                raise Undecodable("changed indices do not rise or leave the tensor")
    else:
        raise Undecodable(f"encoding {encoding!r} in a delta")
    return after.view(previous.dtype).reshape(previous.shape)
