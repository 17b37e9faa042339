"""Hugging Face checkpoints in and out, under their published names.

`published_tensors(model)` maps every published name to a contiguous view of the model's memory: reading a checkpoint is
copying into these views, publishing is reading them. Fused parameters (qkv, gate_up, stacked experts) are laid out so
that each published tensor is a run of rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shared.model.attention import GroupedQueryAttention
from shared.model.config import ModelConfig, UnknownModel
from shared.model.moe import MixtureOfExperts, Mlp
from shared.model.mtp import MtpLayer
from shared.model.network import DecoderLayer, Transformer
from shared.weights.directory import stream_tensors

KEPT_IN_FLOAT32 = (
    "e_score_correction_bias"  # as DeepSeek publishes it: a bias that bf16 would round to steps too coarse
)
_LFS = b"version https://git-lfs.github.com/spec/"
READ = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
}  # others would be cast to what they do not mean


def published_tensors(model: Transformer) -> dict[str, Tensor]:
    """Published name -> view (no graph). In a fixed order. A tied head is not listed: it is the embedding. Experts that other
    processes hold are not listed either (MixtureOfExperts.keep)."""
    return {name: tensor.detach() for name, tensor in _tensors(model)}


def _tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    yield "model.embed_tokens.weight", model.embed_tokens.weight
    for i, layer in enumerate(model.layers):
        yield from _layer(f"model.layers.{i}", layer)
    yield "model.norm.weight", model.norm.weight
    if model.lm_head is not None:
        yield "lm_head.weight", model.lm_head.weight
    for i, mtp in enumerate(model.mtp_layers, start=len(model.layers)):
        assert isinstance(mtp, MtpLayer)
        name = f"model.layers.{i}"
        yield f"{name}.enorm.weight", mtp.enorm.weight
        yield f"{name}.hnorm.weight", mtp.hnorm.weight
        yield f"{name}.eh_proj.weight", mtp.eh_proj.weight
        yield from _layer(name, mtp.layer)
        yield f"{name}.shared_head.norm.weight", mtp.norm.weight


def _layer(name: str, layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    assert isinstance(layer, DecoderLayer)
    yield f"{name}.input_layernorm.weight", layer.input_layernorm.weight
    attention = layer.self_attn
    if isinstance(attention, GroupedQueryAttention):
        q, k = attention.heads * attention.size, attention.groups * attention.size
        for kind, fused in attention.qkv_proj.named_parameters():  # weight, and bias where there is one
            for part, rows in zip(("q_proj", "k_proj", "v_proj"), fused.split((q, k, k)), strict=True):
                yield f"{name}.self_attn.{part}.{kind}", rows
    for part, weight in attention.named_parameters():
        if not part.startswith("qkv_proj."):
            yield f"{name}.self_attn.{part}", weight
    yield f"{name}.post_attention_layernorm.weight", layer.post_attention_layernorm.weight
    if isinstance(layer.mlp, MixtureOfExperts):
        yield from _moe(f"{name}.mlp", layer.mlp)
    else:
        yield from _mlp(f"{name}.mlp", layer.mlp)


def _mlp(name: str, mlp: Mlp) -> Iterator[tuple[str, Tensor]]:
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    yield f"{name}.gate_proj.weight", gate
    yield f"{name}.up_proj.weight", up
    yield f"{name}.down_proj.weight", mlp.down_proj.weight


def _moe(name: str, moe: MixtureOfExperts) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.gate.weight", moe.gate.weight
    if moe.gate.moe.scoring == "sigmoid":
        yield f"{name}.gate.{KEPT_IN_FLOAT32}", moe.gate.e_score_correction_bias
    yield from _experts(name, moe.own, moe.gate_up, moe.down)
    if moe.shared_experts is not None:
        yield from _mlp(f"{name}.shared_experts", moe.shared_experts)


def published_experts(layer: int, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """The part of `published_tensors` that are the experts of the trunk's layer, from the stacks of all of them: `gate_up`
    [E, 2I, D], `down` [E, D, I]."""
    return dict(_experts(f"model.layers.{layer}.mlp", range(len(down)), gate_up.detach(), down.detach()))


def _experts(name: str, numbers: range, gate_up_EOD: Tensor, down_EDI: Tensor) -> Iterator[tuple[str, Tensor]]:
    for e, gate_up, down in zip(numbers, gate_up_EOD, down_EDI, strict=True):
        gate, up = gate_up.chunk(2)
        yield f"{name}.experts.{e}.gate_proj.weight", gate
        yield f"{name}.experts.{e}.up_proj.weight", up
        yield f"{name}.experts.{e}.down_proj.weight", down


def load_checkpoint(
    directory: Path | str, dtype: torch.dtype = torch.float32, config: ModelConfig | None = None
) -> Transformer:
    """Read a checkpoint. `config`: in place of the directory's own, for another rotation or new MTP layers. MTP layers that the
    files lack stay random, with all their tensors missing: such a checkpoint has none yet. Raises UnknownModel where a tensor is
    missing, of another shape or of a dtype that is none of READ, naming it."""
    directory = Path(directory)
    config = ModelConfig.load(directory) if config is None else config
    model = narrowed(Transformer(config), dtype)
    views = published_tensors(model)
    seen: set[str] = set()
    for path, own in _files(directory):
        with _reading(path) as file:
            for name in _names(path, file, own):
                if name in views:
                    _copy(path, name, file.get_tensor(name), views[name])
                    seen.add(name)
    missing = [name for name in views if name not in seen]
    mtp = tuple(f"model.layers.{len(model.layers) + i}." for i in range(len(model.mtp_layers)))
    if missing and (any(name.startswith(mtp) for name in seen) or not all(name.startswith(mtp) for name in missing)):
        raise UnknownModel(f"{len(missing)} tensors are missing, the first is {missing[0]!r}", directory)
    return model


def narrowed(model: Transformer, dtype: torch.dtype) -> Transformer:
    """The model in `dtype`, but for what is published in float32."""
    model = model.to(dtype)
    for moe in (m for m in model.modules() if isinstance(m, MixtureOfExperts)):
        if moe.gate.moe.scoring == "sigmoid":
            moe.gate.e_score_correction_bias = moe.gate.e_score_correction_bias.float()
    return model


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it lies in a file."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: READ's values, F64, I32 and others


def stored_tensors(directory: Path | str) -> dict[str, Stored]:
    """All tensors in a checkpoint's files, by name; none is read. Raises UnknownModel."""
    stored: dict[str, Stored] = {}
    for path, own in _files(Path(directory)):
        with _reading(path) as file:
            for name in _names(path, file, own):
                found = file.get_slice(name)
                stored[name] = Stored(tuple(found.get_shape()), found.get_dtype())
    return stored


