"""From groups to micro-batches: which tokens are computed once, and which positions carry loss. numpy only.

A sequence is one segment of one attempt. Sequences of a group whose context up to the first sampled token is equal, in
token ids *and* in routing rows, form a unit: the context is computed once, the sequences are its branches.

    prefix tokens[:P]   branch tokens[P:T-1]      fed; the last token predicts nothing
    predictions: position t predicts tokens[t + 1], for t = P-1 .. T-2 where tokens[t + 1] was sampled
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """tokens_T int, sampled_T bool, logprobs_T float32 and versions_T int (only where sampled), experts [T-1, L, K] or
    None where the engine recorded none. advantages_T float32, only where sampled. `group`: index in the batch."""

    group: int
    tokens_T: np.ndarray
    sampled_T: np.ndarray
    logprobs_T: np.ndarray
    versions_T: np.ndarray
    advantages_T: np.ndarray
    temperature: float
    experts_TLK: np.ndarray | None

    @property
    def has_signal(self) -> bool:
        return bool(self.advantages_T[self.sampled_T].any())

    @property
    def context(self) -> int:
        """Index of the first sampled token. At least 1: something must have been read before."""
        return int(np.argmax(self.sampled_T))


@dataclass(frozen=True, slots=True)
class Unit:
    """Sequences that share tokens[:prefix] and the routing of these positions. A document has no siblings: all that it feeds is
    prefix, sampled positions too (see `whole`)."""

    prefix: int
    sequences: tuple[TrainSequence, ...]

    @property
    def fed(self) -> int:
        """Tokens that go through the model."""
        return self.prefix + sum(len(s.tokens_T) - 1 - self.prefix for s in self.sequences)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Tokens saved by computing prefixes once, and tokens that unequal routing alone kept from being shared."""

    unshared: int
    fed: int
    lost_to_routing: int

    @property
    def saved_share(self) -> float:
        return 1 - self.fed / max(1, self.unshared)

    @property
    def lost_share(self) -> float:
        return self.lost_to_routing / max(1, self.unshared)


def _token_key(s: TrainSequence) -> tuple[int, bytes]:
    return s.group, np.asarray(s.tokens_T[: s.context], np.int64).tobytes()


def _routing_key(s: TrainSequence, replay: bool) -> tuple[str, bytes] | None:
    """A digest: the rows themselves are large. Their type counts: one trajectory's are all of one."""
    if not replay or s.experts_TLK is None:
        return None
    rows = np.ascontiguousarray(s.experts_TLK[: s.context])
    return rows.dtype.str, xxhash.xxh3_128_digest(rows.data)


def form_units(sequences: Sequence[TrainSequence], *, replay: bool, share: bool = True) -> list[Unit]:
    """Units in the order of their first sequence, branches by length. `replay`: routing rows count for equality."""
    if not share:
        return [Unit(s.context, (s,)) for s in sequences]
    found: dict[object, list[TrainSequence]] = {}
    for s in sequences:
        found.setdefault((_token_key(s), _routing_key(s, replay)), []).append(s)
    return [Unit(m[0].context, tuple(sorted(m, key=lambda s: len(s.tokens_T)))) for m in found.values()]


def whole(sequences: Sequence[TrainSequence]) -> list[Unit]:
    """Return each sequence as a unit of its own that is one causal run: all fed tokens are its prefix, its branch is empty."""
    return [Unit(len(s.tokens_T) - 1, (s,)) for s in sequences]


def sharing(units: Sequence[Unit], parts: Sequence[Sequence[Unit]]) -> Sharing:
    """`parts`: the micro-batches that the units were cut into; each computes the prefixes of its own units."""
    unshared = sum(len(s.tokens_T) - 1 for u in units for s in u.sequences)
    seen: set[tuple[int, bytes]] = set()
    lost = 0
    for unit in units:
        key = _token_key(unit.sequences[0])
        lost += unit.prefix if key in seen else 0
        seen.add(key)
    return Sharing(unshared, sum(u.fed for part in parts for u in part), lost)


def micro_batches(units: Sequence[Unit], max_tokens: int) -> list[list[Unit]]:
    """Whole units, in order, at most `max_tokens` fed tokens each; a larger unit is cut along its branches, its prefix
    computed again in each part; a single branch is never cut."""
    batches: list[list[Unit]] = []
    room = 0
    for unit in units:
        for part in cut(unit, max_tokens):
            if not batches or part.fed > room:
                batches.append([])
                room = max_tokens
            batches[-1].append(part)
            room -= part.fed
    return batches


def cut(unit: Unit, max_tokens: int) -> list[Unit]:
    """Return the unit, or parts of it with at most `max_tokens` fed tokens where that can be: a single branch is never cut."""
    if unit.fed <= max_tokens or len(unit.sequences) == 1:
        return [unit]
    parts: list[list[TrainSequence]] = []
    room = 0
    for s in unit.sequences:
        size = len(s.tokens_T) - 1 - unit.prefix
        if not parts or size > room:
            parts.append([])
            room = max_tokens - unit.prefix
        parts[-1].append(s)
        room -= size
    return [Unit(unit.prefix, tuple(part)) for part in parts]
