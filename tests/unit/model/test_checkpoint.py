"""What a checkpoint's files must hold, and how it is said what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.model import ModelConfig, Transformer, load_checkpoint, save_checkpoint
from shared.model.checkpoint import copy_checkpoint, not_finite, other_than, stored_tensors
from shared.model.config import UnknownModel

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}
NAME = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_checkpoint(Transformer(ModelConfig.from_dict(CONFIG)), tmp_path)
    return tmp_path


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def cast(dtype: torch.dtype) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({NAME: tensors[NAME].to(dtype)})


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_a_tensor_of_another_dtype_is_refused_by_name_dtype_and_what_is_allowed(
    directory: Path, dtype: torch.dtype
) -> None:
    edit(directory, cast(dtype))
    with pytest.raises(UnknownModel) as refused:
        load_checkpoint(directory)
    said = str(refused.value)
    assert f"{NAME} is {str(dtype).removeprefix('torch.')}; allowed: BF16, F16, F32" in said
    assert str(directory / "model.safetensors") in said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bf16_f16_and_f32_are_read(directory: Path, dtype: torch.dtype) -> None:
    edit(directory, cast(dtype))
    before = load_file(directory / "model.safetensors")[NAME].float()
    assert torch.equal(load_checkpoint(directory).layers[1].mlp.gate_up[2].chunk(2)[1], before)


def test_a_missing_tensor_is_refused_with_how_many_and_the_first(directory: Path) -> None:
    edit(directory, lambda tensors: (tensors.pop(NAME), tensors.pop("model.norm.weight")))
    with pytest.raises(UnknownModel, match=rf"2 tensors are missing, the first is '{NAME}'"):
        load_checkpoint(directory)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(directory: Path) -> None:
    edit(directory, lambda tensors: tensors.update({NAME: tensors[NAME][:, :16].contiguous()}))
    with pytest.raises(UnknownModel, match=rf"{NAME} is \(16, 16\); config.json asks for \(16, 32\)"):
        load_checkpoint(directory)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_and_a_file_that_is_not_there_are_told(directory: Path, index: str) -> None:
    (directory / "model.safetensors").unlink()
    path = directory / "model.safetensors.index.json"
    path.write_text(index)
    with pytest.raises(UnknownModel, match="no index of a checkpoint's files"):
        load_checkpoint(directory)
    path.write_text(json.dumps({"weight_map": {NAME: "gone.safetensors"}}))
    with pytest.raises(UnknownModel, match=r"gone\.safetensors"):
        load_checkpoint(directory)


def sharded(directory: Path, stale: str, shown: dict[str, str] | None = None) -> dict[str, Tensor]:
    """Split the checkpoint into a.safetensors and b.safetensors, with a stale copy of the tensor `stale`, which a holds, in b, and
    an index, in which `shown` replaces places. Return the right tensors."""
    right = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    others = sorted(right.keys() - {stale})
    where = {stale: "a.safetensors"} | {name: "ab"[i % 2] + ".safetensors" for i, name in enumerate(others)}
    for file in ("a.safetensors", "b.safetensors"):
        held = {name: right[name] for name in right if where[name] == file}
        if file == "b.safetensors":
            held[stale] = torch.full_like(right[stale], 7)
        save_file(held, directory / file, metadata={"format": "pt"})
    index = {"weight_map": where | (shown or {})}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return right


def test_of_a_tensor_in_two_shards_every_reader_takes_the_one_that_the_index_names(
    directory: Path, tmp_path: Path
) -> None:
    norm = "model.norm.weight"
    right = sharded(directory, norm)
    assert torch.equal(load_checkpoint(directory).norm.weight, right[norm].float())
    (tmp_path / "copy").mkdir()
    copy_checkpoint(directory, tmp_path / "copy")
    assert torch.equal(
        load_file(tmp_path / "copy" / "model.safetensors")[norm].float(), right[norm].to(torch.bfloat16).float()
    )
    assert other_than(directory, {norm: norm}) == []
    assert not_finite(directory, [norm]) == []


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "/tmp/elsewhere.safetensors", "sub/x.safetensors", "..", ""]
)
def test_an_index_that_names_a_file_of_another_folder_is_refused(directory: Path, name: str) -> None:
    sharded(directory, NAME, {NAME: name})
    for read in (load_checkpoint, stored_tensors):
        with pytest.raises(UnknownModel, match=f"weight_map: found file '{name}' for tensor '{NAME}'"):
            read(directory)


def test_a_shard_that_lacks_what_the_index_places_in_it_is_refused_by_tensor_and_shard(directory: Path) -> None:
    right = sharded(directory, NAME)
    other = next(n for n in sorted(right.keys() - {NAME}))  # in a.safetensors alone
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"] | {other: "b.safetensors"}}))
    with pytest.raises(UnknownModel, match=rf"{other}.*lacks it"):
        load_checkpoint(directory)


def test_a_single_file_goes_before_an_index_of_shards_as_in_transformers(directory: Path) -> None:
    theirs = {name: tensor + 1 for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(theirs, directory / "old-00001.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(theirs, "old-00001.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    norm = transformers.Qwen3MoeForCausalLM.from_pretrained(directory).model.norm.weight
    assert torch.equal(norm, load_file(directory / "model.safetensors")["model.norm.weight"])
    assert torch.equal(load_checkpoint(directory).norm.weight, norm.float())


def test_a_file_that_was_cut_short_is_told(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UnknownModel, match="not a readable safetensors file"):
        load_checkpoint(directory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_copy_is_byte_for_byte_what_loading_and_saving_writes(dtype: torch.dtype, tmp_path: Path) -> None:
    from tests.unit.model.test_parity import DEEPSEEK, QWEN2

    for kind, fields in (("deepseek_v3", DEEPSEEK), ("qwen2", QWEN2)):
        model = Transformer(ModelConfig.from_dict({"model_type": kind, **fields}))
        source, copied, saved = (tmp_path / kind / name for name in ("source", "copied", "saved"))
        save_checkpoint(model, source, dtype)
        copied.mkdir()
        copy_checkpoint(source, copied)
        save_checkpoint(load_checkpoint(source, torch.bfloat16), saved, torch.bfloat16)
        for name in ("model.safetensors", "config.json"):
            assert (copied / name).read_bytes() == (saved / name).read_bytes()
