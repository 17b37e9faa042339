"""How one step of the engine attends: decode tokens over the rows in place, prompt chunks row by row.

The N tokens of a step are the decode tokens first (one per row), then the chunks. Keys and values are written before
they are read, so a token sees itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.inference.cache import SlotCache

HIDDEN = -1e30  # finite: an idle row, hidden as a whole, must give numbers and not NaN
DENSE_SHARE = 0.4  # above this share of active rows reading all of [0, highest] beats row by row (measured: 1.0 to 2.4)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + n) of a row, which see its positions from `first` on."""

    row: int
    start: int
    n: int
    first: int = 0


class StepAttention:
    """`attend` of shared.model for one step. rows_D, positions_D: int64 [D], the decode tokens."""

    def __init__(self, cache: SlotCache, rows_D: np.ndarray, positions_D: np.ndarray, chunks: list[Chunk]) -> None:
        self.cache = cache
        decode = len(rows_D)
        highest = int(rows_D.max()) + 1 if decode else 0
        if decode < DENSE_SHARE * highest:
            chunks = [Chunk(int(r), int(p), 1) for r, p in zip(rows_D, positions_D, strict=True)] + chunks
            decode = 0
        rows = [rows_D[:decode], *(np.full(c.n, c.row) for c in chunks)]
        positions = [positions_D[:decode], *(np.arange(c.start, c.start + c.n) for c in chunks)]
        device, dtype = cache.keys.device, cache.keys.dtype
        self.rows_N = torch.from_numpy(np.concatenate(rows)).to(device)
        self.positions_N = torch.from_numpy(np.concatenate(positions)).to(device)
        self.decode, self.highest = decode, highest
        self.chunks = [(c, causal_mask(c, device, dtype)) for c in chunks]
        if decode:
            self.rows_D = self.rows_N[:decode]
            self.whole = decode == highest and bool((rows_D == np.arange(highest)).all())
            self.reach = int(positions_D.max()) + 1
            last_S = np.full(highest, -1, np.int64)
            last_S[rows_D] = positions_D
            hidden = torch.arange(self.reach) > torch.from_numpy(last_S)[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, HIDDEN)[:, None, None]
            self.mask = mask.to(device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows_N, :, self.positions_N] = k
        values[self.rows_N, :, self.positions_N] = v
        G = keys.shape[1]
        q = q.view(len(q), G, -1, q.shape[-1])
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        if self.decode:
            out[: self.decode] = self._decode(q[: self.decode], keys, values)
        offset = self.decode
        for chunk, mask in self.chunks:
            end = chunk.start + chunk.n
            window = q[offset : offset + chunk.n].permute(1, 2, 0, 3).reshape(G, -1, q.shape[-1])  # [G, R * n, Dk]
            visible = slice(chunk.first, end)
            scores = torch.bmm(window, keys[chunk.row, :, visible].transpose(1, 2))
            if mask is not None:
                scores.view(G, -1, chunk.n, end - chunk.first).add_(mask)
            seen = torch.bmm(softmax(scores), values[chunk.row, :, visible])
            out[offset : offset + chunk.n] = seen.view(G, -1, chunk.n, v.shape[-1]).permute(2, 0, 1, 3)
            offset += chunk.n
        return out.view(len(q), -1, v.shape[-1])

    def _decode(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [D, G, R, Dk]: the R query heads of a key-value head are rows of one small product."""
        if not self.whole:
            q = q.new_zeros(self.highest, *q.shape[1:]).index_copy_(0, self.rows_D, q)
        scores = torch.matmul(q, keys[: self.highest, :, : self.reach].transpose(2, 3)).add_(self.mask)
        out = torch.matmul(softmax(scores), values[: self.highest, :, : self.reach])
        return out if self.whole else out.index_select(0, self.rows_D)


def softmax(scores: Tensor) -> Tensor:
    """In float32 whatever the type, as engines do."""
    return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)


def causal_mask(chunk: Chunk, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """[n, start + n - first]: token i sees positions up to start + i. None for a single token, which sees all."""
    if chunk.n == 1:
        return None
    before = chunk.start - chunk.first
    return torch.full((chunk.n, before + chunk.n), HIDDEN, device=device, dtype=dtype).triu_(before + 1)
