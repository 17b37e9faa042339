"""Decoder layers over a batch of tokens, in one call: the table says where the weights are, the workspace where to compute.

norm | qkv (bias) | head norms, rotation, cache, attention | o | residual, norm, router, dispatch | experts | combine
"""

from __future__ import annotations

import numpy as np

from services.inference.kernels import compiled, inlined
from services.inference.kernels.attention import attend
from services.inference.kernels.matmul import ADD, SET, matmul
from services.inference.kernels.pointwise import address, combine, dispatch, floats, gated, norm, route
from services.inference.kernels.vectors import SIZE

# One layer: addresses of float32; matrices as [in, out]; of a dense layer `experts` is 0. `qkv_bias`: 0 where there is none.
# `qk_norm`: whether heads are normed; if not, `q_norm` and `k_norm` are what they are multiplied with.
LAYER = np.dtype(
    [(name, np.int64) for name in (
        "norm_in", "qkv", "qkv_bias", "qk_norm", "q_norm", "k_norm", "o", "norm_post", "router", "gate_up", "down",
        "keys", "values", "experts", "top_k", "renormalise", "width",
    )]
)  # fmt: skip


@compiled
def layers(table, routed, shape, eps, cos, sin, rows, positions, first, scratch, x, normed, qkv, seen, sorted_, wide, narrow,
           weights, slot, ends, experts):  # type: ignore[no-untyped-def]  # fmt: skip
    """x [N, D] through the layers of `table`; the routing of those with experts goes to experts[:, routed], routed + 1, …

    `shape`: see `attend`. The arrays after `scratch` are a workspace for N tokens: contiguous, and nothing in them lasts."""
    N, D = x.shape
    x_at, normed_at, qkv_at, seen_at = address(x), address(normed), address(qkv), address(seen)
    Q, V = qkv.shape[1], seen.shape[1]
    for i in range(len(table)):
        layer = table[i]
        norm(x, floats(layer.norm_in, (D,)), eps, normed)
        if layer.qkv_bias == 0:
            matmul(normed_at, D, layer.qkv, Q, qkv_at, Q, N, D, Q, SET)
        else:
            qkv[:] = floats(layer.qkv_bias, (Q,))
            matmul(normed_at, D, layer.qkv, Q, qkv_at, Q, N, D, Q, ADD)
        q_norm, k_norm = floats(layer.q_norm, (shape[3],)), floats(layer.k_norm, (shape[3],))
        attend(
            qkv, layer.qk_norm != 0, q_norm, k_norm, eps, cos, sin, rows, positions, first, layer.keys, layer.values, shape,
            scratch, seen,
        )  # fmt: skip
        matmul(seen_at, V, layer.o, D, x_at, D, N, V, D, ADD)
        norm(x, floats(layer.norm_post, (D,)), eps, normed)
        W = layer.width
        if layer.experts == 0:
            _unit(normed_at, N, layer.gate_up, layer.down, wide, narrow, x_at, D, W, ADD)
            continue
        E, K = layer.experts, layer.top_k
        router = floats(layer.router, (E, D))
        route(normed, router, K, layer.renormalise != 0, experts[:, routed], weights, ends, slot)
        dispatch(normed, slot, sorted_)
        start = 0
        for e in range(E):
            if ends[e] > start:
                at = address(sorted_) + SIZE * start * D
                up, down = layer.gate_up + SIZE * e * D * 2 * W, layer.down + SIZE * e * W * D
                _unit(at, ends[e] - start, up, down, wide, narrow, at, D, W, SET)
            start = ends[e]
        combine(x, sorted_, slot, weights)
        routed += 1


@inlined
def _unit(x, M, up, down, wide, narrow, out, D, W, add):  # type: ignore[no-untyped-def]
    """The gated unit of M rows at x."""
    matmul(x, D, up, 2 * W, address(wide), 2 * W, M, D, 2 * W, SET)
    gated(floats(address(wide), (M, 2 * W)), W, floats(address(narrow), (M, W)))
    matmul(address(narrow), W, down, D, out, D, M, W, D, add)
