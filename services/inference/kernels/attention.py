"""Attention of single tokens over their rows of the cache, two query heads at a time.

The cache is read once for both heads, and that is what bounds it: a position's key and value come from memory, their products
are few. `scores` takes half a vector of positions for two heads, so that one vector holds all their sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from services.inference.kernels import compiled, inlined
from services.inference.kernels.pointwise import address, exponentials, floats
from services.inference.kernels.vectors import I64, SIZE, WIDTH, Emitter

POSITIONS = WIDTH // 2


@intrinsic  # type: ignore[misc]
def _scores(typing, q, other, keys, D, out, out_other):  # type: ignore[no-untyped-def]
    """Of POSITIONS keys [., D] with two heads [D]."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        q, other, keys, D, out, out_other = arguments
        emit = Emitter(builder)
        sums = emit.variables(WIDTH)
        rows = [emit.at(keys, I64(t), D) for t in range(POSITIONS)]
        with cgutils.for_range_slice(builder, I64(0), D, I64(WIDTH), I64) as (d, _):
            of_one, of_other = emit.load(emit.at(q, d)), emit.load(emit.at(other, d))
            for t, row in enumerate(rows):
                key = emit.load(emit.at(row, d))
                emit.add_product(sums[t], of_one, key)
                emit.add_product(sums[POSITIONS + t], of_other, key)
        both = emit.sums([builder.load(s) for s in sums])
        emit.store(emit.shuffle(both, both, list(range(POSITIONS))), out)
        emit.store(emit.shuffle(both, both, list(range(POSITIONS, WIDTH))), out_other)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


def _mixing(vectors: int) -> Any:
    """mix(weights, other, values, D, n, out, out_other): `vectors` of the sums over n positions of weight times value [., D]."""

    @intrinsic  # type: ignore[misc]
    def mix(typing, weights, other, values, D, n, out, out_other):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            weights, other, values, D, n, out, out_other = arguments
            emit = Emitter(builder)
            sums, more = [
                [emit.variables(vectors) for _ in range(2)] for _ in range(2)
            ]  # of even positions, of odd ones

            def position(t: Any, into: list[list[Any]]) -> None:
                value = emit.at(values, t, D)
                both = [emit.spread(emit.at(each, t)) for each in (weights, other)]
                for v in range(vectors):
                    loaded = emit.load(value, WIDTH * v)
                    for head, weight in enumerate(both):
                        emit.add_product(into[head][v], weight, loaded)

            even = builder.and_(n, I64(-2))
            with cgutils.for_range_slice(builder, I64(0), even, I64(2), I64) as (t, _):
                position(t, sums)
                position(builder.add(t, I64(1)), more)
            with builder.if_then(builder.icmp_signed("!=", even, n)):
                position(even, sums)
            for head, target in enumerate((out, out_other)):
                for v in range(vectors):
                    emit.store(
                        builder.fadd(builder.load(sums[head][v]), builder.load(more[head][v])), target, WIDTH * v
                    )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return mix


_mix_two, _mix_one = _mixing(2), _mixing(1)


@compiled
def rotate(x, normed, weight, eps, cos, sin):  # type: ignore[no-untyped-def]
    """RMS norm (or `weight` alone, where heads are not normed) and rotary embedding of one head, in place."""
    D = len(x)
    half = D // 2
    scale = np.float32(1)
    if normed:
        total = np.float32(0)
        for d in range(D):
            total += x[d] * x[d]
        scale = np.float32(1) / np.sqrt(total / np.float32(D) + np.float32(eps))
    low, high = x[:half], x[half:]
    for d in range(half):
        a = low[d] * scale * weight[d]
        b = high[d] * scale * weight[half + d]
        low[d] = a * cos[d] + b * sin[d]
        high[d] = b * cos[half + d] + a * sin[half + d]


@inlined
def two_heads(q, other, keys, Dk, values, Dv, n, scratch, out, out_other):  # type: ignore[no-untyped-def]
    """Attends from two heads to n positions of one key-value head. Addresses; at `scratch` there is room for two times n
    scores."""
    second = scratch + SIZE * n
    t = 0
    while t < n:
        if n < POSITIONS:
            one, two = floats(scratch, (n,)), floats(second, (n,))
            _few(floats(q, (Dk,)), floats(other, (Dk,)), floats(keys, (n, Dk)), one, two)
            t = n
        else:
            at = min(t, n - POSITIONS)  # the last ones once more, for there may be no memory behind them
            _scores(q, other, keys + SIZE * at * Dk, Dk, scratch + SIZE * at, second + SIZE * at)
            t += POSITIONS
    for scores_at in (scratch, second):
        scores = floats(scores_at, (n,))
        best = np.float32(-1e30)
        for i in range(n):
            best = max(best, scores[i])
        scale = np.float32(1) / exponentials(scores, best)
        for i in range(n):
            scores[i] *= scale
    d = 0
    while d < Dv:
        if d + 2 * WIDTH <= Dv:
            _mix_two(scratch, second, values + SIZE * d, Dv, n, out + SIZE * d, out_other + SIZE * d)
            d += 2 * WIDTH
        else:
            _mix_one(scratch, second, values + SIZE * d, Dv, n, out + SIZE * d, out_other + SIZE * d)
            d += WIDTH


@inlined
def _few(q, other, keys, one, two):  # type: ignore[no-untyped-def]
    n, D = keys.shape
    for t in range(n):
        a, b = np.float32(0), np.float32(0)
        for d in range(D):
            a += q[d] * keys[t, d]
            b += other[d] * keys[t, d]
        one[t], two[t] = a, b


@inlined
def attend(qkv, normed, q_norm, k_norm, eps, cos, sin, rows, positions, first, keys, values, shape, scratch, out):  # type: ignore[no-untyped-def]
    """Norms and rotates heads, writes keys and values, then attends: token n of row r to positions first..p.

    `keys`, `values`: addresses of one layer's cache; `shape` (H, G, T, Dk, Dv): [S, G, T, Dk] and [S, G, T, Dv]. `scratch`: an
    address, with room for two times T scores."""
    H, G, T, Dk, Dv = shape
    N, per = len(rows), H // G
    wide, narrow = qkv.shape[1], out.shape[1]
    for n in range(N):
        p = positions[n]
        for h in range(H + G):
            head_at = qkv[n, h * Dk : (h + 1) * Dk]
            rotate(head_at, normed, q_norm if h < H else k_norm, eps, cos[p], sin[p])
        for g in range(G):
            head = (rows[n] * G + g) * T + p
            floats(keys + SIZE * head * Dk, (Dk,))[:] = qkv[n, (H + g) * Dk : (H + g + 1) * Dk]
            start = (H + G) * Dk + g * Dv
            floats(values + SIZE * head * Dv, (Dv,))[:] = qkv[n, start : start + Dv]
    queries, seen = address(qkv), address(out)
    for n in range(N):
        for g in range(G):
            head = (rows[n] * G + g) * T + first[n]
            for pair in range(0, per, 2):
                h = g * per + pair
                other = h + 1 if pair + 1 < per else h  # of an odd one out the same twice
                q, to = queries + SIZE * n * wide, seen + SIZE * n * narrow
                two_heads(
                    q + SIZE * h * Dk, q + SIZE * other * Dk, keys + SIZE * head * Dk, Dk, values + SIZE * head * Dv, Dv,
                    positions[n] + 1 - first[n], scratch, to + SIZE * h * Dv, to + SIZE * other * Dv,
                )  # fmt: skip
