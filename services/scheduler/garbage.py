"""Objects of a run that nobody needs any more. Pure: what the ledger says comes in, the keys that may go come out.

Three kinds:
- what attempts left behind that were given up;
- routing of groups that every checkpoint has trained, and of those that will never be trained;
- the weights of old versions.

Invariants
- Nothing else is ever named: checkpoints, packs, configurations, trajectories that count, manifests stay.
- What the ledger does not know is left alone, an attempt or a version: its first word may still be on its way.
- Of attempts: what the ledger refers to stays, whatever its state; so does everything of the newest epoch while it is not over.
- Rollout checkpoints stay while an epoch may continue from them: until the attempt has a trajectory or is over.
- Of versions: one that stays can be built; so all stay that it is built from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from shared.contracts.ids import CHECKPOINT, parse_attempt, parse_policy


@dataclass(frozen=True, slots=True)
class Known:
    """What the ledger says of an attempt. `kept`: the epoch whose objects it refers to, None: none. `resumes`: its next epoch
    continues from a rollout checkpoint, whose parts may lie below any epoch."""

    epoch: int
    over: bool
    kept: int | None
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class Garbage:
    key: str
    why: str


def left_behind(run: str, keys: Iterable[str], attempts: Mapping[str, Known]) -> Iterator[Garbage]:
    """Those of `keys` that attempts left behind which were given up."""
    for key in keys:
        there = parse_attempt(key)
        if there is None or there.run != run or there.attempt not in attempts:
            continue
        attempt = attempts[there.attempt]
        if there.name.startswith(CHECKPOINT):
            if attempt.over or attempt.kept is not None:
                yield Garbage(key, "a rollout checkpoint of an attempt that has ended")
            elif there.epoch < attempt.epoch and not attempt.resumes:
                yield Garbage(key, f"a rollout checkpoint of epoch {there.epoch}, from which nothing continues")
            continue
        if there.epoch == attempt.kept or there.epoch > attempt.epoch:
            continue
        if there.epoch < attempt.epoch:
            yield Garbage(key, f"epoch {there.epoch} was given up; the attempt is at epoch {attempt.epoch}")
        elif attempt.over:
            yield Garbage(key, "the attempt ended without a trajectory that counts")


def routing(run: str, keys: Iterable[str], attempts: Mapping[str, str]) -> Iterator[Garbage]:
    """Those of `keys` that are routing of `attempts`: their ids, with the reason why nobody asks for it again."""
    for key in keys:
        there = parse_attempt(key)
        if there and there.run == run and there.attempt in attempts and there.name.startswith("routing-"):
            yield Garbage(key, attempts[there.attempt])


def needed(parents: Mapping[int, int], kept: Iterable[int]) -> set[int]:
    """Versions that those `kept` are built from, and themselves. `parents`: serial -> that of its parent, -1: a full base."""
    found: set[int] = set()
    for serial in kept:
        while serial in parents and serial not in found:
            found.add(serial)
            serial = parents[serial]
    return found


def versions(run: str, keys: Iterable[str], parents: Mapping[int, int], kept: Collection[int]) -> Iterator[Garbage]:
    """Those of `keys` that are weights of a version that nobody needs. Manifests stay: they say what was trained."""
    stay = needed(parents, kept)
    for key in keys:
        there = parse_policy(key)
        if there is None or there.run != run or not there.name.endswith(".bin"):
            continue
        if there.serial in parents and there.serial not in stay:
            yield Garbage(key, f"weights of version {there.serial}")
