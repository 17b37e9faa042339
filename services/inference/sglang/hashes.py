"""SGLang's own hash of one tensor, as its `/weights_checker` reports it: 16 hex digits. Pure.

On the CPU it is the first half of a SHA-256; on a GPU a sum of mixed 32-bit words (its gpu_tensor_hash), here as one
compiled loop. Both hash the tensor's bytes as they lie in memory; neither knows names, shapes or types. Neither holds the
interpreter's lock, so that tensors are hashed side by side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numba import njit

Digest = Callable[[np.ndarray], str]

TILE = 8192  # words that are summed before they are mixed again
_M32 = np.uint64(0xFFFFFFFF)


def on_cpu(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).digest()[:8].hex()


def on_gpu(array: np.ndarray) -> str:
    """Tensors of less than 2^31 words."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if not data.nbytes:
        return f"{0:016x}"
    if rest := data.nbytes % 4:
        data = np.concatenate((data, np.zeros(4 - rest, np.uint8)))
    return f"{_splitmix64(int(_tiles(data.view(np.uint32)))):016x}"


@njit(nogil=True, cache=True)
def _tiles(words: np.ndarray) -> np.uint64:
    """The sum, modulo 2^64, of the hashes of all tiles of uint32 words. Two sums a tile, of words mixed with their places."""
    total = np.uint64(0)
    size = np.uint64(len(words) * 4) & _M32
    for start in range(0, len(words), TILE):
        first = second = np.uint64(0)
        for at in range(start, min(start + TILE, len(words))):
            word, place = np.uint64(words[at]), np.uint64(at)
            turned = (place << np.uint64(15) | place >> np.uint64(17)) & _M32
            first += _mixed(word ^ (place * np.uint64(0x27D4EB2D) + np.uint64(0x243F6A88)) & _M32 ^ turned)
            turned = (place << np.uint64(13) | place >> np.uint64(19)) & _M32
            second += _mixed(word ^ (place * np.uint64(0x165667B1) + np.uint64(0x02C74EE7)) & _M32 ^ turned)
        total += _mixed(first & _M32 ^ size) << np.uint64(32) | _mixed(second & _M32 ^ size)
    return total


@njit(nogil=True, cache=True)
def _mixed(x: np.uint64) -> np.uint64:
    """MurmurHash3's last step, in 32 bits."""
    x = (x ^ x >> np.uint64(16)) * np.uint64(0x85EBCA6B) & _M32
    x = (x ^ x >> np.uint64(13)) * np.uint64(0xC2B2AE35) & _M32
    return x ^ x >> np.uint64(16)


def _splitmix64(x: int) -> int:
    mask = (1 << 64) - 1
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & mask
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & mask
    return x ^ x >> 31
