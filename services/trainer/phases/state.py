"""What an interrupted phase goes on from: OUT.work/state.safetensors, masters and moments by name as in RL's checkpoints
(`Engine.state`), and in its header where the phase is. It is replaced as a whole, so it is always the state of one step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.trainer.phases.config import BadPhase, PhaseConfig, differences
from services.trainer.phases.data import Place

FORMAT = "etude-phase-1"
STATE = "state.safetensors"


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a phase is. `targets`: positions with a loss so far. `flops`: arithmetic of training so far (dealing.Cost times 3).
    `measured`: the step whose held-out loss was measured last; -1: none. `skipped`: steps in a row without a finite gradient."""

    format: str = FORMAT
    phase: str
    step: int = 0
    targets: int = 0
    flops: float = 0.0
    place: Place = Place()
    measured: int = -1
    skipped: int = 0
    lines: int = 0  # of losses.jsonl that belong to this state


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """`config`: what the phase was told. `sources`: checksums of the checkpoint's config.json and of the data."""

    progress: Progress
    config: dict[str, Any]
    sources: dict[str, str]


def write(
    work: Path, progress: Progress, config: PhaseConfig, sources: dict[str, str], state: Mapping[str, Tensor]
) -> None:
    """Durable when it returns."""
    saved = Saved(progress=progress, config=msgspec.to_builtins(config), sources=sources)
    temporary = work / f".{STATE}"
    save_file(dict(state), temporary, metadata={"phase": msgspec.json.encode(saved).decode()})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(work / STATE)
    folder = os.open(work, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def find(work: Path, phase: str, config: PhaseConfig, sources: dict[str, str]) -> Progress | None:
    """Return where an interrupted phase is; None: there is none. Raises BadPhase if it was told otherwise, or its data or its
    checkpoint changed."""
    path = work / STATE
    if not path.exists():
        return None
    begin = f"remove {work} to begin from the start"
    try:
        with safe_open(path, framework="pt") as file:
            saved = msgspec.json.decode((file.metadata() or {})["phase"], type=Saved)
    except (SafetensorError, OSError, KeyError, msgspec.MsgspecError) as error:
        raise BadPhase(f"{path}: found no state of a phase ({error}); {begin}") from None
    before = saved.progress
    if before.format != FORMAT or before.phase != phase:
        raise BadPhase(
            f"{path}: found phase {before.phase!r} in format {before.format!r}; allowed: {phase!r}, {FORMAT!r}; {begin}"
        )
    wrong = differences(saved.config, config)
    for name in sorted(saved.sources.keys() | sources.keys()):
        if saved.sources.get(name) != sources.get(name):
            wrong.append(f"{name}: it changed since the phase began; allowed: as it was")
    if wrong:
        raise BadPhase("\n".join(f"{line}; or {begin}" for line in wrong))
    return before


def tensors(work: Path) -> dict[str, Tensor]:
    return load_file(work / STATE)
