"""Speculation: what is pure of it. The MTP layer proposes tokens, one pass of the trunk judges them, and the output's
distribution stays exactly the trunk's.

A draft d is drawn from the MTP layer's distribution q at the request's temperature. Given the trunk's p for the same place,
it is accepted with probability min(1, p(d) / q(d)); at the first that is not, the token is drawn from max(p - q, 0),
normalised, and the rest is forgotten; if all are accepted one more comes from the trunk's next distribution. Either way each
token is distributed as p (Leviathan et al., arXiv 2211.17192, appendix A.1).

Where the trunk's token is fixed beforehand, by a seed or by temperature 0, that token is what comes out, and a draft is accepted
where it is equal. A seeded draft is drawn with the same uniform number as the trunk's token, so that two distributions which
are alike mostly agree. A seed therefore gives the same tokens with drafts and without.

Whether that pays depends on the machine, the model and how many sessions share a step, so `Gate` measures it.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from services.inference.kernels.sampling import judge_drafts
from services.inference.sampler import host, sample

TRIAL = 32  # steps in which the other way is tried and counted
HOPELESS = 8, 0.75  # after so many of them a trial ends that gives less than this share of the present way
WARM = 12  # steps before them: drafts are poor until the MTP layer has keys of some tokens
WINDOW = 64  # steps of the present way that it is compared with
WAIT, MAX_WAIT = 256, 1 << 14  # steps between two trials; at least doubled whenever the present way wins
LOSS = 0.01  # the share of all steps that a trial which failed may have cost before the next begins
GAIN = 1.02  # by so much must the other way be faster to take over


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


@dataclass(slots=True)
class _Size:
    """Steps of one batch size. (seconds, tokens) of the present way and of a trial of the other one."""

    drafting: bool = False
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    trial: list[tuple[float, float]] = field(default_factory=list)
    trying: bool = False
    wait: int = WAIT
    steps: int = 0  # since the last trial


class Gate:
    """Says before every step whether drafts shall be made, by the number of sessions. Every so often the other way is tried for
    a few steps and takes over if it gives more tokens a second; the longer the present way keeps winning, and the more a
    trial cost, the later the next.

    A step counts by the median of its seconds, so that one interruption decides nothing, and the mean of its tokens. Not
    counted: steps that compute prompts, and what a change of ways costs the drafts after it (their keys begin anew)."""

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
        counted = size.trial[WARM:]
        enough, share = HOPELESS
        present = _rate(size.recent)
        if len(counted) < TRIAL and (len(counted) < enough or _rate(counted) >= share * present):
            return
        if _rate(counted) > GAIN * present:
            size.drafting = not size.drafting
            size.recent.clear()
            size.recent.extend(counted)
            size.wait = WAIT
        else:
            size.wait = min(max(2 * size.wait, int(_lost(size) / LOSS)), MAX_WAIT)
        size.trial.clear()
        size.trying, size.steps = False, 0

    def _size(self, sessions: int) -> _Size:
        return self._sizes.setdefault(sessions, _Size())


def _lost(size: _Size) -> float:
    """How many steps of the present way would have given in the trial's time what the trial did not."""
    took, takes = (statistics.median(seconds for seconds, _ in steps) for steps in (size.trial, size.recent))
    gives = statistics.fmean(tokens for _, tokens in size.recent)
    return len(size.trial) * took / takes - sum(tokens for _, tokens in size.trial) / gives


def _rate(steps: list[tuple[float, float]] | deque[tuple[float, float]]) -> float:
    """Tokens a second."""
    return statistics.fmean(tokens for _, tokens in steps) / statistics.median(seconds for seconds, _ in steps)
