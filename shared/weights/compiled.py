"""The codec's loops over changed elements of a bf16 tensor, compiled by Numba. `codec` has the same in NumPy, for a machine without
Numba and for other tensors.

All release the interpreter's lock: a trainer encodes while its next step computes. Indices are unsigned, or Numba would look at
each whether it counts from the end. C: changed elements. A plane is one byte of each: uint8 [C].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint8, uint16, uint32, uint64


def _compiled(function: Any) -> Any:
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # no folder can be written in which machine code is kept: every process compiles it
        return njit(nogil=True, error_model="numpy")(function)


# The place of a word's lowest set bit: (bit * _FACTOR) >> 58 is another number for each of the 64 (de Bruijn).
_FACTOR = np.uint64(0x03F79D71B4CB0A89)
_PLACES = np.zeros(64, np.uint64)
_PLACES[[((1 << bit) * int(_FACTOR) & (1 << 64) - 1) >> 58 for bit in range(64)]] = np.arange(64)


@_compiled
def positions(bits_W: Any, where_C: Any) -> None:
    """Fill `where_C` (uint32) with the places of the set bits, rising. `bits_W`: uint64; bit i of word w is place 64 w + i."""
    at, start = uint64(0), uint64(0)
    for w in range(bits_W.size):
        word = bits_W[w]
        while word != uint64(0):
            lowest = word & (~word + uint64(1))
            where_C[at] = uint32(start + _PLACES[(lowest * _FACTOR) >> uint64(58)])
            at += uint64(1)
            word ^= lowest
        start += uint64(64)


@_compiled
def gap_planes(where_C: Any, before: Any, first: Any, second: Any, third: Any, fourth: Any) -> None:
    """Fill the four planes of the distances between changed places, lowest bytes first. `before`: uint32, what to add to the first
    place, for it to count from the changed one before."""
    for c in range(where_C.size):
        gap = uint32(where_C[c] + before) if c == 0 else uint32(where_C[c] - where_C[c - 1])
        first[c] = uint8(gap)
        second[c] = uint8(gap >> uint32(8))
        third[c] = uint8(gap >> uint32(16))
        fourth[c] = uint8(gap >> uint32(24))


@_compiled
def difference_planes(where_C: Any, before: Any, after: Any, low: Any, high: Any) -> None:
    """Fill the two planes of the zigzag differences of the changed elements. `before`, `after`: uint16, flat."""
    for c in range(where_C.size):
        place = uint64(where_C[c])
        moved = uint16(after[place] - before[place])
        zigzag = uint16(uint16(moved << uint16(1)) ^ uint16(-(uint32(moved) >> uint32(15))))
        low[c] = uint8(zigzag)
        high[c] = uint8(zigzag >> uint16(8))


@_compiled
def apply(gaps: Any, low: Any, high: Any, after: Any) -> bool:
    """Add the differences to `after` (uint16, flat), in place: the inverse of the three above. Return False, half done, where a
    place does not rise or leaves the tensor. `gaps`: uint8 [4 C], the planes one after the other."""
    count, size = uint64(low.size), uint64(after.size)
    place = uint64(0)
    for number in range(low.size):
        c = uint64(number)
        gap = (
            uint32(gaps[c])
            | uint32(gaps[c + count]) << uint32(8)
            | uint32(gaps[c + uint64(2) * count]) << uint32(16)
            | uint32(gaps[c + uint64(3) * count]) << uint32(24)
        )
        place += uint64(gap)
        if place >= size or (gap == uint32(0) and c > uint64(0)):
            return False
        zigzag = uint32(low[c]) | uint32(high[c]) << uint32(8)
        after[place] = uint16(after[place] + uint16((zigzag >> uint32(1)) ^ -(zigzag & uint32(1))))
    return True
