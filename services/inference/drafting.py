"""The MTP layer at work: keys and values for what the trunk has computed, and drafts for what comes next.

At position t the layer reads the trunk's hidden state of t and the token at t + 1, and says what stands at t + 2; its keys and
values lie in the cache behind the trunk's. Drafts beyond the first are chains: the layer's own state takes the trunk's place.

What a draft is made from decides only how often it is accepted, never what comes out; so a row whose MTP keys have a gap
(steps without drafts, a prefix of another request) simply begins anew behind it (`SlotCache.drafted_from`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.inference.attention import Chunk, StepAttention
from services.inference.cache import SlotCache
from services.inference.fused import FusedStep
from services.inference.sampler import draw, scaled
from services.inference.speculation import Draft
from shared.model import Transformer

NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Computed:
    """Positions [start, start + n) of a row that the trunk has computed in this step, and where their states begin among its N."""

    row: int
    start: int
    n: int
    at: int


class Drafter:
    """`k` tokens per session. Only for the engine's thread."""

    def __init__(self, model: Transformer, cache: SlotCache, fused: FusedStep | None, k: int) -> None:
        self.model, self.cache, self.fused, self.k = model, cache, fused, k

    def propose(
        self,
        hidden_ND: Tensor,
        computed: list[Computed],
        wanted: list[int],
        temperatures: np.ndarray,
        uniforms_WK: np.ndarray,
    ) -> list[Draft]:
        """One draft for each of `wanted` (indices into `computed`), whose last position is followed by the newest token, drawn
        with its uniform numbers in [0, 1).
        `computed`: everything whose keys the layer shall have, one piece per row; the token after each position stands in the
        cache."""
        cache = self.cache
        ends = np.cumsum([c.n for c in computed])
        rows_M = np.repeat([c.row for c in computed], [c.n for c in computed])
        positions_M = np.concatenate([np.arange(c.start, c.start + c.n) for c in computed])
        states_MD = hidden_ND[np.concatenate([np.arange(c.at, c.at + c.n) for c in computed])]
        for c in computed:
            if cache.drafted_to[c.row] != c.start:
                cache.drafted_from[c.row] = c.start
            cache.drafted_to[c.row] = c.start + c.n
        tokens_M = cache.tokens[rows_M, positions_M + 1]
        out_MD = self._layer(states_MD, tokens_M, rows_M, positions_M, [(c.row, c.start, c.n) for c in computed])
        state_WD = out_MD[ends[wanted] - 1]
        rows_W = np.array([computed[i].row for i in wanted])
        positions_W = np.array([computed[i].start + computed[i].n for i in wanted])
        tokens: list[Tensor] = []
        probabilities: list[Tensor] = []
        for step in range(self.k):
            if step:
                pieces = [(int(row), int(position), 1) for row, position in zip(rows_W, positions_W, strict=True)]
                state_WD = self._layer(state_WD.clone(), tokens[-1].numpy(), rows_W, positions_W, pieces)
                positions_W = np.minimum(
                    positions_W + 1, cache.positions - 1
                )  # what lies behind the end is cut off later
            token_W, weights_WV = self._choose(state_WD, temperatures, uniforms_WK[:, step])
            tokens.append(token_W)
            probabilities.append(weights_WV)
        return [
            Draft([int(t[w]) for t in tokens], torch.stack([p[w] for p in probabilities])) for w in range(len(wanted))
        ]

    def _choose(self, state_WD: Tensor, temperatures: np.ndarray, uniforms_W: np.ndarray) -> tuple[Tensor, Tensor]:
        logits_WV = self.fused.logits(state_WD) if self.fused else self.model.mtp_logits(state_WD)
        weights_WV = scaled(logits_WV, temperatures).exp_()
        token_W = draw(weights_WV, uniforms_W)
        if (greedy := torch.from_numpy(temperatures == 0)).any():
            token_W = torch.where(greedy, logits_WV.argmax(-1), token_W)
        return token_W, weights_WV

    def _layer(
        self,
        hidden_ND: Tensor,
        tokens_N: np.ndarray,
        rows_N: np.ndarray,
        positions_N: np.ndarray,
        pieces: list[tuple[int, int, int]],
    ) -> Tensor:
        """The MTP layer's states [N, D] after its norm. `pieces`: (row, start, n) in the order of the N."""
        if self.fused is not None:
            return self.fused.draft(hidden_ND, tokens_N, rows_N, positions_N, self.cache.drafted_from[rows_N])
        first = self.cache.drafted_from
        chunks = [Chunk(row, start, n, int(first[row])) for row, start, n in pieces]
        attend = StepAttention(self.cache, NO_ROWS, NO_ROWS, chunks)
        embedded = F.embedding(torch.from_numpy(tokens_N), self.model.embed_tokens.weight)
        rotation = self.model.rotary(attend.positions_N)
        return self.model.mtp_layers[0](self.model.config.num_hidden_layers, embedded, hidden_ND, rotation, attend)