def not_finite(directory: Path | str, names: Container[str]) -> list[str]:
    """Those of `names` whose tensors in a checkpoint's files hold a number that is none in bf16. All are read, one at a time.
    Raises UnknownModel."""
    bad: list[str] = []
    for path, own in _files(Path(directory)):
        with _reading(path) as file:
            for name in _names(path, file, own):
                if name in names and not bool(torch.isfinite(file.get_tensor(name).to(torch.bfloat16)).all()):
                    bad.append(name)
    return sorted(bad)


def copies(config: ModelConfig) -> dict[str, str]:
    """Tensors that a checkpoint may hold although the model has none of its own there → which one it has instead: a tied head, and
    what an MTP layer shares with the trunk, as DeepSeek publishes it."""
    embedding = "model.embed_tokens.weight"
    head = embedding if config.tie_word_embeddings else "lm_head.weight"
    there = {"lm_head.weight": embedding} if config.tie_word_embeddings else {}
    for i in range(config.num_hidden_layers, config.num_hidden_layers + config.num_mtp_layers):
        there[f"model.layers.{i}.embed_tokens.weight"] = embedding
        there[f"model.layers.{i}.shared_head.head.weight"] = head
    return there


def other_than(directory: Path | str, originals: Mapping[str, str]) -> list[str]:
    """Those tensors of a checkpoint's files that are not the copies of others that they should be. `originals`: name → name, both
    there. Raises UnknownModel."""
    where: dict[str, Path] = {}
    for path, own in _files(Path(directory)):
        with _reading(path) as file:
            where |= dict.fromkeys(_names(path, file, own), path)

    def tensor(name: str) -> Tensor:
        with _reading(where[name]) as file:
            found: Tensor = file.get_tensor(name)
            return found.float()

    return sorted(name for name, original in originals.items() if not torch.equal(tensor(name), tensor(original)))


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors that a checkpoint of this configuration has, by published name. Allocates nothing. Raises
    UnknownModel where the configuration contradicts itself."""
    try:
        with torch.device("meta"):
            return {name: tuple(tensor.shape) for name, tensor in published_tensors(Transformer(config)).items()}
    except (RuntimeError, TypeError, ValueError, ArithmeticError, AssertionError) as error:
        raise UnknownModel(f"config.json describes no model: {error}") from None


def _files(directory: Path) -> list[tuple[Path, dict[str, str]]]:
    """Return the files of weights, each with the index: tensor -> name of the file that holds it; empty: there is no index.
    Where there are both, the single file, as transformers takes it: the index is of shards that were there before. Raises
    UnknownModel."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [(single, {})]
    if index.exists():
        try:
            shards = {str(tensor): str(name) for tensor, name in json.loads(index.read_text())["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnknownModel(f"no index of a checkpoint's files ({type(error).__name__}: {error})", index) from None
        for tensor, name in shards.items():
            if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
                raise UnknownModel(
                    f"weight_map: found file {name!r} for tensor {tensor!r}; allowed: the name of a file in the same folder. "
                    "Way out: put the shard there and name it without a path",
                    index,
                )
        return [(directory / name, shards) for name in sorted(set(shards.values()))]
    raise UnknownModel(f"found neither {single.name} nor {index.name}", directory)


def _names(path: Path, file: Any, shards: Mapping[str, str]) -> list[str]:
    """Return the tensors of an open file that are the checkpoint's. A tensor that the index places in another file is a stale copy
    here, and is passed over. Raises UnknownModel where the index places a tensor here that the file lacks."""
    there = set(file.keys())
    missing = sorted(tensor for tensor, name in shards.items() if name == path.name and tensor not in there)
    if missing:
        raise UnknownModel(
            f"the index places tensor {missing[0]!r} in this shard, which lacks it ({len(missing)} such tensors). Way out: "
            "fetch index and shards again, together",
            path,
        )
    return sorted(name for name in there if shards.get(name, path.name) == path.name)


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """The open file. Raises UnknownModel where it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UnknownModel(f"not a readable safetensors file ({_pointer(path) or error})", path) from None


def _pointer(path: Path) -> str:
    """Of a clone without Git LFS; empty for any other file."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_LFS))
    except OSError:
        return ""
    return "found a pointer of Git LFS; `git lfs pull` in its clone fetches the file" if head == _LFS else ""


def _copy(path: Path, name: str, source: Tensor, target: Tensor) -> None:
    if source.shape != target.shape:
        raise UnknownModel(f"{name} is {tuple(source.shape)}; config.json asks for {tuple(target.shape)}", path)
    if source.dtype not in READ:
        found = str(source.dtype).removeprefix("torch.")
        raise UnknownModel(f"{name} is {found}; allowed: {', '.join(READ.values())}", path)
    target.copy_(source)


def copy_checkpoint(directory: Path | str, folder: Path | str) -> None:
    """What loading in bf16 and saving would write, byte for byte, with one tensor at a time in memory. Raises UnknownModel as
    `load_checkpoint` does, and for a checkpoint without its MTP layers."""
    directory, folder = Path(directory), Path(folder)
    config = ModelConfig.load(directory)
    shapes = expected_shapes(config)
    kept = {name: name.endswith(KEPT_IN_FLOAT32) for name in shapes}
    order = sorted(shapes, key=lambda name: (not kept[name], name))  # as safetensors orders them
    with ExitStack() as stack:
        there: dict[str, tuple[Path, Any]] = {}
        for path, own in _files(directory):
            file = stack.enter_context(_reading(path))
            there |= dict.fromkeys(_names(path, file, own), (path, file))
        if missing := sorted(shapes.keys() - there.keys()):
            raise UnknownModel(f"{len(missing)} tensors are missing, the first is {missing[0]!r}", directory)

        def copied() -> Iterator[tuple[str, Any]]:
            for name in order:
                path, file = there[name]
                target = torch.empty(shapes[name], dtype=torch.float32 if kept[name] else torch.bfloat16)
                _copy(path, name, file.get_tensor(name), target)
                yield name, target.numpy() if kept[name] else target.view(torch.int16).numpy().view(np.uint16)

        heads = {name: ("F32" if kept[name] else "BF16", shapes[name]) for name in order}
        stream_tensors(folder / "model.safetensors", heads, copied())
    _write_config(config, folder, torch.bfloat16)


def save_checkpoint(
    model: Transformer,
    directory: Path | str,
    dtype: torch.dtype = torch.bfloat16,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes config.json and model.safetensors, each atomically; other files in the directory stay. `tensors`: by published name,
    in place of the model's own, which lack the experts that other processes hold."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    written = {
        name: tensor.to(torch.float32 if name.endswith(KEPT_IN_FLOAT32) else dtype).clone().contiguous()
        for name, tensor in (published_tensors(model) if tensors is None else tensors).items()
    }
    temporary = directory / f".model.safetensors.{os.getpid()}"
    save_file(written, temporary, metadata={"format": "pt"})
    temporary.replace(directory / "model.safetensors")
    _write_config(model.config, directory, dtype)


def _write_config(config: ModelConfig, directory: Path, dtype: torch.dtype) -> None:
    content = {**config.to_dict(), "dtype": str(dtype).removeprefix("torch.")}
    temporary = directory / f".config.json.{os.getpid()}"
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(directory / "config.json")
