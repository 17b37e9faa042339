"""GGUF files, as llama.cpp keeps models, made into Hugging Face checkpoint directories.

Needs the package `gguf` (extra `gguf`), which knows the quantised blocks. A family says whether a GGUF file of it is read,
and how (`Gguf` in `shared.model.families`).

Invariants:
- A tensor at a time is in memory; the file is mapped, never read whole.
- Weights are written in bf16, rounded to nearest from what the blocks stand for.
- The directory has every tensor of its config.json, and no other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.model.checkpoint import expected_shapes
from shared.model.config import ModelConfig
from shared.model.families import Family, with_gguf
from shared.model.fields import UnknownModel
from shared.model.gguf_tokenizer import write_tokenizer
from shared.weights.directory import stream_tensors

SUFFIX = ".gguf"
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_ROPE = "rope_freqs.weight"  # divisors of Llama 3's rotations: a fact of config.json and no weight


@dataclass(frozen=True, slots=True)
class Opened:
    """A file whose family is known. `meta`: its metadata as plain values. `tensors`: gguf's own, by llama.cpp's names."""

    path: Path
    family: Family
    meta: dict[str, Any]
    tensors: dict[str, Any]


def convert(path: Path, folder: Path) -> None:
    """Write the file's model into an empty folder: config.json, model.safetensors, tokenizer and chat template. Raises
    UnknownModel naming what cannot be read, and what is allowed."""
    opened = open_file(path)
    config = config_of(opened)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    plan = _plan(opened, expected_shapes(ModelConfig.from_dict(config)))
    heads = {name: ("BF16", shape) for _, parts in plan for name, shape in parts}
    stream_tensors(folder / "model.safetensors", heads, _converted(opened, plan, config))
    write_tokenizer(opened.meta, folder)


def open_file(path: Path) -> Opened:
    """Raises UnknownModel: no GGUF file, a part of one, or one of an architecture that no family names."""
    try:
        import gguf
    except ImportError:
        raise UnknownModel("a GGUF file needs the package gguf: pip install 'etude[gguf]'", path) from None
    try:
        reader = gguf.GGUFReader(str(path))
        meta = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except OSError as error:
        raise UnknownModel(f"cannot be read ({error.strerror or error})", path) from None
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise UnknownModel(f"not a whole GGUF file ({type(error).__name__}: {error!s:.120})", path) from None
    if (parts := meta.get("split.count", 1)) > 1:
        raise UnknownModel(
            f"one of {parts} parts; merge them first: llama-gguf-split --merge {path.name} OUT.gguf", path
        )
    architecture = meta.get("general.architecture")
    known = {found.gguf.architecture: found for found in with_gguf() if found.gguf}
    if architecture not in known:
        allowed = ", ".join(sorted(known))
        raise UnknownModel(
            f"GGUF of architecture {architecture!r:.80} (general.architecture); allowed: {allowed}", path
        )
    return Opened(path, known[architecture], meta, tensors)


def config_of(opened: Opened) -> dict[str, Any]:
    """config.json of the file's model."""
    gguf, meta, rope = opened.family.gguf, opened.meta, opened.tensors.get(_ROPE)
    assert gguf is not None, "open_file takes no other"
    facts = {**meta, "tied": "output.weight" not in opened.tensors}
    if rope is not None:
        facts["rope_divisors"] = rope.data.reshape(-1)
    tokens = {"eos_token_id": "eos_token_id", "bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
    ids = {name: meta[f"tokenizer.ggml.{key}"] for name, key in tokens.items() if f"tokenizer.ggml.{key}" in meta}
    try:
        return {"model_type": opened.family.name, **gguf.config(facts), **ids, "dtype": "bfloat16"}
    except UnknownModel as error:
        raise UnknownModel(str(error), opened.path) from None


Plan = list[tuple[str, list[tuple[str, tuple[int, ...]]]]]  # llama.cpp's name -> published names and shapes, in order


def _plan(opened: Opened, wanted: Mapping[str, tuple[int, ...]]) -> Plan:
    """Every tensor of the file with what becomes of it. Raises UnknownModel unless they are exactly those of config.json."""
    plan: Plan = []
    for name in opened.tensors:
        if name == _ROPE:
            continue
        published = list(_published(name, opened.meta))
        if not published or any(part not in wanted for part in published):
            raise UnknownModel(f"tensor {name!r} is none of a {opened.family.name} model", opened.path)
        plan.append((name, [(part, wanted[part]) for part in published]))
    found = {part for _, parts in plan for part, _ in parts}
    if missing := sorted(wanted.keys() - found):
        raise UnknownModel(f"{len(missing)} tensors are missing, the first is {missing[0]!r}", opened.path)
    return plan


def _published(name: str, meta: Mapping[str, Any]) -> Iterator[str]:
    """Hugging Face's names for a tensor of llama.cpp's; none for an unknown one."""
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        yield f"{_NAMES[stem]}.{kind}"
    elif stem.startswith("blk."):
        layer, _, part = stem.removeprefix("blk.").partition(".")
        if part in _OF_A_LAYER:
            yield f"model.layers.{layer}.{_OF_A_LAYER[part]}.{kind}"
        elif part in _OF_EXPERTS:
            for e in range(int(meta.get(f"{meta['general.architecture']}.expert_count", 0))):
                yield f"model.layers.{layer}.mlp.experts.{e}.{_OF_EXPERTS[part]}.{kind}"


def _converted(opened: Opened, plan: Plan, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """bf16 bits of every published tensor, in the plan's order."""
    for name, parts in plan:
        values = _dequantised(opened, name)
        heads = _permuted_heads(opened.family, name, config)
        if heads:
            values = _in_halves(values, heads)
        pieces = values if len(parts) > 1 else values[None]
        for (published, shape), piece in zip(parts, pieces, strict=True):
            if piece.shape != shape:
                raise UnknownModel(f"{name} is {piece.shape}; its metadata ask for {shape}", opened.path)
            yield published, torch.from_numpy(piece).bfloat16().view(torch.int16).numpy().view(np.uint16)


def _dequantised(opened: Opened, name: str) -> np.ndarray:
    from gguf.quants import dequantize

    tensor = opened.tensors[name]
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        kind = tensor.tensor_type.name
        raise UnknownModel(
            f"{name} is {kind}, which the package gguf does not dequantise ({error}); allowed: F32, F16, BF16, "
            "Q4_0 to Q8_0, the K-quants and most IQ ones",
            opened.path,
        ) from None
    return np.array(values, np.float32)  # a copy: F32 lies in the mapped file, which cannot be written to


def _permuted_heads(family: Family, name: str, config: Mapping[str, Any]) -> int:
    """How many heads lie with their rows in pairs; 0: none, as everywhere but in q and k of a family that is `permuted`."""
    assert family.gguf is not None
    part = name.split(".")[-2]
    if not family.gguf.permuted or part not in ("attn_q", "attn_k"):
        return 0
    return int(config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"])


def _in_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows (2i, 2i+1) of each head become rows (i, i + D/2), which undoes llama.cpp's converter."""
    rest = values.shape[1:]
    paired = values.reshape(heads, values.shape[0] // heads // 2, 2, *rest)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)
