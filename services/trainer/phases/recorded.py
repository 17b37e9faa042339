"""Sequences of a run's recorded attempts. Their token ids are those that the policy sampled; nothing is encoded again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np

from services.trainer.packing import TrainSequence
from services.trainer.phases.data import supervised
from shared import objects as stores
from shared.contracts.graded import Graded, verdict_key
from shared.contracts.ids import parse_attempt
from shared.contracts.run import Ref
from shared.contracts.trajectory import Trajectory, unpack
from shared.objects import ObjectDamaged, ObjectMissing, Objects


class BadTrajectories(ValueError):
    """A run's attempts cannot be trained on. The text names the run or the object, what was found and what is allowed."""


def read(
    place: str,
    *,
    solved: bool,
    vocab_size: int,
    length: int,
    leave_out: bool,
    context_weight: float,
    passed_over: Counter[str],
) -> Iterator[TrainSequence]:
    """Yield the segments of a run's attempts, in the order of their keys; of each attempt, the newest epoch alone.

    `place`: STORE#RUN. `solved`: only attempts whose verdict says so. `passed_over`: counts of others, by reason. Raises
    BadTrajectories.
    """
    store, _, run = place.rpartition("#")
    try:
        objects = stores.connect(store)
    except ValueError as error:
        raise BadTrajectories(f"data.trajectories: {place!r}: {error}") from None
    newest: dict[str, str] = {}
    for key in sorted(objects.list(f"runs/{run}/attempts/")):
        named = parse_attempt(key)
        if named is not None and key.rsplit("/", 1)[1].startswith("trajectory"):
            newest[named.attempt] = max(key, newest.get(named.attempt, ""), key=_epoch)
    if not newest:
        raise BadTrajectories(f"data.trajectories: {place!r}: found no attempt; allowed: a run with recorded attempts")
    for key in sorted(newest.values()):
        try:
            ref = objects.head(key)
            trajectory = unpack(objects.get(ref))
            if solved and not _is_solved(objects, run, trajectory, ref):
                passed_over["not solved"] += 1
                continue
        except (ObjectMissing, ObjectDamaged, ValueError) as error:
            raise BadTrajectories(f"{place}, {key}: {error}") from None
        for number, segment in enumerate(trajectory.segments):
            if not segment.loss_mask.any():
                continue
            where = f"{place}, {key}, segment {number}"
            if segment.tokens.min() < 0 or segment.tokens.max() >= vocab_size or segment.loss_mask[0]:
                found = f"token ids {segment.tokens.min()} to {segment.tokens.max()}"
                raise BadTrajectories(
                    f"{where}: found {found}; allowed: 0 to {vocab_size - 1}, of the checkpoint's tokenizer"
                )
            if len(segment.tokens) - 1 > length:
                if not leave_out:
                    raise BadTrajectories(
                        f"{where}: found {len(segment.tokens) - 1} tokens; allowed: {length} (data.length), or "
                        "data.too_long = 'leave_out'"
                    )
                passed_over["too long"] += 1
                continue
            weight = np.where(segment.loss_mask, 1.0, context_weight).astype(np.float32)
            weight[0] = 0.0
            yield supervised(segment.tokens.astype(np.int64), weight)


def _epoch(key: str) -> tuple[int, str]:
    named = parse_attempt(key)
    return (-1 if named is None else named.epoch, key)


def _is_solved(objects: Objects, run: str, trajectory: Trajectory, ref: Ref) -> bool:
    try:
        found = objects.head(verdict_key(run, trajectory.key, ref))
    except ObjectMissing:
        return False
    return msgspec.json.decode(objects.get(found), type=Graded).verdict.solved
