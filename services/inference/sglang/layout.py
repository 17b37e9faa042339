"""How SGLang lays out published tensors, per shape of model and rank: the hashes that its live weights must have. Pure.

Published tensors (Hugging Face names, bf16 bits as uint16, or float32) become the parameters of SGLang's modules: query,
key and value in one matrix, gate and up in one, all experts of a layer in two, the vocabulary padded to 64 rows; split
over tensor-parallel ranks by rows or columns, experts over expert-parallel ones. Kernels that lay weights out otherwise
are refused by `flags`.

Shapes: H hidden, Q query rows, G key or value rows, I intermediate, E experts, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from services.inference.sglang.hashes import Digest
from shared.model.config import ModelConfig
from shared.weights import Tensors

VOCABULARY_ROWS = 64  # SGLang pads the vocabulary to a multiple of it
MTP = ("enorm", "hnorm", "eh_proj", "shared_head.norm")  # an MTP layer's own parts, by their published names
DRAFT = "draft."  # what the draft's parameters are called by, in a checksum
Held = Iterator[tuple[str, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Layout:
    """`float32`: weights are loaded as that. `draft`: the MTP layer is served as well."""

    model: ModelConfig
    tp: int = 1
    ep: int = 1
    float32: bool = False
    draft: bool = False

    def __post_init__(self) -> None:
        assert self.tp % self.ep == 0, "flags refuses it"


def expected(tensors: Tensors, layout: Layout, digest: Digest, threads: int = 1) -> list[dict[str, str]]:
    """For each tensor-parallel rank: SGLang's name of every parameter -> its hash. `threads` parameters at a time."""
    with ThreadPoolExecutor(threads) as pool:
        found: list[dict[str, str]] = []
        for rank in range(layout.tp):
            mine = held(tensors, layout, rank)
            sums: dict[str, str] = {}
            while batch := list(itertools.islice(mine, threads)):
                hashed = pool.map(digest, [array for _, array in batch])
                sums |= zip([name for name, _ in batch], hashed, strict=True)
            found.append(sums)
    return found


def differences(wanted: list[dict[str, str]], ranks: list[dict[str, object]]) -> list[str]:
    """Names of the parameters that differ, or are on one side only; `ranks` as SGLang answers. Empty: all is as it should
    be. Data-parallel copies are ranks of their own, each compared with its tensor-parallel place."""
    odd: list[str] = []
    seen: set[int] = set()
    for rank in ranks:
        place, live = _place(rank), rank.get("checksums")
        if not isinstance(live, dict) or not 0 <= place < len(wanted):
            return [f"a rank that is none of {len(wanted)}: {str(rank)[:200]}"]
        seen.add(place)
        mine = wanted[place]
        names = sorted(n for n in mine.keys() | live.keys() if mine.get(n) != live.get(n) and not _no_weight(n))
        odd += [f"rank {place}: {name}" for name in names]
    return odd + [f"rank {place}: no answer" for place in range(len(wanted)) if place not in seen]


def _place(rank: dict[str, object]) -> int:
    roles = rank.get("parallelism_info")
    first = roles[0] if isinstance(roles, list) and roles else roles
    return int(first.get("tp_rank", -1)) if isinstance(first, dict) else -1


def _no_weight(name: str) -> bool:
    """Tables that follow from the configuration; SGLang leaves them out where it knows them."""
    return name.endswith(("cos_sin_cache", "inv_freq"))


# -- one rank ------------------------------------------------------------------------------------------------------------


def held(tensors: Tensors, layout: Layout, rank: int) -> Held:
    """(SGLang's name, array) of everything that a rank holds, one at a time."""
    m, part = layout.model, _Parts(tensors, layout, rank)
    embedding = part.vocabulary("model.embed_tokens.weight")
    head = embedding if m.tie_word_embeddings else part.vocabulary("lm_head.weight")
    own_head = not (m.tie_word_embeddings and m.serving.ties_head)
    yield "model.embed_tokens.weight", embedding
    for i in range(m.num_hidden_layers):
        yield from _layer(part, f"model.layers.{i}", f"model.layers.{i}", moe=i in m.moe_layers)
    yield "model.norm.weight", part.whole("model.norm.weight")
    if own_head:
        yield "lm_head.weight", head
    if layout.draft:
        yield from ((DRAFT + name, array) for name, array in _draft(part, embedding, head))


def _draft(part: _Parts, embedding: np.ndarray, head: np.ndarray) -> Held:
    """The MTP layer is the one after the last; embedding and head are the trunk's."""
    m = part.layout.model
    assert m.serving.drafting is not None, "flags refuses drafts of a family that SGLang does not draft for"
    mtp, moe = f"model.layers.{m.num_hidden_layers}", m.num_hidden_layers - 1 in m.moe_layers
    yield "model.embed_tokens.weight", embedding
    yield "lm_head.weight", head
    for name, published in zip(m.serving.drafting.live, MTP, strict=True):
        yield f"{name}.weight", part.whole(f"{mtp}.{published}.weight")
    yield from _layer(part, mtp, m.serving.drafting.decoder, moe=moe)


def _layer(part: _Parts, published: str, name: str, *, moe: bool) -> Held:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.{norm}.weight", part.whole(f"{published}.{norm}.weight")
    attention = _latent if part.layout.model.mla else _grouped
    yield from attention(part, f"{published}.self_attn", f"{name}.self_attn")
    if moe:
        yield from _experts(part, f"{published}.mlp", f"{name}.mlp")
    else:
        yield from _mlp(part, f"{published}.mlp", f"{name}.mlp")


