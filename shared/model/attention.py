"""Attention: projections, rotary embedding, and the seam `attend` behind which every token layout hides.

`attend(layer, q [N, H, Dk], k [N, G, Dk], v [N, G, Dv]) -> [N, H, Dv]` is called once per layer with the N tokens in
their flat order. MTP layer i calls it as layer `num_hidden_layers + i`. Scaling is inside q: `attend` uses scale 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.model.config import ModelConfig, Rope, yarn_mscale
from shared.model.fused import fused

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Rotation = tuple[Tensor, Tensor]  # [N, 1, Dr] each: cos twice; sin with the sign of its half


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def inverse_frequencies(rope: Rope, size: int) -> Tensor:
    """[size / 2]. Linear scaling stretches all rotations by `factor`; YaRN and Llama 3 stretch slow ones and keep fast ones,
    with a ramp between."""
    exponent = torch.arange(0, size, 2, dtype=torch.float32) / size
    fast = 1.0 / rope.theta**exponent
    if rope.factor <= 1 or rope.kind == "default":
        return fast
    if rope.kind == "linear":
        return fast / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_positions * fast / (2 * math.pi)
        kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return fast / rope.factor * (1 - kept) + fast * kept

    def dimension(rotations: float) -> float:
        return size * math.log(rope.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    return fast / rope.factor * ramp + fast * (1 - ramp)


def rotation_amplitude(rope: Rope) -> float:
    """YaRN scales cos and sin; DeepSeek's mscale pair cancels there and acts on the scores instead."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1 or rope.kind != "yarn":
        return 1.0
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor)


class Rotary(nn.Module):
    """Positions to (cos, sin). Computed once per forward and shared by all layers."""

    inverse: Tensor

    def __init__(self, rope: Rope, size: int) -> None:
        super().__init__()
        self.rope, self.size = rope, size
        self.register_buffer("inverse", inverse_frequencies(rope, size), persistent=False)
        self.amplitude = rotation_amplitude(rope)

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        """Angles stay in float32 at least: bf16 holds no position above 256."""
        super()._apply(fn, recurse)
        if self.inverse.dtype not in (torch.float32, torch.float64):
            self.inverse = inverse_frequencies(self.rope, self.size).to(self.inverse.device)
        return self

    def forward(self, positions_N: Tensor) -> Rotation:
        angle = positions_N[:, None, None].to(self.inverse.dtype) * self.inverse
        cos, sin = angle.cos() * self.amplitude, angle.sin() * self.amplitude
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


@fused
def rotate(x: Tensor, rotation: Rotation, interleaved: bool = False) -> Tensor:
    """x [N, heads, Dr]. Pairs are (i, i + Dr/2), or (2i, 2i+1) when interleaved; the result is in the first layout
    either way (a permutation common to q and k leaves q·k as it is)."""
    cos, sin = (part.to(x.dtype) for part in rotation)
    if interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class GroupedQueryAttention(nn.Module):
    """One fused projection, with biases if the family has them; RMS norm per head on q and k if the family has it; rotary
    embedding on whole heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.groups, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.scale = config.attention_scale
        rows = (self.heads + 2 * self.groups) * self.size
        self.qkv_proj = nn.Linear(config.hidden_size, rows, bias=config.qkv_bias)  # rows of q, then k, then v
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)
        self.q_norm = RmsNorm(self.size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RmsNorm(self.size, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, layer: int, x_ND: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        N = len(x_ND)
        qkv = self.qkv_proj(x_ND).view(N, self.heads + 2 * self.groups, self.size)
        qk, v = qkv.split((self.heads + self.groups, self.groups), 1)
        q, k = rotate(self._normed(qk), rotation).split((self.heads, self.groups), 1)
        if self.q_norm is None:
            q = q * self.scale
        return self.o_proj(attend(layer, q, k, v).flatten(1))

    def _normed(self, qk: Tensor) -> Tensor:
        """One norm for q and k together; the softmax scale rides on q's norm weight."""
        if self.q_norm is None or self.k_norm is None:
            return qk
        weight = torch.cat(
            (
                (self.q_norm.weight * self.scale).expand(self.heads, -1),
                self.k_norm.weight.expand(self.groups, -1),
            )
        )
        return _head_norm(qk, weight, self.q_norm.eps)


@fused
def _head_norm(qk: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(qk, (qk.shape[-1],), None, eps) * weight


class LatentAttention(nn.Module):
    """DeepSeek-V3 MLA in its expanded form: `attend` sees ordinary heads (G = H), k = [content, shared rotary part]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.mla is not None
        self.mla = m = config.mla
        self.heads, self.size = config.num_attention_heads, config.head_dim
        self.scale, self.interleaved = config.attention_scale, config.rope.interleaved
        if m.q_lora_rank is None:
            self.q_proj = nn.Linear(config.hidden_size, self.heads * self.size, bias=False)
        else:
            self.q_a_proj = nn.Linear(config.hidden_size, m.q_lora_rank, bias=False)
            self.q_a_layernorm = RmsNorm(m.q_lora_rank, _LATENT_EPS)
            self.q_b_proj = nn.Linear(m.q_lora_rank, self.heads * self.size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, m.kv_lora_rank + m.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RmsNorm(m.kv_lora_rank, _LATENT_EPS)
        self.kv_b_proj = nn.Linear(m.kv_lora_rank, self.heads * (m.qk_nope_head_dim + m.v_head_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * m.v_head_dim, config.hidden_size, bias=False)

    def forward(self, layer: int, x_ND: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        N, m = len(x_ND), self.mla
        q = self.q_proj(x_ND) if m.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_ND)))
        q_nope, q_rope = (q.view(N, self.heads, self.size) * self.scale).split(
            (m.qk_nope_head_dim, m.qk_rope_head_dim), -1
        )
        latent, k_rope = self.kv_a_proj_with_mqa(x_ND).split((m.kv_lora_rank, m.qk_rope_head_dim), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(N, self.heads, m.qk_nope_head_dim + m.v_head_dim)
        k_nope, v = kv.split((m.qk_nope_head_dim, m.v_head_dim), -1)
        k_rope = rotate(k_rope[:, None], rotation, self.interleaved).expand(-1, self.heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, rotation, self.interleaved)), -1)
        out = attend(layer, q, torch.cat((k_nope, k_rope), -1), v)
        return self.o_proj(out.flatten(1))


_LATENT_EPS = 1e-6  # DeepSeek's norms on the latents do not follow rms_norm_eps


def causal_rows(B: int, T: int, lengths: Tensor | None = None) -> Attend:
    """`attend` for B right-padded rows of T tokens, flattened row by row to N = B * T.

    Padding stands behind every real token, so causality alone hides it. With `lengths` [B] the columns beyond the
    longest row are not computed; there the result is 0.
    """
    used = T if lengths is None else min(T, int(lengths.max()))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(B, T, *x.shape[1:])[:, :used].transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=q.shape[1] != k.shape[1])
        out = out.transpose(1, 2)
        if used < T:
            out = F.pad(out, (0, 0, 0, 0, 0, T - used))
        return out.reshape(B * T, *out.shape[2:])

    return attend
