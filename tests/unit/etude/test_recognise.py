"""What `etude import` says of a folder that another trainer wrote: what it is, and the way out."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from etude import evaluate, recognise
from etude.exchange import NotExchanged, export_directory, import_to

HUGGING_FACE = ("config.json", "model.safetensors", "tokenizer.json")
VERL = (
    "fsdp_config.json",
    "huggingface/config.json",
    "huggingface/tokenizer.json",
    "extra_state_world_size_2_rank_0.pt",
)
DEEPSPEED = ("global_step20/mp_rank_00_model_states.pt", "global_step20/zero_pp_rank_0_mp_rank_00_optim_states.pt")

# name → files, words that the answer must hold
LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "verl, an actor": (
        ("model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt", *VERL),
        ("FSDP shards of verl", "model_world_size_2_rank_0.pt", "verl.model_merger merge --backend fsdp --local_dir {folder} "),
    ),
    "verl, a step": (
        ("actor/model_world_size_1_rank_0.pt", "critic/model_world_size_1_rank_0.pt", "data.pt"),
        ("FSDP shards of verl", "--local_dir {folder}/actor "),
    ),
    "verl, a run": (
        ("global_step_20/actor/model_world_size_1_rank_0.pt", "global_step_100/actor/model_world_size_1_rank_0.pt"),
        ("--local_dir {folder}/global_step_100/actor ",),
    ),
    "verl with Megatron": (
        ("dist_ckpt/common.pt", "dist_ckpt/.metadata", "huggingface/config.json", "transformer_config.json"),
        ("Megatron shards of verl", "--backend megatron"),
    ),
    "LoRA": (
        ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"),
        ("a LoRA adapter", "merge_and_unload", "from_pretrained('{folder}')"),
    ),
    "a Trainer's folder of LoRA adapters": (("checkpoint-500/adapter_config.json",), ("a LoRA adapter", "{folder}/checkpoint-500")),
    "Megatron": (
        ("latest_checkpointed_iteration.txt", "iter_0000100/mp_rank_00/model_optim_rng.pt"),
        ("Megatron-LM", "export_ckpt"),
    ),
    "Megatron, an iteration": (("mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"), ("Megatron-LM",)),
    "Megatron, distributed": ((".metadata", "__0_0.distcp", "common.pt", "metadata.json"), ("Megatron-LM",)),
    "DeepSpeed": (("latest", "zero_to_fp32.py", *DEEPSPEED), ("DeepSpeed", "zero_to_fp32.py FOLDER OUT --safe_serialization")),
    "DeepSpeed, a step": (("mp_rank_00_model_states.pt",), ("DeepSpeed",)),
    "a Trainer's step under ZeRO-3": (("config.json", "trainer_state.json", "zero_to_fp32.py", *DEEPSPEED), ("DeepSpeed",)),
    "a Trainer's step under FSDP": (
        ("trainer_state.json", "pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/.metadata"),
        ("FSDP shards of Accelerate", "accelerate merge-weights {folder}/pytorch_model_fsdp_0 OUT"),
    ),
    "torch DCP": ((".metadata", "__0_0.distcp"), ("torch.distributed", "dcp_to_torch {folder} ")),
    "torchtitan, a run": (("step-9/.metadata", "step-10/.metadata"), ("torch.distributed", "dcp_to_torch {folder}/step-10 ")),
    "pickled": (("config.json", "pytorch_model.bin", "tokenizer.json"), ("pickle", "pytorch_model.bin", "save_pretrained")),
    "pickled, in shards": (("config.json", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"), ("pickle",)),
    "Meta's": (("params.json", "consolidated.00.pth", "tokenizer.model"), ("makers' own layout", "consolidated.00.pth")),
    "GGUF": (("model-q8_0.gguf",), ("GGUF", "name the file: {folder}/model-q8_0.gguf")),
    "half a download": (("config.json", "model-00001-of-00002.safetensors"), ("without their index",)),
    "a Trainer's parent": (
        (*(f"checkpoint-{n}/{name}" for n in (500, 1000) for name in HUGGING_FACE), "runs/events", "README.md"),
        ("did you mean {folder}/checkpoint-1000?",),
    ),
    "a hub's cache": (
        (*(f"snapshots/0a1b/{name}" for name in HUGGING_FACE), "refs/main"),
        ("did you mean {folder}/snapshots/0a1b?",),
    ),
}  # fmt: skip


def laid_out(folder: Path, files: tuple[str, ...]) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_of_another_trainer_is_named_with_the_way_out(name: str, tmp_path: Path) -> None:
    files, words = LAYOUTS[name]
    folder = laid_out(tmp_path / "given", files)
    with pytest.raises(NotExchanged) as told:
        import_to(folder, tmp_path / "out")
    said = str(told.value)
    for word in words:
        assert word.format(folder=folder) in said
    assert said.startswith(f"{folder}: ")
    assert not (tmp_path / "out").exists()


def test_every_row_of_the_table_is_reached(tmp_path: Path) -> None:
    said = [
        recognise.objection(laid_out(tmp_path / str(i), files)) or "" for i, (files, _) in enumerate(LAYOUTS.values())
    ]
    for kind in recognise.TABLE:
        assert any(kind.what in one for one in said), kind.what


@pytest.mark.parametrize(
    "extra", ["zero_to_fp32.py", "pytorch_model.bin", "consolidated.safetensors", "checkpoint-5/config.json"]
)
def test_a_hugging_face_checkpoint_is_one_whatever_else_lies_there(extra: str, tmp_path: Path) -> None:
    assert recognise.objection(laid_out(tmp_path, (*HUGGING_FACE, extra))) is None


@pytest.mark.parametrize("files", [(), ("README.md", "a/b/c/d")])
def test_nothing_is_claimed_of_what_is_not_known(files: tuple[str, ...], tmp_path: Path) -> None:
    assert recognise.objection(laid_out(tmp_path, files)) is None
    with pytest.raises(NotExchanged, match=r"no config\.json; expected a Hugging Face checkpoint directory"):
        import_to(tmp_path, tmp_path / "out")


def test_a_file_that_is_no_gguf_is_not_taken_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(NotExchanged, match=r"model\.safetensors: found a file; allowed: a folder with config\.json"):
        import_to(tmp_path / "model.safetensors", tmp_path / "out")


def test_a_checkpoint_that_torch_itself_distributes_is_known(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    assert "format_utils dcp_to_torch" in (recognise.objection(tmp_path / "step-1") or "")


def test_export_and_eval_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = laid_out(tmp_path / "adapter", ("adapter_config.json",))
    with pytest.raises(NotExchanged, match="a LoRA adapter"):
        export_directory(folder, tmp_path / "out")
    code = evaluate.run(folder, Path("none"), samples=1, out=None, limit=1)
    assert (code, "a LoRA adapter" in " ".join(capsys.readouterr().err.split())) == (2, True)


@pytest.fixture
def anyone(tmp_path: Path) -> Iterator[Path]:
    """A folder of a user who is not root, as whom the test runs: root may look into every folder."""
    if os.geteuid() != 0:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 65534, -1)
        os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("mode", [0o000, 0o400, 0o600])
def test_a_folder_below_that_we_may_not_look_into_is_passed_over(anyone: Path, mode: int) -> None:
    for name in HUGGING_FACE:
        laid_out(anyone, (f"run/{name}", f"closed/{name}"))
    (anyone / "closed").chmod(mode)
    try:
        assert recognise.objection(anyone / "closed") is None
        assert str(recognise.objection(anyone)).endswith(f"did you mean {anyone / 'run'}?")
    finally:
        (anyone / "closed").chmod(0o700)
