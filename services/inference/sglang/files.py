"""A version as a folder that SGLang loads: its names, its config.json, FP8 where that is asked for.

What the folder leaves out is as deliberate as what it holds: no tokenizer and no end-of-text token (only the tokens that
a request names stop it), no generation_config.json (its top-p would bias the importance ratios).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from services.inference.sglang.flags import HEADROOM
from services.inference.sglang.layout import MTP
from shared.model.config import ModelConfig
from shared.weights import Tensors
from shared.weights.blocks import BLOCK, in_fp8, is_fp8, to_blocks
from shared.weights.torch_tensors import from_bits

FILE_BYTES = 4 << 30  # of one safetensors file, about
Stored = tuple[str, str, list[int], bytes | memoryview]  # name, safetensors' dtype, shape, bytes


def engine_config(model: ModelConfig, *, context: int, dtype: str, fp8: bool) -> dict[str, Any]:
    """config.json as SGLang needs it. Pure."""
    config = {
        **model.to_dict(),
        **_shape(model),
        "model_type": model.serving.model_type or model.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        "eos_token_id": None,  # named, for DeepSeek's default is 1
        "bos_token_id": None,
        "pad_token_id": None,
        # Only the size of a table: how far a model can see is the run's business.
        "max_position_embeddings": max(model.max_position_embeddings, context + HEADROOM),
        "num_nextn_predict_layers": model.num_mtp_layers,
    }
    if not model.serving.ties_head:
        config["tie_word_embeddings"] = False  # the head is written out
    if "rope_parameters" not in config and not config.get("rope_scaling"):
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": model.rope.theta}
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",  # per token and 128 numbers
            "weight_block_size": [BLOCK, BLOCK],
        }
    return config


def _shape(model: ModelConfig) -> dict[str, Any]:
    """What a config.json may leave out and SGLang may assume otherwise than our reader."""
    said: dict[str, Any] = {"rms_norm_eps": model.rms_norm_eps, "num_key_value_heads": model.num_key_value_heads}
    if model.mla is None or (moe := model.moe) is None:
        return {**said, "head_dim": model.head_dim}
    return {
        **said,
        "norm_topk_prob": moe.norm_topk_prob,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def served(tensors: Tensors, *, fp8: bool) -> dict[str, np.ndarray]:
    """The published tensors as they compute: rounded through FP8 where that is asked for, bf16 bits again."""
    return in_fp8(tensors) if fp8 else dict(tensors)


def engine_name(name: str, model: ModelConfig) -> str:
    """A published name as SGLang's loaders read it; they differ in the MTP layer alone."""
    mtp, drafting = f"model.layers.{model.num_hidden_layers}.", model.serving.drafting
    if drafting is None or drafting.files is None or not name.startswith(mtp):
        return name
    part, _, kind = name.removeprefix(mtp).rpartition(".")
    *own, decoder = drafting.files
    return f"{dict(zip(MTP, own, strict=True)).get(part) or f'{decoder}.{part}'}.{kind}"


def engine_tensors(tensors: Tensors, model: ModelConfig, *, fp8: bool, draft: bool) -> Iterator[Stored]:
    """What is written, in order, one tensor at a time. Pure."""
    for name in _written(tensors, model, draft):
        array, written = tensors[name], engine_name(name, model)
        if fp8 and is_fp8(name, array.ndim):
            q, s = to_blocks(from_bits({"": array})[""])
            yield written, "F8_E4M3", list(q.shape), q.view(torch.uint8).numpy().data
            yield f"{written}_scale_inv", "F32", list(s.shape), s.numpy().data
        else:
            yield written, "BF16" if array.dtype == np.uint16 else "F32", list(array.shape), _bytes(array)
    if model.tie_word_embeddings and not model.serving.ties_head:
        head = tensors["model.embed_tokens.weight"]
        yield "lm_head.weight", "BF16", list(head.shape), _bytes(head)


def _written(tensors: Tensors, model: ModelConfig, draft: bool) -> list[str]:
    mtp = tuple(f"model.layers.{model.num_hidden_layers + i}." for i in range(model.num_mtp_layers))
    return sorted(name for name in tensors if draft or not name.startswith(mtp))


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def write(
    folder: Path, tensors: Tensors, model: ModelConfig, config: dict[str, Any], *, fp8: bool, draft: bool
) -> Path:
    """The folder, whole or not at all; one that is there already is replaced. Returns it. Raises OSError."""
    scratch = folder.with_name(f".{folder.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        part: list[Stored] = []
        size = files = 0
        for item in engine_tensors(tensors, model, fp8=fp8, draft=draft):
            if part and size + _length(item[3]) > FILE_BYTES:
                _safetensors(scratch / f"model-{files:05d}.safetensors", part)
                part, size, files = [], 0, files + 1
            part.append(item)
            size += _length(item[3])
        _safetensors(scratch / f"model-{files:05d}.safetensors", part)
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def least_bytes(tensors: Tensors, model: ModelConfig, *, fp8: bool, draft: bool) -> int:
    """The folder takes no less."""
    return sum(tensors[name].nbytes for name in _written(tensors, model, draft)) // (2 if fp8 else 1)


def _safetensors(path: Path, items: list[Stored]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape, data in items:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + _length(data)]}
        at += _length(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        _write_all(file, items)


def _write_all(file: BinaryIO, items: list[Stored]) -> None:
    for _, _, _, data in items:
        file.write(data)


def _length(data: bytes | memoryview) -> int:
    return data.nbytes if isinstance(data, memoryview) else len(data)
