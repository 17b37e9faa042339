"""Folders of other trainers that are taken for Hugging Face checkpoints: which of them a folder is, and the way out.

`TABLE` is the one place: a row is what a folder is, files by which it is known, and how to make a checkpoint of it. Rows stand in
the order in which they are tried: Megatron's folders hold torch.distributed's files, too.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WANTED = "config.json, model.safetensors, tokenizer.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
DEPTH = 2  # folders below the one that was given: run/global_step_20/actor
MOST = 1000  # of them are looked at: somebody may have given a home directory


@dataclass(frozen=True, slots=True)
class Kind:
    """`marks`: patterns of files in the folder, any of which is enough. `way_out` names {folder}, and {file}, which was found by a
    mark; OUT is the folder that results."""

    what: str
    marks: tuple[str, ...]
    way_out: str


TABLE: tuple[Kind, ...] = (
    Kind(
        "FSDP shards of verl",
        ("model_world_size_*_rank_*.pt",),
        "python -m verl.model_merger merge --backend fsdp --local_dir {folder} --target_dir OUT",
    ),
    Kind(
        "Megatron shards of verl",
        ("dist_ckpt",),
        "python -m verl.model_merger merge --backend megatron --local_dir {folder} --target_dir OUT",
    ),
    Kind(
        "a LoRA adapter, without the model that it belongs to",
        ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"),
        "merge it, with peft: AutoPeftModelForCausalLM.from_pretrained('{folder}').merge_and_unload().save_pretrained('OUT'), and "
        "save the tokenizer of its model there",
    ),
    Kind(
        "a checkpoint of Megatron-LM",
        (
            "latest_checkpointed_iteration.txt",
            "mp_rank_*/model_optim_rng.pt",
            "mp_rank_*/distrib_optim.pt",
            "common.pt",
        ),
        "export it with Megatron Bridge: AutoBridge.from_hf_pretrained('MODEL').export_ckpt('{folder}', 'OUT'), where MODEL is "
        "the Hugging Face model of this architecture and the folder is that of one iteration (iter_…)",
    ),
    Kind(
        "a checkpoint of DeepSpeed",
        ("zero_to_fp32.py", "global_step*/*_states.pt", "*_optim_states.pt", "*_model_states.pt"),
        "python zero_to_fp32.py FOLDER OUT --safe_serialization, where FOLDER holds that script and the file `latest`; then copy "
        "config.json and the files of the tokenizer to OUT",
    ),
    Kind(
        "FSDP shards of Accelerate",
        ("pytorch_model_fsdp_*/.metadata",),
        "accelerate merge-weights {folder}/pytorch_model_fsdp_0 OUT; then copy config.json and the files of the tokenizer to OUT",
    ),
    Kind(
        "a checkpoint of torch.distributed (DCP)",
        (".metadata", "*.distcp"),
        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} state.pt; then load that into the model and "
        "call save_pretrained('OUT')",
    ),
    Kind(
        "weights in pickle files, which run code when they are read",
        ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin", "pytorch_model_fsdp.bin"),
        "with transformers, if you trust it: AutoModelForCausalLM.from_pretrained('{folder}').save_pretrained('OUT') writes "
        "safetensors; then copy the files of the tokenizer to OUT",
    ),
    Kind(
        "weights in their makers' own layout",
        ("consolidated*.pth", "consolidated*.safetensors"),
        "take the model's Hugging Face files (model*.safetensors and config.json), which most makers publish as well",
    ),
    Kind("a folder of GGUF files", ("*.gguf",), "name the file: {file}"),
    Kind(
        "shards of safetensors without their index",
        ("model-*-of-*.safetensors",),
        "fetch or copy model.safetensors.index.json and config.json, too: the download was not finished",
    ),
)


def is_checkpoint(folder: Path) -> bool:
    """Return whether the folder has the files of a Hugging Face checkpoint. Reads none of them. A folder that we may not look
    into has none."""
    return os.path.exists(folder / "config.json") and any(os.path.exists(folder / name) for name in WEIGHTS)


def objection(folder: Path) -> str | None:
    """Return a message for the user: it says what `folder` is instead of a Hugging Face checkpoint, and what to do
    about it. None: it is a checkpoint, or nothing that `TABLE` lists."""
    if os.path.isfile(folder):
        return f"{folder}: found a file; allowed: a folder with {WANTED}, or a GGUF file"
    if not os.path.isdir(folder) or is_checkpoint(folder):
        return None
    if said := _recognised(folder, folder):
        return said
    below = list(itertools.islice(_below(folder, DEPTH), MOST))
    if whole := next((path for path in below if is_checkpoint(path)), None):
        return f"{folder}: no checkpoint itself, but there is one below it; did you mean {whole}?"
    return next((said for path in below if (said := _recognised(folder, path))), None)


def _recognised(given: Path, folder: Path) -> str | None:
    for kind in TABLE:
        if file := next((path for mark in kind.marks for path in sorted(folder.glob(mark))), None):
            return (
                f"{given}: found {kind.what} ({file.relative_to(given)}); needed: a Hugging Face checkpoint ({WANTED}). "
                f"Way out: {kind.way_out.format(folder=folder, file=file)}"
            )
    return None


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders below, the nearest first; of several steps of one run the newest first."""
    level = [folder]
    for _ in range(depth):
        level = [path for above in level for path in _folders(above)]
        yield from level


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted((path for path in folder.iterdir() if path.is_dir()), key=_newest_first)
    except OSError:  # we may not look into it
        return []


def _newest_first(path: Path) -> tuple[str, int, str]:
    """checkpoint-1000 before checkpoint-500."""
    number = re.search(r"(\d+)$", path.name)
    return (path.name[: number.start()], -int(number[1]), path.name) if number else (path.name, 0, path.name)
