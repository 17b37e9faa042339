"""Training samples: token ids with a weight class per token, stored flat; and batches of nearly equal length.

Invariants: nothing is pickled; the same arrays, token budget, ranks and seed give the same batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class Weight(IntEnum):
    """What a token is to the loss: nothing (observations, wrong edits), code and tests to be modelled, or an action."""

    none = 0
    context = 1
    action = 2


@dataclass(frozen=True, slots=True)
class Sample:
    ids: list[int]
    weights: list[int]

    @classmethod
    def of(cls, *parts: tuple[list[int], Weight]) -> Sample:
        return cls([i for ids, _ in parts for i in ids], [int(w) for ids, w in parts for _ in ids])


@dataclass(frozen=True, slots=True)
class Samples:
    """tokens uint16 and weights uint8, flat; sample i is [starts[i], starts[i + 1])."""

    tokens: np.ndarray
    weights: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Samples:
        kept = list(samples)
        starts = np.cumsum([0, *(len(s.ids) for s in kept)], dtype=np.int64)
        tokens = np.fromiter((i for s in kept for i in s.ids), np.uint16, starts[-1])
        weights = np.fromiter((w for s in kept for w in s.weights), np.uint8, starts[-1])
        return cls(tokens, weights, starts)

    @classmethod
    def load(cls, path: Path) -> Samples:
        with np.load(path, allow_pickle=False) as file:
            return cls(file["tokens"], file["weights"], file["starts"])

    @classmethod
    def joined(cls, parts: Iterable[Samples]) -> Samples:
        parts = list(parts)
        lengths = np.concatenate([p.lengths for p in parts])
        return cls(
            np.concatenate([p.tokens for p in parts]),
            np.concatenate([p.weights for p in parts]),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        with temporary.open("wb") as file:
            np.savez(file, tokens=self.tokens, weights=self.weights, starts=self.starts)
        temporary.replace(path)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def take(self, count: int, seed: int) -> Samples:
        """`count` samples drawn without repetition, or all when there are fewer."""
        chosen = np.random.default_rng(seed).permutation(len(self))[:count]
        return self.chosen(np.sort(chosen))

    def chosen(self, indices: np.ndarray) -> Samples:
        lengths = self.lengths[indices]
        pick = np.concatenate([np.arange(self.starts[i], self.starts[i + 1]) for i in indices] or [np.arange(0)])
        return Samples(
            self.tokens[pick], self.weights[pick], np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        )

    def rows(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Right-padded (tokens int64, weight classes int64), both [B, T]."""
        T = int(self.lengths[indices].max())
        tokens = torch.zeros(len(indices), T, dtype=torch.long)
        weights = torch.zeros(len(indices), T, dtype=torch.long)
        for row, i in enumerate(indices):
            a, b = self.starts[i], self.starts[i + 1]
            tokens[row, : b - a] = torch.from_numpy(self.tokens[a:b].astype(np.int64))
            weights[row, : b - a] = torch.from_numpy(self.weights[a:b].astype(np.int64))
        return tokens, weights


_POOL = 2048  # samples sorted together: long enough for equal lengths within a batch, short enough to stay mixed


def batches(lengths: np.ndarray, tokens: int, ranks: int, seed: int) -> Iterator[list[np.ndarray]]:
    """Endless. Each item: one array of sample indices per rank, each of at most `tokens` tokens with its padding (a
    longer sample stands alone), of similar length, so that no rank waits long for another."""
    rng = np.random.default_rng(seed)
    if len(lengths) < ranks:
        raise ValueError(f"found {len(lengths)} samples; at least one per process is needed ({ranks})")
    while True:
        order = rng.permutation(len(lengths))
        for start in range(0, len(order), _POOL):
            pool = order[start : start + _POOL]
            pool = pool[np.argsort(lengths[pool], kind="stable")]
            cut = _cut(lengths[pool], tokens)
            groups = [pool[a:b] for a, b in itertools.pairwise(cut)]
            steps = [groups[i : i + ranks] for i in range(0, len(groups) - ranks + 1, ranks)]
            if not steps:  # fewer batches than ranks: share the samples out
                steps = [list(np.array_split(pool, ranks))] if len(pool) >= ranks else []
            for i in rng.permutation(len(steps)):
                yield steps[i]


def _cut(ascending: np.ndarray, tokens: int) -> list[int]:
    """Bounds of consecutive batches. Sorted ascending: the last of a batch is its longest."""
    bounds = [0]
    for i, length in enumerate(ascending):
        if i > bounds[-1] and (i - bounds[-1] + 1) * int(length) > tokens:
            bounds.append(i)
    return [*bounds, len(ascending)]
