"""Speculation: what is pure of it. The MTP layer proposes tokens, one pass of the trunk judges them, and the output's
distribution stays exactly the trunk's.

A draft d is drawn from the MTP layer's distribution q at the request's temperature. Given the trunk's p for the same place,
it is accepted with probability min(1, p(d) / q(d)); at the first that is not, the token is drawn from max(p - q, 0),
normalised, and the rest is forgotten; if all are accepted one more comes from the trunk's next distribution. Either way each
token is distributed as p (Leviathan et al., arXiv 2211.17192, appendix A.1).

Where the trunk's token is fixed beforehand, by a seed or by temperature 0, that token is what comes out, and a draft is accepted
where it is equal. A seeded draft is drawn with the same uniform number as the trunk's token, so that two distributions which
are alike mostly agree. A seed therefore gives the same tokens with drafts and without.

Whether that pays depends on the machine, the model and how many sessions share a step: `gate` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from services.inference.kernels.sampling import judge_drafts
from services.inference.sampler import host, sample


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens [k] of one session and the distributions [k, V] that they were drawn from."""

    tokens: list[int]
    probabilities_KV: np.ndarray

    def first(self, n: int) -> Draft:
        return Draft(self.tokens[:n], self.probabilities_KV[:n])


@dataclass(frozen=True, slots=True)
class Verdict:
    """Per session: the tokens of a step (accepted drafts, then one of the trunk's) and their log-probabilities."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


def verify(
    logits_NV: Tensor,
    drafts: list[Draft | None],
    temperatures_D: np.ndarray,
    seeded_D: np.ndarray,
    uniforms_N: np.ndarray,
    random: np.random.Generator,
) -> Verdict:
    """Logits of D sessions, 1 + k rows each (k: its drafts), in order, and the uniform number in [0, 1) of each row."""
    k_D = np.array([len(d.tokens) if d else 0 for d in drafts])
    starts_D = np.cumsum(1 + k_D) - 1 - k_D
    ids_N, chosen_N = sample(logits_NV, np.repeat(temperatures_D, 1 + k_D), uniforms_N)  # the trunk's own tokens
    all_NV = host(logits_NV)
    tokens: list[list[int]] = []
    logprobs: list[list[float]] = []
    for i, (draft, start, k) in enumerate(zip(drafts, starts_D.tolist(), k_D.tolist(), strict=True)):
        own, chances = ids_N[start : start + k + 1].tolist(), chosen_N[start : start + k + 1].tolist()
        if draft and not seeded_D[i] and temperatures_D[i] > 0:
            accepted, new, found = _judge(draft, all_NV[start : start + k], temperatures_D[i], random)
            if accepted == k:
                new, found = [*new, own[k]], [*found, chances[k]]
        else:
            same = next((j for j in range(k) if draft and draft.tokens[j] != own[j]), k)
            new, found = own[: same + 1], chances[: same + 1]
        tokens.append(new)
        logprobs.append(found)
    return Verdict(tokens, logprobs)


def _judge(
    draft: Draft, logits_KV: np.ndarray, temperature: float, random: np.random.Generator
) -> tuple[int, list[int], list[float]]:
    """How many are accepted; they, and after the first that is not one token from the rest of the trunk's distribution."""
    k, V = logits_KV.shape
    chosen_K, room_V = np.empty(k, np.float32), np.empty(V, np.float32)
    drafts_K, uniforms = np.array(draft.tokens, np.int64), random.random(k + 1)
    accepted, token = judge_drafts(logits_KV, temperature, drafts_K, draft.probabilities_KV, uniforms, room_V, chosen_K)
    new = draft.tokens[:accepted] if accepted == k else [*draft.tokens[:accepted], token]
    return accepted, new, chosen_K[: len(new)].tolist()
