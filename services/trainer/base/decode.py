"""Samples from the policy for many sessions in lock-step, with a key-value cache. For development figures only: the
product's engine is the inference service."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.model import Transformer, causal_rows


class LockStep:
    """B sessions, one token each per step. `length[b]` tokens of session b are in the cache."""

    def __init__(self, model: Transformer, prompts: list[list[int]], room: int) -> None:
        """Runs the prompts. `room`: tokens that a session may grow by."""
        self.model = model
        B, P = len(prompts), max(map(len, prompts))
        self.length = torch.tensor([len(p) for p in prompts])
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        tokens_BP = torch.zeros(B, P, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens_BP[row, : len(prompt)] = torch.tensor(prompt)
        rows = causal_rows(B, P)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for cache, new in ((self._keys, k), (self._values, v)):
                cache.append(F.pad(new.view(B, P, *new.shape[1:]), (0, 0, 0, 0, 0, room)))
            return rows(layer, q, k, v)

        out = model(tokens_BP.flatten(), torch.arange(P).repeat(B), attend)
        self.logits_BV = model.logits(out.hidden_ND.view(B, P, -1)[torch.arange(B), self.length - 1])

    def step(self, tokens_B: Tensor) -> None:
        """Appends one token to every session; `logits_BV` then predict the next."""
        B = len(tokens_B)
        rows = torch.arange(B)
        used = int(self.length.max()) + 1
        visible = (torch.arange(used)[None] <= self.length[:, None])[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys[rows, self.length], values[rows, self.length] = k, v
            out = F.scaled_dot_product_attention(
                q[:, :, None],
                keys[:, :used].transpose(1, 2),
                values[:, :used].transpose(1, 2),
                attn_mask=visible,
                scale=1.0,
                enable_gqa=True,
            )
            return out[:, :, 0]

        out = self.model(tokens_B, self.length, attend)
        self.length += 1
        self.logits_BV = self.model.logits(out.hidden_ND)

    def keep(self, sessions: list[int]) -> None:
        """Drops all other sessions."""
        index = torch.tensor(sessions)
        self._keys = [k[index] for k in self._keys]
        self._values = [v[index] for v in self._values]
        self.length, self.logits_BV = self.length[index], self.logits_BV[index]
