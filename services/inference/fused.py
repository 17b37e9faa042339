"""One engine step of a small model on a CPU, in compiled loops.

A step of a small model is hundreds of tiny tensor operations, and calling them costs more than computing them. Here a
layer is five compiled loops (Numba) between the matrix products, which torch computes into buffers that are reused:

    norm | qkv | head norms, rotation, cache, attention | o | residual, norm, router, dispatch | experts | combine

Invariants:
- Same numbers as `shared.model` up to rounding (tested to 1e-5), the same routing, keys and values written before read.
- Every token attends to its row's positions up to its own: decode tokens and prompt chunks need no distinction.
- No matrix of the model is copied: the arrays are views of its parameters, so that the checksum of the live weights is of what
  computes. Matrices lie transposed in memory (their shape stays), as the products read them: a third less time.

Grouped-query attention, softmax routing or dense layers, float32, CPU (`supports`). Anything else runs in torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.inference.cache import SlotCache
from services.inference.compiled import compiled, exponentials
from shared.model import Transformer
from shared.model.attention import GroupedQueryAttention
from shared.model.moe import MixtureOfExperts, Mlp
from shared.model.mtp import MtpLayer

Array = np.ndarray[Any, Any]


def supports(model: Transformer) -> bool:
    weight = model.embed_tokens.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or model.config.mla is not None:
        return False
    moe = model.config.moe
    return moe is None or (moe.scoring == "softmax" and moe.n_shared_experts == 0)


class FusedStep:
    """`forward(tokens_N, rows_N, positions_N)` of one model on one cache. Only for the engine's thread."""

    def __init__(self, model: Transformer, cache: SlotCache) -> None:
        self.model, self.cache = model, cache
        self.layers = [_Layer(layer, cache, index) for index, layer in enumerate(model.layers)]
        self.mtp = _Mtp(model.mtp_layers[0], cache, len(self.layers)) if cache.mtp else None
        self.final = _array(model.norm.weight)
        self.eps = model.norm.eps
        self.scores, self.bits = np.empty(cache.positions, np.float32), np.empty(cache.positions, np.int32)
        self.buffers = _Buffers(model, 0)
        longest = torch.arange(cache.positions)
        cos, sin = model.rotary(longest)
        self.cos, self.sin = (np.ascontiguousarray(x[:, 0].numpy()) for x in (cos, sin))  # [T, Dk]

    def warm(self) -> None:
        """Compiles the loops, or reads them from Numba's cache: seconds, once per machine. Writes the cache's first cell."""
        with torch.inference_mode():
            self.forward(torch.zeros(1, dtype=torch.int64), np.zeros(1, np.int64), np.zeros(1, np.int64))

    def forward(self, tokens_N: Tensor, rows_N: Array, positions_N: Array) -> tuple[Tensor, Array]:
        """Hidden states after the final norm [N, D] (valid until the next call), and the experts [N, L, K] that were used."""
        b, N = self._room(len(tokens_N)), len(tokens_N)
        torch.index_select(self.model.embed_tokens.weight, 0, tokens_N, out=b.x_t[:N])
        from_start, at = b.zeros[:N], 0
        for layer in self.layers:
            self._compute(layer, rows_N, positions_N, from_start, at)
            at += layer.experts > 0
        _norm(b.x[:N], self.final, self.eps, b.normed[:N])
        return b.normed_t[:N], b.experts[:N]

    def draft(self, hidden_ND: Tensor, tokens_N: Tensor, rows_N: Array, positions_N: Array, first_N: Array) -> Tensor:
        """The MTP layer over the trunk's hidden states (no view of this step's buffers) and the tokens after them; every token
        attends to positions `first`..its own. Returns the states [N, D] that its head reads, valid until the next call."""
        assert self.mtp is not None
        b, N, mtp = self._room(len(tokens_N)), len(tokens_N), self.mtp
        torch.index_select(self.model.embed_tokens.weight, 0, tokens_N, out=b.out_t[:N])
        _norm(b.out[:N], mtp.enorm, self.eps, b.normed[:N])
        torch.mm(b.normed_t[:N], mtp.from_token, out=b.x_t[:N])
        _norm(hidden_ND.numpy(), mtp.hnorm, self.eps, b.normed[:N])
        b.x_t[:N].addmm_(b.normed_t[:N], mtp.from_hidden)
        self._compute(mtp.layer, rows_N, positions_N, first_N, b.experts.shape[1] - 1)
        _norm(b.x[:N], mtp.norm, self.eps, b.normed[:N])
        return b.normed_t[:N]

    def _room(self, N: int) -> _Buffers:
        if len(self.buffers.x) < N:
            self.buffers = _Buffers(self.model, max(N, 2 * len(self.buffers.x)))
        return self.buffers

    def _compute(self, layer: _Layer, rows_N: Array, positions_N: Array, first_N: Array, at: int) -> None:
        """One decoder layer on the buffers; its routing is the `at`-th."""
        b, N = self.buffers, len(rows_N)
        x, normed = b.x[:N], b.normed[:N]
        _norm(x, layer.norm_in, self.eps, normed)
        torch.mm(b.normed_t[:N], layer.qkv, out=b.qkv_t[:N])
        _attend(
            b.qkv[:N], layer.q_norm, layer.k_norm, self.eps, self.cos, self.sin, rows_N, positions_N, first_N,
            layer.keys, layer.values, self.scores, self.bits, self.bits.view(np.float32), b.seen[:N],
        )  # fmt: skip
        torch.mm(b.seen_t[:N], layer.o, out=b.out_t[:N])
        _add_norm(x, b.out[:N], layer.norm_post, self.eps, normed)
        if layer.experts:
            self._experts(layer, N, at)
        else:
            gate, up = torch.mm(b.normed_t[:N], layer.gate_up[0]).chunk(2, -1)
            b.x_t[:N].addmm_(F.silu(gate).mul_(up), layer.down[0])

    def _experts(self, layer: _Layer, N: int, at: int) -> None:
        b, K = self.buffers, layer.top_k
        M = N * K
        _route(b.normed[:N], layer.router, K, layer.renormalise, b.experts[:N, at], b.weights[:N], b.ends, b.slot[:N])
        _dispatch(b.normed[:N], b.slot[:N], b.sorted[:M])
        start = 0
        for expert, end in enumerate(b.ends.tolist()):
            if end > start:
                torch.mm(b.sorted_t[start:end], layer.gate_up[expert], out=b.wide_t[start:end])
            start = end
        gate, up = b.wide_t[:M].chunk(2, -1)
        torch.mul(F.silu(gate), up, out=b.narrow_t[:M])
        start = 0
        for expert, end in enumerate(b.ends.tolist()):
            if end > start:
                torch.mm(b.narrow_t[start:end], layer.down[expert], out=b.sorted_t[start:end])
            start = end
        _combine(b.x[:N], b.sorted[:M], b.slot[:N], b.weights[:N])


