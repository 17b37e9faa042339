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
from shared.model.checkpoint import copy_checkpoint
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
