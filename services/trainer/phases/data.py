"""The sequences of a phase, in an order that a seed and a place fix. A place is two numbers, so a phase can go on anywhere.

Every epoch is a permutation of its own. A document longer than `length` is cut into pieces, each a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import numpy as np

from services.trainer.packing import TrainSequence
from services.trainer.phases.shards import Shards


class Place(msgspec.Struct, frozen=True):
    """Where a phase is in its data: the next sequence is number `next` of the permutation of `epoch`."""

    epoch: int = 0
    next: int = 0


class Source(Protocol):
    """Sequences by number."""

    @property
    def targets(self) -> int:
        """Positions with a loss in one epoch."""

    def __len__(self) -> int: ...
    def sequence(self, number: int) -> TrainSequence: ...


def supervised(tokens_T: np.ndarray, weight_T: np.ndarray) -> TrainSequence:
    """Return a sequence whose loss is the negative log-likelihood of tokens of a weight above 0. `weight_T` float32; nothing
    predicts the first token, so its weight must be 0."""
    zeros = np.zeros(len(tokens_T), np.float32)
    return TrainSequence(
        group=0,
        tokens_T=tokens_T,
        sampled_T=weight_T > 0,
        logprobs_T=zeros,
        versions_T=zeros.astype(np.int32),
        advantages_T=weight_T.astype(np.float32),
        temperature=1.0,
        experts_TLK=None,
    )


@dataclass(frozen=True)
class Pieces:
    """Implements Source for token files. Piece j of a document holds its targets j·length + 1 … (j + 1)·length."""

    shards: tuple[Shards, ...]
    length: int  # fed tokens of a piece, at most
    _ends: np.ndarray  # number of pieces up to and with each document, over all folders
    _documents: np.ndarray  # number of documents before each folder
    targets: int

    @classmethod
    def of(cls, shards: Sequence[Shards], length: int) -> Pieces:
        counts, targets = [], 0
        for one in shards:
            sizes = np.diff(one.ends_D, prepend=0) - 1
            counts.append(-(-sizes // length))
            targets += int(sizes.sum())
        documents = np.concatenate(([0], np.cumsum([len(one) for one in shards])))
        return cls(tuple(shards), length, np.cumsum(np.concatenate(counts)), documents, targets)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def sequence(self, number: int) -> TrainSequence:
        document = int(np.searchsorted(self._ends, number, "right"))
        piece = number - (int(self._ends[document - 1]) if document else 0)
        folder = int(np.searchsorted(self._documents, document, "right")) - 1
        shards, local = self.shards[folder], document - int(self._documents[folder])
        start = shards.start(local) + piece * self.length
        tokens = shards.tokens(start, min(start + self.length + 1, int(shards.ends_D[local])))
        weight = np.ones(len(tokens), np.float32)
        weight[0] = 0.0
        return supervised(tokens, weight)


@dataclass(frozen=True)
class Listed:
    """Implements Source for sequences in memory (chats)."""

    sequences: tuple[TrainSequence, ...]

    @property
    def targets(self) -> int:
        return sum(int(s.sampled_T.sum()) for s in self.sequences)

    def __len__(self) -> int:
        return len(self.sequences)

    def sequence(self, number: int) -> TrainSequence:
        return self.sequences[number]


class Feed:
    """Batches of a source from a place on. Two with the same source, seed and place give the same batches."""

    def __init__(self, source: Source, seed: int, step_tokens: int, place: Place = Place()) -> None:
        self.source, self.seed, self.step_tokens, self.place = source, seed, step_tokens, place
        self._order: tuple[int, np.ndarray] | None = None

    def batch(self) -> list[TrainSequence]:
        """Return the next sequences that feed `step_tokens` tokens or more, and move on. `group` numbers them."""
        found: list[TrainSequence] = []
        fed = 0
        epoch, at = self.place.epoch, self.place.next
        while fed < self.step_tokens:
            if at == len(self.source):
                epoch, at = epoch + 1, 0
            sequence = self.source.sequence(int(self._permutation(epoch)[at]))
            found.append(replace(sequence, group=len(found)))
            fed += len(sequence.tokens_T) - 1
            at += 1
        self.place = Place(epoch, at)
        return found

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            key = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._order = epoch, key.permutation(len(self.source))
        return self._order[1]
