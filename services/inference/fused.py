"""One engine step of a small model on a CPU, in compiled loops.

A step of a small model is hundreds of tiny tensor operations, and calling them costs more than computing them; and what a BLAS does
for a few rows is slower than loops made for few rows. Here a step is one call (`services.inference.kernels`).

Invariants:
- Same numbers as `shared.model` up to rounding (tested to 1e-5), the same routing, keys and values written before read.
- Every token attends to its row's positions up to its own: decode tokens and prompt chunks need no distinction.
- No matrix of the model is copied: the table's addresses are of its parameters, so that the checksum of the live weights is of what
  computes. Matrices lie transposed in memory (their shape stays), as the products read them.

Grouped-query attention, softmax routing or dense layers, float32, CPU, sizes in whole vectors (`supports`). Anything else runs in
torch, FP8 too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.inference.cache import SlotCache
from services.inference.kernels.layer import LAYER, layers
from services.inference.kernels.matmul import ADD, SET, WHOLE, matmul
from services.inference.kernels.pointwise import lookup, norm
from services.inference.kernels.vectors import QUICK, WIDTH
from shared.model import ModelConfig, Transformer
from shared.model.attention import GroupedQueryAttention
from shared.model.moe import MixtureOfExperts, Mlp
from shared.model.mtp import MtpLayer

Array = np.ndarray[Any, Any]


def supports(model: Transformer) -> bool:
    weight, c = model.embed_tokens.weight, model.config
    H, G = c.num_attention_heads, c.num_key_value_heads
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or c.mla is not None or H % G or not QUICK:
        return False
    if model.emulates:
        return False
    columns = [c.vocab_size, c.hidden_size, (H + G) * c.head_dim + G * c.v_head_dim]
    if len(c.moe_layers) < c.num_hidden_layers:
        columns.append(2 * c.intermediate_size)
    if c.moe is not None:
        if c.moe.scoring != "softmax" or c.moe.n_shared_experts:
            return False
        columns.append(2 * c.moe.intermediate_size)
    return all(size % WHOLE == 0 for size in columns) and all(d % WIDTH == 0 for d in (c.head_dim, c.v_head_dim))


class FusedStep:
    """`forward` of one model on one cache, `logits` of what comes out, `draft` by its MTP layer. Only for the engine's thread."""

    def __init__(self, model: Transformer, cache: SlotCache) -> None:
        self.model, self.cache = model, cache
        c = model.config
        self._held: list[Tensor] = []  # whose memory the addresses are of
        D, V = c.hidden_size, c.vocab_size
        drafting = model.mtp_layers[:1] if cache.mtp else []
        decoders = [*model.layers, *(mtp.layer for mtp in drafting)]
        table = np.zeros(len(decoders), LAYER)
        for i, decoder in enumerate(decoders):
            self._fill(table[i], decoder, i)
        self._trunk, self._draft = table[: len(model.layers)], table[len(model.layers) :]
        embedding = model.embed_tokens.weight
        self._head = self._matrix("head", embedding if model.lm_head is None else model.lm_head.weight, V, D)
        self._strides = embedding.stride()  # a tied one now lies as the head's products read it
        tied = model.lm_head is None
        self._embedding = self._head if tied else self._memory("embedding", embedding, V, D)
        self._final, self._eps = self._vector("final norm", model.norm.weight, D), model.norm.eps
        self._mtp = next((_Mtp(mtp, self, D) for mtp in drafting), None)
        self._shape = (c.num_attention_heads, c.num_key_value_heads, cache.positions, c.head_dim, c.v_head_dim)
        cos, sin = model.rotary(torch.arange(cache.positions))
        self._cos, self._sin = (np.ascontiguousarray(x[:, 0].numpy()) for x in (cos, sin))  # [T, Dk]
        self._scores = np.empty(2 * cache.positions, np.float32)
        self._work = _Workspace(c, 0)

    def warm(self) -> None:
        """Compiles the loops, or reads them from their cache: seconds, once per machine. Writes the cache's first cell."""
        first = np.zeros(1, np.int64)
        hidden, _ = self.forward(np.zeros(1, np.int32), first, first)
        self.logits(hidden)

    def forward(self, tokens_N: Array, rows_N: Array, positions_N: Array) -> tuple[Tensor, Array]:
        """Hidden states after the final norm [N, D] (valid until the next call), and the experts [N, L, K] that were used."""
        w, N = self._space(len(tokens_N)), len(tokens_N)
        lookup(self._embedding, *self._strides, tokens_N, w.x[:N])
        self._compute(self._trunk, 0, rows_N, positions_N, w.zeros[:N])
        norm(w.x[:N], self._final, self._eps, w.normed[:N])
        return torch.from_numpy(w.normed[:N]), w.experts[:N]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, V]"""
        N, D = hidden_ND.shape
        V = self.model.config.vocab_size
        hidden_ND, out = hidden_ND.contiguous(), torch.empty(N, V)
        matmul(hidden_ND.data_ptr(), D, self._head, V, out.data_ptr(), V, N, D, V, SET)
        return out

    mtp_logits = logits  # the head is the trunk's

    def draft(self, hidden_ND: Tensor, tokens_N: Array, rows_N: Array, positions_N: Array, first_N: Array) -> Tensor:
        """The MTP layer over the trunk's hidden states (no view of this step's buffers) and the tokens after them; every token
        attends to positions `first`..its own. Returns the states [N, D] that its head reads, valid until the next call."""
        assert self._mtp is not None
        w, N, mtp = self._space(len(tokens_N)), len(tokens_N), self._mtp
        D = hidden_ND.shape[1]
        x, normed = w.x[:N], w.normed[:N]
        lookup(self._embedding, *self._strides, tokens_N, x)
        norm(x, mtp.enorm, self._eps, normed)
        matmul(normed.ctypes.data, D, mtp.joined, D, x.ctypes.data, D, N, D, D, SET)
        norm(hidden_ND.numpy(), mtp.hnorm, self._eps, normed)
        matmul(normed.ctypes.data, D, mtp.joined + 4 * D * D, D, x.ctypes.data, D, N, D, D, ADD)
        self._compute(self._draft, w.experts.shape[1] - 1, rows_N, positions_N, first_N)
        norm(x, mtp.norm, self._eps, normed)
        return torch.from_numpy(normed)

    def _compute(self, table: Array, routed: int, rows_N: Array, positions_N: Array, first_N: Array) -> None:
        w, N = self._work, len(rows_N)
        layers(
            table, routed, self._shape, self._eps, self._cos, self._sin, rows_N, positions_N, first_N, self._scores.ctypes.data,
            w.x[:N], w.normed[:N], w.qkv[:N], w.seen[:N], w.sorted, w.wide, w.narrow,
            w.weights[:N], w.slot[:N], w.ends, w.experts[:N],
        )  # fmt: skip

    def _space(self, N: int) -> _Workspace:
        if len(self._work.x) < N:
            self._work = _Workspace(self.model.config, max(N, 2 * len(self._work.x)))
        return self._work

    def _fill(self, entry: Array, decoder: torch.nn.Module, index: int) -> None:
        """Raises ValueError for a parameter that is not of the configuration's shape: nothing else would notice."""
        c, attention, mlp = self.model.config, decoder.self_attn, decoder.mlp
        D, H, G = c.hidden_size, c.num_attention_heads, c.num_key_value_heads
        assert isinstance(attention, GroupedQueryAttention)
        entry["norm_in"] = self._memory("norm_in", decoder.input_layernorm.weight, D)
        entry["norm_post"] = self._memory("norm_post", decoder.post_attention_layernorm.weight, D)
        entry["qkv"] = self._matrix("qkv", attention.qkv_proj.weight, (H + G) * c.head_dim + G * c.v_head_dim, D)
        entry["o"] = self._matrix("o", attention.o_proj.weight, D, H * c.v_head_dim)
        if (bias := attention.qkv_proj.bias) is not None:
            entry["qkv_bias"] = self._memory("qkv_bias", bias, (H + G) * c.head_dim + G * c.v_head_dim)
        entry["qk_norm"] = attention.q_norm is not None
        ones = torch.ones(c.head_dim)  # the softmax scale is q's whether heads are normed or not
        of_q, of_k = (ones if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm))
        entry["q_norm"] = self._memory("q_norm", of_q * attention.scale, c.head_dim)
        entry["k_norm"] = self._memory("k_norm", of_k, c.head_dim)
        slots = self.cache.rows, G, self.cache.positions
        entry["keys"] = self._memory("keys", self.cache.keys[index], *slots, c.head_dim)
        entry["values"] = self._memory("values", self.cache.values[index], *slots, c.v_head_dim)
        if isinstance(mlp, MixtureOfExperts):
            assert c.moe is not None
            E, W = c.moe.num_experts, c.moe.intermediate_size
            entry["experts"], entry["top_k"] = E, c.moe.num_experts_per_tok
            entry["renormalise"], entry["width"] = c.moe.norm_topk_prob, W
            entry["router"] = self._memory("router", mlp.gate.weight, E, D)
            entry["gate_up"] = self._matrix("gate_up", mlp.gate_up, E, 2 * W, D)
            entry["down"] = self._matrix("down", mlp.down, E, D, W)
        else:
            assert isinstance(mlp, Mlp)
            W = entry["width"] = c.intermediate_size
            entry["gate_up"] = self._matrix("gate_up", mlp.gate_up_proj.weight, 2 * W, D)
            entry["down"] = self._matrix("down", mlp.down_proj.weight, D, W)

    def _matrix(self, name: str, parameter: torch.nn.Parameter, *shape: int) -> int:
        """The address of [..., in, out]: the parameter's [..., out, in], whose memory is laid out anew the first time."""
        if not parameter.mT.is_contiguous():
            parameter.data = parameter.data.mT.contiguous().mT
        return self._memory(name, parameter.mT, *shape[:-2], shape[-1], shape[-2])

    def _vector(self, name: str, parameter: torch.nn.Parameter, size: int) -> Array:
        self._memory(name, parameter, size)
        return parameter.detach().numpy()

    def _memory(self, name: str, tensor: Tensor, *shape: int) -> int:
        """The address of a contiguous tensor, which lives as long as this does."""
        if tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}; the model's shape wants float32 {shape}")
        self._held.append(tensor.detach())
        return tensor.data_ptr()


