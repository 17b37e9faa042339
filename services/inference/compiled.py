"""What the compiled loops (Numba) share: how they are compiled, and an exponential that vectorises.

Numba keeps machine code beside each file and looks at that file alone: after a change here, remove `__pycache__/*.nb?` of
those that use it."""

from __future__ import annotations

import numpy as np
from numba import njit

compiled = njit(fastmath=True, error_model="numpy", nogil=True, cache=True)


@compiled
def exponentials(scores, bits, powers, best, seen):  # type: ignore[no-untyped-def]
    """scores[t] = exp(scores[t] - best); returns their sum.

    Spelled out (Cephes' expf: exp(x) = 2^n * P(r), r = x - n ln 2, P of degree 7), because a call to the library's exp keeps
    the loop from being vectorised."""
    for t in range(seen):
        x = max(scores[t] - best, np.float32(-87.0))
        n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
        bits[t] = (np.int32(n) + np.int32(127)) << np.int32(23)
        r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        scores[t] = p * r * r + r + np.float32(1)
    total = np.float32(0)
    for t in range(seen):
        weight = scores[t] * powers[t]
        scores[t] = weight
        total += weight
    return total
