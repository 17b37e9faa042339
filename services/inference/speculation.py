"""Speculation: what is pure of it. The MTP layer proposes tokens, one pass of the trunk judges them, and the output's
distribution stays exactly the trunk's.

A draft d is drawn from the MTP layer's distribution q at the request's temperature. Given the trunk's p for the same place,
it is accepted with probability min(1, p(d) / q(d)); at the first that is not, the token is drawn from max(p - q, 0),
normalised, and the rest is forgotten; if all are accepted one more comes from the trunk's next distribution. Either way each
token is distributed as p (Leviathan et al., arXiv 2211.17192, appendix A.1). At temperature 0 a draft is accepted where it is
the trunk's choice.

Whether that pays depends on the machine, the model and how many sessions share a step, so `Gate` measures it.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from services.inference.sampler import draw, scaled

TRIAL = 12  # steps in which the other way is tried
WINDOW = 48  # steps of the present way that it is compared with
WAIT, MAX_WAIT = 48, 1 << 14  # steps between two trials; doubled whenever the present way wins
GAIN = 1.02  # by so much must the other way be faster to take over


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens [k] of one session and the distributions [k, V] that they were drawn from (one-hot if greedy)."""

    tokens: list[int]
    probabilities_KV: Tensor

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
    random: np.random.Generator,
    own_D: np.ndarray,
) -> Verdict:
    """Logits of D sessions, 1 + k rows each (k: its drafts), in order. `own_D`: the uniform numbers in [0, 1) with which
    sessions draw the token that is not a draft."""
    k_D = np.array([len(d.tokens) if d else 0 for d in drafts])
    ends_D = np.cumsum(1 + k_D)
    starts_D = ends_D - 1 - k_D
    greedy_D = temperatures_D == 0
    logprobs_NV = scaled(logits_NV, np.repeat(temperatures_D, 1 + k_D))
    accepted_D = _accepted(logits_NV, logprobs_NV, drafts, starts_D, greedy_D, random)
    rows_D = torch.from_numpy(starts_D + accepted_D)
    weights_DV = logprobs_NV[rows_D].exp_()
    for i, draft in enumerate(drafts):
        if draft and accepted_D[i] < k_D[i] and not greedy_D[i]:
            rest_V = (weights_DV[i] - draft.probabilities_KV[accepted_D[i]]).clamp_(min=0)
            if rest_V.sum() > 0:  # p = q up to rounding: then p itself
                weights_DV[i] = rest_V
    final_D = draw(weights_DV, own_D)
    if greedy_D.any():
        final_D = torch.where(torch.from_numpy(greedy_D), logits_NV[rows_D].argmax(-1), final_D)
    tokens = [
        [*(d.tokens[:a] if d else ()), f] for d, a, f in zip(drafts, accepted_D.tolist(), final_D.tolist(), strict=True)
    ]
    flat = [token for each in tokens for token in each]
    at = [start + j for start, each in zip(starts_D.tolist(), tokens, strict=True) for j in range(len(each))]
    found = iter(logprobs_NV[at, flat].tolist())
    return Verdict(tokens, [[next(found) for _ in each] for each in tokens])


def _accepted(
    logits_NV: Tensor,
    logprobs_NV: Tensor,
    drafts: list[Draft | None],
    starts_D: np.ndarray,
    greedy_D: np.ndarray,
    random: np.random.Generator,
) -> np.ndarray:
    """How many drafts of each session are accepted, int64 [D]."""
    accepted_D = np.zeros(len(drafts), np.int64)
    for i, draft in enumerate(drafts):
        if not draft:
            continue
        k, start = len(draft.tokens), int(starts_D[i])
        if greedy_D[i]:
            passed = (logits_NV[start : start + k].argmax(-1) == torch.tensor(draft.tokens)).tolist()
        else:
            each = torch.arange(k)
            p_K = logprobs_NV[start + each, draft.tokens].exp().numpy()
            passed = (random.random(k) * draft.probabilities_KV[each, draft.tokens].numpy() < p_K).tolist()
        accepted_D[i] = next((j for j, ok in enumerate(passed) if not ok), k)
    return accepted_D


@dataclass(slots=True)
class _Size:
    """Steps of about one batch size. (seconds, tokens) of the present way and of a trial of the other one."""

    drafting: bool = False
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    trial: list[tuple[float, float]] = field(default_factory=list)
    trying: bool = False
    wait: int = WAIT
    steps: int = 0  # since the last trial


class Gate:
    """Says before every step whether drafts shall be made, by batch size (powers of two). Every so often the other way is
    tried for a few steps and takes over if it gives more tokens a second; the longer the present way keeps winning, the rarer.

    A step counts by the median of its seconds, so that one interruption decides nothing, and the mean of its tokens."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def wants(self, sessions: int) -> bool:
        size = self._size(sessions)
        return size.drafting != size.trying

    def observe(self, sessions: int, drafted: bool, seconds: float, tokens: int) -> None:
        """One step that decoded `sessions` and nothing else, the same way at its beginning and its end."""
        size = self._size(sessions)
        if drafted != (size.drafting != size.trying):
            return
        if not size.trying:
            size.recent.append((seconds, tokens))
            size.steps += 1
            size.trying = size.steps >= size.wait
            return
        size.trial.append((seconds, tokens))
        if len(size.trial) < TRIAL:
            return
        if _rate(size.trial) > GAIN * _rate(size.recent):
            size.drafting = not size.drafting
            size.recent.clear()
            size.recent.extend(size.trial)
            size.wait = WAIT
        else:
            size.wait = min(2 * size.wait, MAX_WAIT)
        size.trial.clear()
        size.trying, size.steps = False, 0

    def _size(self, sessions: int) -> _Size:
        return self._sizes.setdefault(sessions.bit_length(), _Size())


def _rate(steps: list[tuple[float, float]] | deque[tuple[float, float]]) -> float:
    """Tokens a second."""
    return statistics.fmean(tokens for _, tokens in steps) / statistics.median(seconds for seconds, _ in steps)