class _Mtp:
    """An MTP layer's parameters but its decoder layer's. `joined`: the address of [2 D, D], what meets the token's embedding, then
    what meets the hidden state."""

    def __init__(self, mtp: MtpLayer, step: FusedStep, D: int) -> None:
        self.enorm = step._vector("enorm", mtp.enorm.weight, D)
        self.hnorm = step._vector("hnorm", mtp.hnorm.weight, D)
        self.norm = step._vector("MTP norm", mtp.norm.weight, D)
        self.joined = step._matrix("eh_proj", mtp.eh_proj.weight, D, 2 * D)


class _Workspace:
    """Room for N tokens."""

    def __init__(self, c: ModelConfig, N: int) -> None:
        D, H, G, K = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, max(1, c.num_experts_per_tok)
        width = max(
            c.intermediate_size, K * (c.moe.intermediate_size if c.moe else 0)
        )  # of a token, in all its experts

        def room(*shape: int) -> Array:
            return np.empty(shape, np.float32)

        self.x, self.normed, self.sorted = room(N, D), room(N, D), room(N * K, D)
        self.qkv, self.seen = room(N, (H + G) * c.head_dim + G * c.v_head_dim), room(N, H * c.v_head_dim)
        self.wide, self.narrow = room(N * 2 * width), room(N * width)
        self.weights = room(N, K)
        self.slot = np.empty((N, K), np.int64)  # where each of a token's copies stands in `sorted`
        self.ends = np.zeros(c.moe.num_experts if c.moe else 1, np.int64)
        self.experts = np.zeros((N, c.num_moe_layers + 1, c.num_experts_per_tok), np.int64)  # the last: the MTP layer's
        self.zeros = np.zeros(N, np.int64)
