"""The key-value cache: one row per session, with its tokens, versions and routing; who may reuse what.

A row is free (empty), parked (a finished turn, kept for the next one) or active (being computed).

Invariants:
- For every row, positions [0, length) have keys, values, a version (the serial that computed them) and routing rows:
  write-once, in the pass that first computed them; copies take them along.
- A request reuses only rows of its own `extra_key`, and only the prefix whose token ids are equal.
- Every number in an idle row is finite, beyond its length too (`wipe`).
- Active rows never move; they lie low, so that decoding reads the rows [0, highest active] in place, without gathering.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.model import ModelConfig

FREE, PARKED, ACTIVE = 0, 1, 2


class SlotCache:
    """S rows of T positions; G key-value heads; L MoE layers, K experts per token. With `mtp` the first MTP layer's keys and
    values lie behind the trunk's; they are there for positions [drafted_from, drafted_to) of a row, and nothing but drafts
    reads them. Keys and values lie on `device`, all else on the host."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rows: int,
        positions: int,
        mtp: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        S, T, layers, G = rows, positions, config.num_hidden_layers + mtp, config.num_key_value_heads
        self.rows, self.positions, self.mtp = S, T, mtp
        self.keys = torch.zeros(layers, S, G, T, config.head_dim, device=device, dtype=dtype)
        self.values = torch.zeros(layers, S, G, T, config.v_head_dim, device=device, dtype=dtype)
        experts = config.moe.num_experts if config.moe else 1
        routing_type = np.uint8 if experts <= 256 else np.uint16
        self.routing = np.zeros((S, T, config.num_moe_layers, config.num_experts_per_tok), routing_type)
        self.tokens = np.zeros((S, T + 1), np.int32)  # one more: the last sampled token has no position yet
        self.versions = np.zeros((S, T), np.int32)
        self.length = np.zeros(S, np.int64)
        self.drafted_from, self.drafted_to = np.zeros(S, np.int64), np.zeros(S, np.int64)
        self.state = np.full(S, FREE, np.int8)
        self.used = np.zeros(S, np.int64)  # tick of the last use, for eviction
        self.key: list[str] = [""] * S
        self._tick = 0

    # -- finding -----------------------------------------------------------------------------------------------------

    def match(self, tokens: np.ndarray, key: str) -> tuple[int, int]:
        """(row, n): the row of `key` that holds the longest prefix of `tokens`, and its length; (-1, 0): none. n is below
        len(tokens), because the last token must be computed to say what follows. Of equals the parked row that ends there
        comes first: it can be continued without a copy."""
        candidates = np.array([r for r in np.flatnonzero(self.length) if self.key[r] == key], np.int64)
        if not len(candidates):
            return -1, 0
        lengths = self.length[candidates]
        common = self.common_prefix(candidates, lengths, tokens[:-1])
        continues = (common == lengths) & (self.state[candidates] == PARKED)
        best = int(np.argmax(common * 2 + continues))
        return (int(candidates[best]), int(common[best])) if common[best] else (-1, 0)

    def common_prefix(self, rows: Sequence[int] | np.ndarray, lengths: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """How many leading tokens of each row, within its length, equal those of `tokens`. int64 [len(rows)]"""
        n = len(tokens)
        if not n:
            return np.zeros(len(rows), np.int64)
        differs = self.tokens[rows, :n] != tokens
        first = np.where(differs.any(1), differs.argmax(1), n)
        return np.minimum(first, lengths)

    # -- taking and leaving ------------------------------------------------------------------------------------------

    def take(self, tokens: np.ndarray, key: str) -> tuple[int, int] | None:
        """Makes a row active for `tokens` and returns (row, positions that are already there). None: no row is left."""
        source, n = self.match(tokens, key)
        if source >= 0 and self.state[source] == PARKED and n == self.length[source]:
            row = self._settle(source)
        else:
            taken = self._vacate(keep=source)
            if taken is not None:
                row, source = taken
                if source >= 0:
                    self._copy(source, row, n)
                    self.used[source] = self._now()
            elif source >= 0 and self.state[source] == PARKED:
                row = source  # the last idle row is the one that matches: cut it back
            else:
                return None
            self.length[row] = n
        self.drafted_to[row] = min(self.drafted_to[row], n)
        self.drafted_from[row] = min(self.drafted_from[row], self.drafted_to[row])
        self.state[row], self.key[row] = ACTIVE, key
        self.tokens[row, : len(tokens)] = tokens
        return row, n

    def park(self, row: int) -> None:
        """The turn is over; what was computed stays until somebody needs the row."""
        self.state[row] = PARKED if self.length[row] else FREE
        self.used[row] = self._now()

    def flush(self) -> None:
        """Forgets every parked row."""
        parked = self.state == PARKED
        self.length[parked] = 0
        self.state[parked] = FREE

    def wipe(self, row: int) -> None:
        """Frees a row whose keys and values are no numbers. What is hidden from a session is read all the same, with weight 0, and
        0 times NaN is NaN: who gets the row next would see none but it."""
        self.length[row], self.state[row], self.drafted_to[row] = 0, FREE, 0
        self.keys[:, row].zero_()
        self.values[:, row].zero_()

    def finite(self, row: int, start: int, end: int) -> bool:
        """Whether the row's keys and values are numbers, at positions [start, end)."""
        return all(bool(torch.isfinite(kv[:, row, :, start:end]).all()) for kv in (self.keys, self.values))

    @property
    def active_positions(self) -> int:
        return int(self.length[self.state == ACTIVE].sum())

    # -- moving ------------------------------------------------------------------------------------------------------

    def _now(self) -> int:
        self._tick += 1
        return self._tick

    def _lowest_idle(self) -> int:
        idle = np.flatnonzero(self.state != ACTIVE)
        return int(idle[0]) if len(idle) else -1

    def _settle(self, row: int) -> int:
        """Moves a parked row low, if it lies above what the active ones need. A move costs as much as reading the row for
        two decode steps; a turn takes many more."""
        low = self._lowest_idle()
        if row <= low or row < int((self.state == ACTIVE).sum()):
            return row
        if self.state[low] == PARKED:
            self._swap(low, row)
        else:
            self._move(row, low)
        return low

    def _vacate(self, keep: int) -> tuple[int, int] | None:
        """Returns (an empty low row, where `keep` now lies). The victim is a free row, else the parked one least recently
        used; `keep` is spared."""
        low = self._lowest_idle()
        if low < 0:
            return None
        free = np.flatnonzero(self.state == FREE)
        if len(free):
            victim = int(free[0])
        else:
            parked = [r for r in np.flatnonzero(self.state == PARKED) if r != keep]
            if not parked:
                return None
            victim = int(min(parked, key=lambda r: self.used[r]))
        if victim > low and victim >= int((self.state == ACTIVE).sum()):
            self._move(low, victim)
            keep = victim if keep == low else keep
            victim = low
        self.length[victim], self.state[victim] = 0, FREE
        self.drafted_to[victim] = 0
        return victim, keep

    def _copy(self, source: int, target: int, n: int) -> None:
        """The first n positions with everything that belongs to them."""
        self.keys[:, target, :, :n] = self.keys[:, source, :, :n]
        self.values[:, target, :, :n] = self.values[:, source, :, :n]
        self.versions[target, :n] = self.versions[source, :n]
        self.routing[target, :n] = self.routing[source, :n]
        self.tokens[target, : n + 1] = self.tokens[source, : n + 1]
        self.drafted_from[target], self.drafted_to[target] = self.drafted_from[source], self.drafted_to[source]

    def _move(self, source: int, target: int) -> None:
        self._copy(source, target, int(self.length[source]))
        for array in (self.length, self.state, self.used):
            array[target] = array[source]
        self.key[target] = self.key[source]
        self.length[source], self.state[source] = 0, FREE

    def _swap(self, a: int, b: int) -> None:
        n = int(max(self.length[a], self.length[b]))
        for tensor in (self.keys, self.values):
            _exchange(tensor[:, a, :, :n], tensor[:, b, :, :n])
        arrays = (self.versions, self.routing, self.tokens, self.length, self.state, self.used)
        for array in (*arrays, self.drafted_from, self.drafted_to):
            array[[a, b]] = array[[b, a]]
        self.key[a], self.key[b] = self.key[b], self.key[a]


def _exchange(a: Tensor, b: Tensor) -> None:
    held = a.clone()
    a.copy_(b)
    b.copy_(held)
