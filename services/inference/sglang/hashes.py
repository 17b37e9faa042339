"""SGLang's own hash of one tensor, as its `/weights_checker` reports it: 16 hex digits. Pure.

On the CPU it is the first half of a SHA-256; on a GPU a sum of mixed 32-bit words (its gpu_tensor_hash), computed here in
numpy. Both hash the tensor's bytes as they lie in memory; neither knows names, shapes or types.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

Digest = Callable[[np.ndarray], str]

TILE = 8192  # words that are summed before they are mixed again
_SEED1, _SEED2 = 0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF
_POSITION1, _POSITION2 = 0x27D4EB2D, 0x165667B1
_TILES_AT_ONCE = 512  # 16 MB of words: the temporaries of a large tensor stay small


def on_cpu(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).digest()[:8].hex()


def on_gpu(array: np.ndarray) -> str:
    """Tensors of less than 2^31 words."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if not data.nbytes:
        return f"{0:016x}"
    if rest := data.nbytes % 4:
        data = np.concatenate((data, np.zeros(4 - rest, np.uint8)))
    words = data.view(np.uint32)
    total = 0
    for start in range(0, len(words), TILE * _TILES_AT_ONCE):
        total += _tiles(words[start : start + TILE * _TILES_AT_ONCE], start, len(words))
    return f"{_splitmix64(total & 0xFFFFFFFFFFFFFFFF):016x}"


def _tiles(words: np.ndarray, start: int, all_words: int) -> int:
    """The sum of the hashes of consecutive tiles, the first of which begins at word `start`."""
    places = np.arange(start, start + len(words), dtype=np.uint32)
    halves = []
    for factor, seed, turn in ((_POSITION1, _SEED1, 15), (_POSITION2, _SEED2, 13)):
        mixed = _fmix32(words ^ ((places * np.uint32(factor) + np.uint32(seed)) ^ _rotl32(places, turn)))
        sums = np.add.reduceat(mixed, np.arange(0, len(words), TILE), dtype=np.uint32)
        halves.append(_fmix32(sums ^ np.uint32(all_words * 4 & 0xFFFFFFFF)).astype(np.uint64))
    return int(((halves[0] << np.uint64(32)) | halves[1]).sum(dtype=np.uint64))


def _rotl32(x: np.ndarray, by: int) -> np.ndarray:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))


def _fmix32(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _splitmix64(x: int) -> int:
    mask = (1 << 64) - 1
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & mask
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & mask
    return x ^ x >> 31
