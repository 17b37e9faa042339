"""What a phase reads, opened and checked before it writes anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.trainer.packing import TrainSequence
from services.trainer.phases import conversations, recorded
from services.trainer.phases.config import BadPhase, Phase, PhaseConfig
from services.trainer.phases.conversations import BadConversation, Left
from services.trainer.phases.data import Listed, Pieces, Source
from services.trainer.phases.recorded import BadTrajectories
from services.trainer.phases.shards import BadShards, Shards, checksum
from shared.model import ModelConfig
from shared.renderers import Renderer
from shared.renderers.registry import load_renderer


@dataclass(frozen=True, slots=True)
class Sources:
    """`held_out`: codebases by name. `held_out_chats`: sequences by name. `checksums`: of what the phase began with, by what it is.
    `passed_over`: chats left out, by reason."""

    train: Source
    held_out: dict[str, Shards]
    held_out_chats: dict[str, list[TrainSequence]]
    checksums: dict[str, str]
    passed_over: Counter[str]


def open_all(config: PhaseConfig, phase: Phase, shape: ModelConfig) -> Sources:
    """Raises BadPhase."""
    data, passed_over = config.data, Counter[str]()
    try:
        digest = _tokenizer(config)
        folders = [_shards(Path(name), digest, shape) for name in data.tokens]
        held_out = {_name(name): _shards(Path(name), digest, shape) for name in data.held_out}
        chats: list[TrainSequence] = []
        held_out_chats: dict[str, list[TrainSequence]] = {}
        checksums = {"checkpoint": checksum(Path(config.checkpoint) / "config.json"), "tokenizer": digest}
        if data.conversations or data.held_out_conversations:
            renderer = _renderer(config)
            for name in data.conversations:
                chats += _conversations(Path(name), renderer, config, passed_over)
                checksums[f"data.conversations {name}"] = checksum(Path(name))
            for name in data.held_out_conversations:
                held_out_chats[_name(name)] = list(_conversations(Path(name), renderer, config, passed_over))
        for place in data.trajectories:
            found = list(_recorded(place, config, shape, passed_over))
            checksums[f"data.trajectories {place}"] = str(sum(len(s.tokens_T) for s in found))
            chats += found
        for one in folders:
            checksums[f"data.tokens {one.folder}"] = one.manifest.index + "".join(
                f.checksum for f in one.manifest.files
            )
    except (BadShards, BadConversation, BadTrajectories, ValueError, OSError) as error:
        raise BadPhase(str(error)) from None
    source: Source = Pieces.of(folders, data.length) if folders else Listed(tuple(chats))
    if not source.targets:
        left = "; ".join(f"{reason}: {count}" for reason, count in passed_over.items())
        raise BadPhase(f"data: found no token to train on{f' ({left})' if left else ''}; allowed: at least one")
    return Sources(source, held_out, held_out_chats, checksums, passed_over)


def tokens_of(folder: Path, config: PhaseConfig, shape: ModelConfig) -> Shards:
    """Return one folder of tokens, for the checkpoint of `config`. Raises BadPhase."""
    try:
        return _shards(folder, _tokenizer(config), shape)
    except BadShards as error:
        raise BadPhase(str(error)) from None


def _tokenizer(config: PhaseConfig) -> str:
    path = Path(config.checkpoint) / "tokenizer.json"
    if not path.is_file():
        raise BadPhase(f"checkpoint: found no {path}; allowed: a checkpoint with its tokenizer")
    return checksum(path)


def _shards(folder: Path, tokenizer: str, shape: ModelConfig) -> Shards:
    found = Shards.open(folder)
    if found.manifest.tokenizer != tokenizer:
        raise BadPhase(
            f"data: {folder} was encoded with another tokenizer than the checkpoint's; encode it again: etude data tokenize … "
            "--tokenizer CHECKPOINT"
        )
    if found.manifest.vocab_size > shape.vocab_size:
        raise BadPhase(
            f"data: {folder}: vocab_size: found {found.manifest.vocab_size}; allowed: up to {shape.vocab_size}, the checkpoint's"
        )
    return found


def _renderer(config: PhaseConfig) -> Renderer:
    try:
        return load_renderer(Path(config.checkpoint))
    except ValueError as error:
        raise BadPhase(f"checkpoint: {error}") from None


def _conversations(
    path: Path, renderer: Renderer, config: PhaseConfig, passed_over: Counter[str]
) -> Iterator[TrainSequence]:
    left, data = Left(), config.data
    yield from conversations.read(
        path,
        renderer,
        length=data.length,
        too_long=data.too_long,
        context_weight=data.context_weight,
        left=left,
    )
    if left.too_long:
        passed_over["conversations longer than data.length"] += left.too_long


def _recorded(
    place: str, config: PhaseConfig, shape: ModelConfig, passed_over: Counter[str]
) -> Iterator[TrainSequence]:
    return recorded.read(
        place,
        solved=config.data.solved,
        vocab_size=shape.vocab_size,
        length=config.data.length,
        leave_out=config.data.too_long == "leave_out",
        context_weight=config.data.context_weight,
        passed_over=passed_over,
    )


def _name(path: str) -> str:
    return Path(path).name
