"""Tensors as the files of a Hugging Face directory: `model.safetensors`, or shards and their index. Needs no torch.

The bits are written as they are. A file appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from shared.weights.codec import bits
from shared.weights.manifest import Tensors, dtype_name

SHARD_BYTES = 5 << 30  # as transformers writes them
Heads = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> safetensors' dtype and shape, in order
_BYTES = {"BF16": 2, "F32": 4}


def write_tensors(tensors: Tensors, directory: Path, *, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """One file, or shards of about `shard_bytes` and `model.safetensors.index.json`. Returns what was written."""
    shards = list(_shards(tensors, shard_bytes))
    if len(shards) == 1:
        return [_write(tensors, shards[0], directory / "model.safetensors")]
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    written = [_write(tensors, shard, directory / name) for shard, name in zip(shards, names, strict=True)]
    where = {tensor: name for shard, name in zip(shards, names, strict=True) for tensor in shard}
    size = sum(array.nbytes for array in tensors.values())
    index = directory / "model.safetensors.index.json"
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}, indent=2) + "\n"
    _place(index, [text.encode()])
    return [*written, index]


def _shards(tensors: Tensors, most: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name in sorted(tensors):
        if names and size + tensors[name].nbytes > most:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensors[name].nbytes
    yield names


def _write(tensors: Tensors, names: Sequence[str], path: Path) -> Path:
    heads = {name: (dtype_name(name, tensors[name]), tensors[name].shape) for name in names}
    return stream_tensors(path, heads, ((name, tensors[name]) for name in names))


def stream_tensors(path: Path, heads: Heads, tensors: Iterable[tuple[str, np.ndarray]]) -> Path:
    """One file of tensors that come one at a time, in the order of `heads`. Raises ValueError where one is not what its head
    says."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in heads.items():
        end = offset + math.prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    _place(path, _bytes(text, heads, tensors))
    return path


def _bytes(header: bytes, heads: Heads, tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[bytes]:
    yield len(header).to_bytes(8, "little")
    yield header
    left = iter(heads.items())
    for name, array in tensors:
        wanted = next(left, None)
        if wanted != (name, (dtype_name(name, array), tuple(array.shape))):
            raise ValueError(f"tensor {name!r} is {dtype_name(name, array)} {array.shape}; its place is for {wanted}")
        yield bits(array).tobytes()
    if (wanted := next(left, None)) is not None:
        raise ValueError(f"tensor {wanted[0]!r} did not come")


def _place(path: Path, parts: Sequence[bytes] | Iterator[bytes]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("xb") as file:
            file.writelines(parts)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
