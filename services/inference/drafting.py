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
from services.inference.sampler import propose
from services.inference.speculation import Draft
from shared.model import Transformer

NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Computed:
    """What the trunk has computed in this step, in C pieces of a row each: positions [start, start + n), and where their states
    begin among its N. int64 [C] each."""

    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    at: np.ndarray

    def within(self, begin: np.ndarray) -> np.ndarray:
        """begin, begin + 1, … of every piece, one after the other."""
        before = np.cumsum(self.lengths) - self.lengths
        return np.repeat(begin - before, self.lengths) + np.arange(int(self.lengths.sum()))


class Drafter:
    """`k` tokens per session. Only for the engine's thread."""

    def __init__(self, model: Transformer, cache: SlotCache, fused: FusedStep | None, k: int) -> None:
        self.model, self.cache, self.fused, self.k = model, cache, fused, k

    def propose(
        self,
        hidden_ND: Tensor,
        computed: Computed,
        wanted: np.ndarray,
        temperatures: np.ndarray,
        uniforms_WK: np.ndarray,
    ) -> list[Draft]:
        """One draft for each of the pieces `wanted` (int64 [W]), whose last position is followed by the newest token, drawn with
        its uniform numbers in [0, 1).
        `computed`: everything whose keys the layer shall have, one piece per row; the token after each position stands in the
        cache."""
        cache, rows_C = self.cache, computed.rows
        ends_C = computed.starts + computed.lengths
        rows_M, positions_M = np.repeat(rows_C, computed.lengths), computed.within(computed.starts)
        device = hidden_ND.device
        states_MD = hidden_ND.index_select(0, torch.from_numpy(computed.within(computed.at)).to(device))
        cache.drafted_from[rows_C] = np.where(
            cache.drafted_to[rows_C] == computed.starts, cache.drafted_from[rows_C], computed.starts
        )
        cache.drafted_to[rows_C] = ends_C
        tokens_M = cache.tokens[rows_M, positions_M + 1]
        pieces = zip(rows_C.tolist(), computed.starts.tolist(), computed.lengths.tolist(), strict=True)
        out_MD = self._layer(states_MD, tokens_M, rows_M, positions_M, list(pieces))
        last_W = np.cumsum(computed.lengths)[wanted] - 1
        state_WD = out_MD.index_select(0, torch.from_numpy(last_W).to(device))
        rows_W, positions_W = rows_C[wanted], ends_C[wanted]
        tokens_WK = np.empty((len(wanted), self.k), np.int64)
        probabilities: list[np.ndarray] = []
        for step in range(self.k):
            if step:
                singles = [
                    (row, position, 1) for row, position in zip(rows_W.tolist(), positions_W.tolist(), strict=True)
                ]
                newest_W = tokens_WK[:, step - 1].astype(np.int32)
                state_WD = self._layer(state_WD.clone(), newest_W, rows_W, positions_W, singles)
                positions_W = np.minimum(
                    positions_W + 1, cache.positions - 1
                )  # what lies behind the end is cut off later
            logits_WV = (self.fused or self.model).mtp_logits(state_WD)
            uniforms_W = np.ascontiguousarray(uniforms_WK[:, step])
            tokens_WK[:, step], weights_WV = propose(logits_WV, temperatures, uniforms_W)
            probabilities.append(weights_WV)
        stacked_WKV = np.stack(probabilities, 1)
        return [Draft(tokens, weights) for tokens, weights in zip(tokens_WK.tolist(), stacked_WKV, strict=True)]

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
        embedded = F.embedding(torch.from_numpy(tokens_N).to(hidden_ND.device), self.model.embed_tokens.weight)
        rotation = self.model.rotary(attend.positions_N)
        return self.model.mtp_layers[0](self.model.config.num_hidden_layers, embedded, hidden_ND, rotation, attend)