def _grouped(part: _Parts, published: str, name: str) -> Held:
    """[Q + 2 G, H] over heads, and its bias alike; a key-value head is repeated where there are more ranks than heads."""
    m, tp, rank = part.layout.model, part.layout.tp, part.rank
    repeated = max(1, tp // m.num_key_value_heads)
    for kind in ("weight", "bias") if m.qkv_bias else ("weight",):
        groups = [part.rows(f"{published}.{p}_proj.{kind}", tp // repeated, rank // repeated) for p in "kv"]
        yield f"{name}.qkv_proj.{kind}", np.concatenate([part.rows(f"{published}.q_proj.{kind}", tp, rank), *groups])
    yield f"{name}.o_proj.weight", part.columns(f"{published}.o_proj.weight", tp, rank)
    for norm in ("q_norm", "k_norm") if m.qk_norm else ():
        yield f"{name}.{norm}.weight", part.whole(f"{published}.{norm}.weight")


def _latent(part: _Parts, published: str, name: str) -> Held:
    """MLA: what makes the latents is whole on every rank, the two in one matrix where the query has a latent, too."""
    mla, tp, rank = part.layout.model.mla, part.layout.tp, part.rank
    assert mla is not None
    down = part.whole(f"{published}.kv_a_proj_with_mqa.weight")
    if mla.q_lora_rank is None:
        yield f"{name}.q_proj.weight", part.rows(f"{published}.q_proj.weight", tp, rank)
        yield f"{name}.kv_a_proj_with_mqa.weight", down
    else:
        fused = np.concatenate([part.whole(f"{published}.q_a_proj.weight"), down])
        yield f"{name}.fused_qkv_a_proj_with_mqa.weight", fused
        yield f"{name}.q_a_layernorm.weight", part.whole(f"{published}.q_a_layernorm.weight")
        yield f"{name}.q_b_proj.weight", part.rows(f"{published}.q_b_proj.weight", tp, rank)
    yield f"{name}.kv_a_layernorm.weight", part.whole(f"{published}.kv_a_layernorm.weight")
    yield f"{name}.kv_b_proj.weight", part.rows(f"{published}.kv_b_proj.weight", tp, rank)
    yield f"{name}.o_proj.weight", part.columns(f"{published}.o_proj.weight", tp, rank)


def _mlp(part: _Parts, published: str, name: str) -> Held:
    tp, rank = part.layout.tp, part.rank
    halves = [part.rows(f"{published}.{p}_proj.weight", tp, rank) for p in ("gate", "up")]
    yield f"{name}.gate_up_proj.weight", np.concatenate(halves)
    yield f"{name}.down_proj.weight", part.columns(f"{published}.down_proj.weight", tp, rank)


def _experts(part: _Parts, published: str, name: str) -> Held:
    """w13 [E, 2 I, H] and w2 [E, H, I]: E over the expert-parallel ranks, I over those that share an expert."""
    moe, ep = part.layout.model.moe, part.layout.ep
    assert moe is not None
    sharing = part.layout.tp // ep
    first, place = part.rank // sharing * (moe.num_experts // ep), part.rank % sharing
    mine = range(first, first + moe.num_experts // ep)
    yield f"{name}.gate.weight", part.whole(f"{published}.gate.weight")
    if moe.scoring == "sigmoid":
        bias = "gate.e_score_correction_bias"
        yield f"{name}.{bias}", part.tensors[f"{published}.{bias}"].astype(np.float32, copy=False)
    both = [
        np.concatenate([part.rows(f"{published}.experts.{e}.{p}_proj.weight", sharing, place) for p in ("gate", "up")])
        for e in mine
    ]
    yield f"{name}.experts.w13_weight", np.stack(both)
    down = [part.columns(f"{published}.experts.{e}.down_proj.weight", sharing, place) for e in mine]
    yield f"{name}.experts.w2_weight", np.stack(down)
    if moe.n_shared_experts:
        yield from _mlp(part, f"{published}.shared_experts", f"{name}.shared_experts")


@dataclass(frozen=True, slots=True)
class _Parts:
    """Published tensors as a rank takes them."""

    tensors: Tensors
    layout: Layout
    rank: int

    def whole(self, name: str) -> np.ndarray:
        return self._loaded(self.tensors[name])

    def rows(self, name: str, parts: int, place: int) -> np.ndarray:
        size = self.tensors[name].shape[0] // parts
        return self._loaded(self.tensors[name][size * place : size * (place + 1)])

    def columns(self, name: str, parts: int, place: int) -> np.ndarray:
        size = self.tensors[name].shape[1] // parts
        return self._loaded(self.tensors[name][:, size * place : size * (place + 1)])

    def vocabulary(self, name: str) -> np.ndarray:
        """Rows in equal parts of the padded vocabulary; the padding is zero."""
        tensor, step = self.tensors[name], VOCABULARY_ROWS
        size = -(-tensor.shape[0] // step) * step // self.layout.tp
        mine = tensor[size * self.rank : size * (self.rank + 1)]
        padded = np.zeros((size, tensor.shape[1]), tensor.dtype)
        padded[: len(mine)] = mine
        return self._loaded(padded)

    def _loaded(self, tensor: np.ndarray) -> np.ndarray:
        """In the type that SGLang loads as. float32 tensors of a checkpoint are rounded with the rest, in bf16."""
        if tensor.dtype == np.uint16:
            return (tensor.astype(np.uint32) << 16).view(np.float32) if self.layout.float32 else tensor
        if self.layout.float32:
            return tensor
        bits = tensor.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to nearest even
