"""The checkpoint that a phase starts from, and the one that it leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.trainer.mesh import BadMesh, Mesh
from services.trainer.phases.config import BadPhase, Phase, PhaseConfig
from shared.model import ModelConfig, Transformer, load_checkpoint, save_checkpoint
from shared.model.checkpoint import expected_shapes, stored_tensors
from shared.model.fields import UnknownModel
from shared.renderers.card import CARD

COMPANIONS = (".json", ".jinja", ".txt", ".model")  # files beside the weights that go with them
OWN = ("config.json", "model.safetensors.index.json", CARD)


def shape_of(config: PhaseConfig, phase: Phase) -> ModelConfig:
    """Return the model's shape in this phase. Raises BadPhase if the checkpoint is not one, or its tensors are of another
    architecture than its config.json says. Reads no weights."""
    folder = Path(config.checkpoint)
    try:
        before = ModelConfig.load(folder)
        shape = ModelConfig.from_dict(_changed(before, config, phase))
        expected, found = expected_shapes(before), stored_tensors(folder)
        mtp = tuple(f"model.layers.{before.num_hidden_layers + i}." for i in range(before.num_mtp_layers))
        for name, size in expected.items():
            if name not in found and not name.startswith(mtp):
                raise UnknownModel(f"tensor {name!r} is missing; config.json asks for {size}")
            if name in found and found[name].shape != size:
                raise UnknownModel(f"tensor {name!r} is {found[name].shape}; config.json asks for {size}")
    except UnknownModel as error:
        raise BadPhase(f"checkpoint: {folder}: {error}") from None
    if config.data.length > shape.max_position_embeddings:
        raise BadPhase(
            f"data.length: found {config.data.length}; allowed: 2 to {shape.max_position_embeddings}, the checkpoint's context "
            "(max_position_embeddings); `etude train extend` makes it longer"
        )
    if config.data.held_out and config.measure.window > shape.max_position_embeddings:
        raise BadPhase(
            f"measure.window: found {config.measure.window}; allowed: 2 to {shape.max_position_embeddings}, "
            "the checkpoint's context"
        )
    if config.train.mtp == "on" and not shape.num_mtp_layers:
        raise BadPhase(
            "train.mtp: found 'on'; allowed: 'auto', 'off', for the checkpoint has no MTP layers (model.mtp_layers)"
        )
    return shape


def _changed(before: ModelConfig, config: PhaseConfig, phase: Phase) -> dict[str, Any]:
    raw = dict(before.raw)
    layers = config.model.mtp_layers or (1 if phase == "mtp" else 0)
    if layers and not before.num_mtp_layers:
        raw["num_nextn_predict_layers"] = layers
    rope = config.model.rope
    if rope is not None:
        raw.pop("rope_scaling", None)
        new: dict[str, Any] = {"rope_type": rope.type, "rope_theta": rope.theta or before.rope.theta}
        if rope.type != "default":
            new["factor"] = rope.factor
        if rope.type == "yarn":
            new["original_max_position_embeddings"] = rope.original or before.max_position_embeddings
        raw["rope_parameters"] = new
        raw.pop("rope_theta", None)
        raw["max_position_embeddings"] = max(before.max_position_embeddings, config.data.length)
    return raw


def require_mesh(config: PhaseConfig, shape: ModelConfig, world: int) -> None:
    """Raise BadPhase, naming the field, if `world` ranks cannot be divided as `machine` says."""
    machine = config.machine
    try:
        mesh = Mesh.of(0, world, machine.context_ranks, machine.expert_ranks)
        mesh.check_experts(shape.moe.num_experts if shape.moe else 0)
    except BadMesh as error:
        raise BadPhase(f"machine.{error.setting}: {error.reason}") from None


def load(config: PhaseConfig, shape: ModelConfig, device: str) -> Transformer:
    """Return the model in float32. New MTP layers are random, by the seed."""
    torch.manual_seed(config.seed)
    model = load_checkpoint(config.checkpoint, torch.float32, shape).to(device)
    model.recomputes = config.machine.recompute
    return model


def learns_mtp(config: PhaseConfig, shape: ModelConfig, phase: Phase) -> bool:
    wanted = config.train.mtp == "on" or (config.train.mtp == "auto" and phase != "cpt")
    return wanted and shape.num_mtp_layers > 0


def write(
    model: Transformer, tensors: Mapping[str, Tensor], config: PhaseConfig, phase: Phase, folder: Path, **facts: Any
) -> None:
    """Write the checkpoint into a folder: `tensors` by published name, in bf16, and copies of the start's other files (tokenizer,
    chat template). `facts` go into its card."""
    start = Path(config.checkpoint)
    save_checkpoint(model, folder, tensors=tensors)
    for path in sorted(start.iterdir()):
        if path.is_file() and path.suffix in COMPANIONS and path.name not in OWN:
            shutil.copyfile(path, folder / path.name)
    try:
        card = json.loads((start / CARD).read_text())
    except FileNotFoundError:
        card = {}
    if config.model.rope is not None:
        card["context"] = model.config.max_position_embeddings
    history = [*card.get("phases", ()), {"phase": phase, **facts}]
    (folder / CARD).write_text(json.dumps({**card, "phases": history}, indent=2) + "\n")
