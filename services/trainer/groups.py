"""A group's trajectories and routing from the object store, checked, as sequences to train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from services.trainer import credit
from services.trainer.packing import TrainSequence
from services.trainer.rewards import UnknownReward
from shared.contracts.messages import AttemptKey, GroupMember, GroupReady
from shared.contracts.run import LengthPenalty, Purpose, TrainConfig
from shared.contracts.trajectory import Segment, Trajectory, unpack, unpack_routing
from shared.model import ModelConfig
from shared.objects import ObjectDamaged, ObjectMissing, Objects


class Untrainable(ValueError):
    """The group cannot be trained, now or ever; the text says why. It goes to quarantine."""


@dataclass(frozen=True, slots=True)
class LoadedGroup:
    """A group in hand. `sequences` carry group index 0 until they join a batch; `versions`: serials that sampled them.
    `left_out`: no attempt earned anything and the lot left the group out (credit.failed_share), so the loss does not count it."""

    ready: GroupReady
    sequences: tuple[TrainSequence, ...]
    versions: frozenset[int]
    left_out: bool = False

    @property
    def rewards(self) -> list[float]:
        return [member.reward for member in self.ready.members]

    @property
    def has_signal(self) -> bool:
        return any(s.has_signal for s in self.sequences)


def load(
    objects: Objects,
    ready: GroupReady,
    model: ModelConfig,
    config: TrainConfig,
    lengths: Callable[[str], LengthPenalty | None] = lambda reward_config: None,
) -> LoadedGroup:
    """Read and check a group. `lengths`: the length penalty of a reward configuration by its id, or UnknownReward. Raises
    Untrainable; an error of the store itself goes through, and the caller tries again."""
    rewards = [member.reward for member in ready.members]
    if len(rewards) < 2:
        raise Untrainable(f"{len(rewards)} attempts; an advantage needs at least 2")
    if not np.isfinite(rewards).all():
        raise Untrainable(f"rewards {rewards}")
    replay = config.router_replay and model.num_moe_layers > 0
    trajectories: list[Trajectory] = []
    routings: list[list[np.ndarray] | None] = []
    sequences: list[TrainSequence] = []
    for member in ready.members:
        try:
            trajectory = unpack(objects.get(member.trajectory))
            _require_own(trajectory.key, ready, member)
            trajectories.append(trajectory)
            routings.append(_routing(objects, trajectory) if replay else None)
        except ObjectMissing as error:
            raise Untrainable(f"attempt {member.attempt}: object {error} is missing") from None
        except (ObjectDamaged, ValueError) as error:
            raise Untrainable(f"attempt {member.attempt}: {error}") from None
    lot, charged = _lot(ready.group), _charged(ready, config, lengths)
    steps = [member.steps or [] for member in ready.members]
    shares = credit.assign(trajectories, rewards, config.credit, lot=lot, lengths=charged, steps=steps)
    for member, trajectory, rows, share in zip(ready.members, trajectories, routings, shares, strict=True):
        try:
            sequences += sequences_of(trajectory, rows, share, model)
        except ValueError as error:
            raise Untrainable(f"attempt {member.attempt}: {error}") from None
    if not sequences:
        raise Untrainable("no attempt sampled a token")
    versions = frozenset(int(v) for s in sequences for v in np.unique(s.versions_T[s.sampled_T]))
    drawn = config.credit.per == "attempt" or max(rewards) > 0 or lot < config.credit.failed_share
    left_out = not drawn and not any(s.has_signal for s in sequences)
    return LoadedGroup(ready, tuple(sequences), versions, left_out)


def _require_own(key: AttemptKey, ready: GroupReady, member: GroupMember) -> None:
    """Raise ValueError if the trajectory is another attempt's: a wrong reference would train its tokens with this reward."""
    named = AttemptKey(
        attempt=member.attempt,
        epoch=member.epoch,
        group=ready.group,
        problem=ready.problem,
        index=key.index,
        purpose=Purpose.train,
    )
    for field in key.__struct_fields__:
        if getattr(key, field) != getattr(named, field):
            raise ValueError(
                f"trajectory of another attempt: key.{field}: found {getattr(key, field)!r}, "
                f"allowed: {getattr(named, field)!r}, as the group names it"
            )


def _charged(
    ready: GroupReady, config: TrainConfig, lengths: Callable[[str], LengthPenalty | None]
) -> list[LengthPenalty | None]:
    """Return the length penalty that each member's reward holds; None: it holds none. Credit by attempt charges no turn."""
    if config.credit.per == "attempt":
        return [None] * len(ready.members)
    try:
        length = lengths(ready.reward_config)
    except UnknownReward as error:
        raise Untrainable(str(error)) from None
    return [length if length and (length.apply == "all" or member.solved) else None for member in ready.members]


def _lot(group: str) -> float:
    """Uniform in [0, 1), the same whenever and wherever the group is loaded."""
    return xxhash.xxh3_64_intdigest(group.encode()) / 2**64


def _routing(objects: Objects, trajectory: Trajectory) -> list[np.ndarray] | None:
    if trajectory.routing is None:
        return None
    data = objects.get(trajectory.routing)
    try:
        return unpack_routing(data)
    except Exception as error:  # zstd, safetensors and numpy each have their own
        raise ValueError(f"routing: {error}") from None


def sequences_of(
    trajectory: Trajectory, rows: Sequence[np.ndarray] | None, advantages: Sequence[np.ndarray], model: ModelConfig
) -> list[TrainSequence]:
    if not trajectory.temperature > 0:
        raise ValueError(f"temperature {trajectory.temperature}; only sampled attempts can be trained")
    if rows is not None and len(rows) != len(trajectory.segments):
        raise ValueError(f"routing of {len(rows)} segments, expected {len(trajectory.segments)}")
    found = []
    for i, segment in enumerate(trajectory.segments):
        if not segment.loss_mask.any():
            continue
        _check(segment, model)
        experts = None if rows is None else _experts(rows[i], len(segment.tokens), model)
        found.append(
            TrainSequence(
                group=0,
                tokens_T=segment.tokens,
                sampled_T=segment.loss_mask,
                logprobs_T=segment.logprobs,
                versions_T=segment.versions,
                advantages_T=advantages[i],
                temperature=trajectory.temperature,
                experts_TLK=experts,
            )
        )
    return found


def _check(segment: Segment, model: ModelConfig) -> None:
    if segment.tokens.min() < 0 or segment.tokens.max() >= model.vocab_size:
        raise ValueError(
            f"token ids {segment.tokens.min()}..{segment.tokens.max()}; allowed: 0..{model.vocab_size - 1}"
        )
    if segment.loss_mask[0]:
        raise ValueError("the first token of a segment is marked as sampled")


def _experts(rows: np.ndarray, tokens: int, model: ModelConfig) -> np.ndarray:
    assert model.moe is not None
    expected = (tokens - 1, model.num_moe_layers, model.num_experts_per_tok)
    if rows.shape != expected:
        raise ValueError(f"routing rows {rows.shape}, expected {expected}")
    if rows.size and int(rows.max()) >= model.moe.num_experts:
        raise ValueError(f"routed expert {int(rows.max())}; allowed: 0..{model.moe.num_experts - 1}")
    return rows
