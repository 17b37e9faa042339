"""Tensors as the files of a Hugging Face directory: `model.safetensors`, or shards and their index. Needs no torch.

The bits are written as they are. A file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from shared.weights.codec import bits
from shared.weights.manifest import Tensors, dtype_name

SHARD_BYTES = 5 << 30  # as transformers writes them


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
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        array = tensors[name]
        span = [offset, offset + array.nbytes]
        header[name] = {"dtype": dtype_name(name, array), "shape": list(array.shape), "data_offsets": span}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    _place(path, (part for part in _bytes(tensors, names, text)))
    return path


def _bytes(tensors: Tensors, names: Sequence[str], header: bytes) -> Iterator[bytes]:
    yield len(header).to_bytes(8, "little")
    yield header
    for name in names:
        yield bits(tensors[name]).tobytes()


def _place(path: Path, parts: Sequence[bytes] | Iterator[bytes]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("xb") as file:
            file.writelines(parts)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