class _Layer:
    """Views of one layer's parameters: matrices as [in, out] for torch, vectors and the router as arrays."""

    def __init__(self, layer: torch.nn.Module, cache: SlotCache, index: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(attention, GroupedQueryAttention)
        self.norm_in, self.norm_post = (
            _array(layer.input_layernorm.weight),
            _array(layer.post_attention_layernorm.weight),
        )
        self.qkv, self.o = _transposed(attention.qkv_proj.weight), _transposed(attention.o_proj.weight)
        self.q_norm = _array(attention.q_norm.weight) * np.float32(attention.scale)
        self.k_norm = _array(attention.k_norm.weight)
        self.keys, self.values = cache.keys[index].numpy(), cache.values[index].numpy()
        self.experts, self.top_k, self.renormalise = 0, 0, False
        if isinstance(mlp, MixtureOfExperts):
            self.experts, self.top_k = mlp.experts, mlp.gate.moe.num_experts_per_tok
            self.renormalise = mlp.gate.moe.norm_topk_prob
            self.router = _array(mlp.gate.weight)
            self.gate_up = list(_transposed(mlp.gate_up).unbind())
            self.down = list(_transposed(mlp.down).unbind())
        else:
            assert isinstance(mlp, Mlp)
            self.gate_up = [_transposed(mlp.gate_up_proj.weight)]
            self.down = [_transposed(mlp.down_proj.weight)]


class _Mtp:
    """Views of an MTP layer's parameters; `layer` is its decoder layer."""

    def __init__(self, mtp: MtpLayer, cache: SlotCache, index: int) -> None:
        self.enorm, self.hnorm, self.norm = (_array(n.weight) for n in (mtp.enorm, mtp.hnorm, mtp.norm))
        joined = _transposed(mtp.eh_proj.weight)  # [2 D, D]: of the token's embedding, then of the hidden state
        self.from_token, self.from_hidden = joined.chunk(2)
        self.layer = _Layer(mtp.layer, cache, index)


class _Buffers:
    """Room for N tokens; `name` is the array and `name_t` the tensor over the same memory."""

    def __init__(self, model: Transformer, N: int) -> None:
        c = model.config
        D, H, G = c.hidden_size, c.num_attention_heads, c.num_key_value_heads
        K = max(1, c.num_experts_per_tok)
        width, E = (c.moe.intermediate_size, c.moe.num_experts) if c.moe else (1, 1)
        for name, shape in {
            "x": (N, D),
            "normed": (N, D),
            "qkv": (N, (H + G) * c.head_dim + G * c.v_head_dim),
            "seen": (N, H * c.v_head_dim),
            "out": (N, D),
            "sorted": (N * K, D),
            "wide": (N * K, 2 * width),
            "narrow": (N * K, width),
        }.items():
            tensor = torch.empty(shape)
            setattr(self, f"{name}_t", tensor)
            setattr(self, name, tensor.numpy())
        self.weights = np.empty((N, K), np.float32)
        self.slot = np.empty((N, K), np.int64)  # where each of a token's copies stands in `sorted`
        self.ends = np.zeros(E, np.int64)
        self.experts = np.zeros((N, c.num_moe_layers + 1, c.num_experts_per_tok), np.int64)  # the last: the MTP layer's
        self.zeros = np.zeros(N, np.int64)


def _transposed(parameter: torch.nn.Parameter) -> Tensor:
    """[…, in, out], contiguous: a view of the parameter […, out, in], whose memory is laid out anew the first time."""
    if not parameter.mT.is_contiguous():
        parameter.data = parameter.data.mT.contiguous().mT
    return parameter.detach().mT


def _array(parameter: Tensor) -> Array:
    return parameter.detach().numpy()


@compiled
def _norm(x, weight, eps, out):  # type: ignore[no-untyped-def]
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
def _add_norm(x, update, weight, eps, out):  # type: ignore[no-untyped-def]
    """x += update; out = its RMS norm."""
    N, D = x.shape
    for n in range(N):
        total = np.float32(0)
        for d in range(D):
            value = x[n, d] + update[n, d]
            x[n, d] = value
            total += value * value
        scale = np.float32(1) / np.sqrt(total / np.float32(D) + np.float32(eps))
        for d in range(D):
            out[n, d] = x[n, d] * scale * weight[d]


@compiled
def _attend(qkv, q_norm, k_norm, eps, cos, sin, rows, positions, first, keys, values, scores, bits, powers, out):  # type: ignore[no-untyped-def]
    """Norms and rotates heads, writes keys and values [S, G, T, D], then attends: token n of row r to positions first..p.

    `scores`, `bits` (int32) and `powers` (float32 over the same memory as `bits`) are room for one head's positions."""
    N = len(rows)
    G, D = keys.shape[1], keys.shape[3]
    H = qkv.shape[1] // D - 2 * G
    for n in range(N):
        p = positions[n]
        for h in range(H + G):
            _rotate(qkv[n, h * D : (h + 1) * D], q_norm if h < H else k_norm, eps, cos[p], sin[p])
        for g in range(G):
            keys[rows[n], g, p, :] = qkv[n, (H + g) * D : (H + g + 1) * D]
            values[rows[n], g, p, :] = qkv[n, (H + G + g) * D : (H + G + g + 1) * D]
    for n in range(N):
        seen = positions[n] + 1 - first[n]
        for h in range(H):
            k, v = keys[rows[n], h * G // H, first[n] :], values[rows[n], h * G // H, first[n] :]
            total = exponentials(scores, bits, powers, _score(qkv[n, h * D : (h + 1) * D], k, scores, seen), seen)
            _mix(scores, v, seen, np.float32(1) / total, out[n, h * D : (h + 1) * D])


@compiled
def _rotate(x, weight, eps, cos, sin):  # type: ignore[no-untyped-def]
    """RMS norm and rotary embedding of one head, in place."""
    D = len(x)
    half = D // 2
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


@compiled
def _score(q, k, scores, seen):  # type: ignore[no-untyped-def]
    """scores[t] = q . k[t]; returns the greatest."""
    best = np.float32(-1e30)
    for t in range(seen):
        score = np.float32(0)
        kt = k[t]
        for d in range(len(q)):
            score += q[d] * kt[d]
        scores[t] = score
        best = max(best, score)
    return best


@compiled
def _mix(weights, v, seen, scale, out):  # type: ignore[no-untyped-def]
    """out = scale * sum over t of weights[t] * v[t], four positions at a time."""
    D = len(out)
    out[:] = 0
    whole = seen - seen % 4
    for t in range(0, whole, 4):
        a, b, c, e = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
        va, vb, vc, ve = v[t], v[t + 1], v[t + 2], v[t + 3]
        for d in range(D):
            out[d] += a * va[d] + b * vb[d] + c * vc[d] + e * ve[d]
    for t in range(whole, seen):
        a, va = weights[t], v[t]
        for d in range(D):
            out[d] += a * va[d]
    for d in range(D):
        out[d] *= scale


@compiled
def _route(x, router, K, renormalise, experts, weights, ends, slot):  # type: ignore[no-untyped-def]
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
def _dispatch(x, slot, out):  # type: ignore[no-untyped-def]
    N, K = slot.shape
    for n in range(N):
        for k in range(K):
            s = slot[n, k]
            for d in range(x.shape[1]):
                out[s, d] = x[n, d]


@compiled
def _combine(x, computed, slot, weights):  # type: ignore[no-untyped-def]
    """x[n] += sum over k of weights[n, k] * computed[slot[n, k]]."""
    N, K = slot.shape
    for n in range(N):
        for k in range(K):
            s, weight = slot[n, k], weights[n, k]
            for d in range(x.shape[1]):
                x[n, d] += weight * computed[s, d]
