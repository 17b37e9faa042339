"""Plain loops: norms, exponentials, the gated unit, the router. Numba vectorises them as they stand."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from services.inference.kernels import compiled
from services.inference.kernels.vectors import SIZE


@intrinsic  # type: ignore[misc]
def _pointer(typing, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[misc]
def _bits_as_float(typing, bits):  # type: ignore[no-untyped-def]
    def generate(context: Any, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@compiled
def address(array):  # type: ignore[no-untyped-def]
    """int64, which NumPy's own is not: sums of both kinds would be floats."""
    return np.int64(array.ctypes.data)


@compiled
def floats(address, shape):  # type: ignore[no-untyped-def]
    """The float32 array at an address."""
    return carray(_pointer(address), shape, np.float32)


@compiled
def exponential(x):  # type: ignore[no-untyped-def]
    """exp(x) for -87 <= x <= 88, 0 below up to rounding.

    Spelled out (Cephes' expf: exp(x) = 2^n * P(r), r = x - n ln 2, P of degree 7), because a call to the library's exp keeps
    a loop from being vectorised."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = _bits_as_float(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return (p * r * r + r + np.float32(1)) * power


@compiled
def exponentials(scores, best):  # type: ignore[no-untyped-def]
    """scores[t] = exp(scores[t] - best); returns their sum."""
    total = np.float32(0)
    for t in range(len(scores)):
        weight = exponential(scores[t] - best)
        scores[t] = weight
        total += weight
    return total


@compiled
def lookup(embedding, per_token, per_place, tokens, out):  # type: ignore[no-untyped-def]
    """Rows of the embedding at an address, whose elements lie so far apart."""
    N, D = out.shape
    for n in range(N):
        row = floats(embedding + SIZE * tokens[n] * per_token, ((D - 1) * per_place + 1,))
        for d in range(D):
            out[n, d] = row[d * per_place]


@compiled
def norm(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """RMS norm of rows."""
    N, D = x.shape
    for n in range(N):
        total = np.float32(0)
        for d in range(D):
            total += x[n, d] * x[n, d]
        scale = np.float32(1) / np.sqrt(total / np.float32(D) + np.float32(eps))
        for d in range(D):
            out[n, d] = x[n, d] * scale * weight[d]


@compiled
def gated(wide, width, out):  # type: ignore[no-untyped-def]
    """out[m] = silu(gate) * up; `wide` has `width` of gate, then as many of up."""
    for m in range(len(wide)):
        for i in range(width):
            gate = wide[m, i]
            # At 1 / (1 + exp(88)) the unit is 0 up to rounding.
            out[m, i] = gate / (np.float32(1) + exponential(min(-gate, np.float32(88)))) * wide[m, width + i]


@compiled
def route(x, router, K, renormalise, experts, weights, ends, slot):  # type: ignore[no-untyped-def]
    """Softmax router: the K best experts of each token, best first, and their weights; `ends`: copies up to each expert in
    expert order; `slot`: where each copy stands, tokens in order within an expert."""
    N, D = x.shape
    E = len(router)
    scores = np.empty(E, np.float32)
    ends[:] = 0
    for n in range(N):
        best = np.float32(-1e30)
        for e in range(E):
            score = np.float32(0)
            for d in range(D):
                score += x[n, d] * router[e, d]
            scores[e] = score
            best = max(best, score)
        total = np.float32(0)
        for e in range(E):
            scores[e] = np.exp(scores[e] - best)
            total += scores[e]
        chosen = np.float32(0)
        for k in range(K):
            top = 0
            for e in range(1, E):
                if scores[e] > scores[top]:
                    top = e
            experts[n, k] = top
            weights[n, k] = scores[top] / total
            chosen += weights[n, k]
            scores[top] = -1
            ends[top] += 1
        if renormalise:
            for k in range(K):
                weights[n, k] /= chosen + np.float32(1e-20)
    start = 0
    starts = np.empty(E, np.int64)
    for e in range(E):
        starts[e] = start
        start += ends[e]
        ends[e] = start
    for n in range(N):
        for k in range(K):
            e = experts[n, k]
            slot[n, k] = starts[e]
            starts[e] += 1


@compiled
def dispatch(x, slot, out):  # type: ignore[no-untyped-def]
    N, K = slot.shape
    for n in range(N):
        for k in range(K):
            s = slot[n, k]
            for d in range(x.shape[1]):
                out[s, d] = x[n, d]


@compiled
def combine(x, computed, slot, weights):  # type: ignore[no-untyped-def]
    """x[n] += sum over k of weights[n, k] * computed[slot[n, k]]."""
    N, K = slot.shape
    for n in range(N):
        for k in range(K):
            s, weight = slot[n, k], weights[n, k]
            for d in range(x.shape[1]):
                x[n, d] += weight * computed[s, d]
