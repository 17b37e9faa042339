"""Draws tokens from rows of logits, and judges drafts by them."""

from __future__ import annotations

import numpy as np

from services.inference.kernels import compiled
from services.inference.kernels.pointwise import exponentials

# Below it nothing is left of any but the largest logit, and its inverse would soon be no float32.
COLDEST = 1e-6
BLOCK = 4096  # weights that are summed in float32; sums of blocks in float64, for 150,000 words are many


@compiled
def sample_rows(logits, temperatures, uniforms, weights, tokens, chosen):  # type: ignore[no-untyped-def]
    """`weights` is room for one row; tokens and their log-probabilities are written. See `sampler.sample`."""
    for b in range(len(logits)):
        greedy, scale = temperatures[b] == 0, _scale(temperatures[b])
        total, best, first = _weigh(logits[b], scale, weights)
        token = first if greedy else _draw(weights, uniforms[b] * total, first)
        tokens[b] = token
        chosen[b] = _log_probability(logits[b, token], scale, total, best)


@compiled
def propose_rows(logits, temperatures, uniforms, probabilities, tokens):  # type: ignore[no-untyped-def]
    """Drafts: a token of each row, and the distribution that it was drawn from (of a greedy row, the one at temperature 1)."""
    for b in range(len(logits)):
        greedy, scale = temperatures[b] == 0, _scale(temperatures[b])
        total, _, first = _weigh(logits[b], scale, probabilities[b])
        tokens[b] = first if greedy else _draw(probabilities[b], uniforms[b] * total, first)
        share = np.float32(1 / total)
        for v in range(logits.shape[1]):
            probabilities[b, v] *= share


@compiled
def judge_drafts(logits, temperature, drafts, probabilities, uniforms, weights, chosen):  # type: ignore[no-untyped-def]
    """One session's k drafts. Returns how many are accepted and, if not all, the token in place of the next one (else -1).

    `logits`, `probabilities`: the trunk's and the draft's [k, V]. `uniforms` [k + 1]: one for each draft and one for the
    token in its place. `chosen` gets the log-probabilities of what comes out; `weights` is room for one row."""
    k, V = logits.shape
    scale = _scale(temperature)
    for j in range(k):
        total, best, first = _weigh(logits[j], scale, weights)
        share = np.float32(1 / total)
        token = drafts[j]
        if uniforms[j] * probabilities[j, token] < weights[token] * share:
            chosen[j] = _log_probability(logits[j, token], scale, total, best)
            continue
        rest = np.float64(0)
        for v in range(V):
            rest += max(weights[v] * share - probabilities[j, v], np.float32(0))
        if rest > 0:
            for v in range(V):
                weights[v] = max(weights[v] * share - probabilities[j, v], np.float32(0))
        else:  # p = q up to rounding
            rest = total
        token = _draw(weights, uniforms[k] * rest, first)
        chosen[j] = _log_probability(logits[j, token], scale, total, best)
        return j, token
    return k, -1


@compiled
def _scale(temperature):  # type: ignore[no-untyped-def]
    """What logits are multiplied with; 1 for temperature 0, whose probabilities are those at 1."""
    return np.float32(1) if temperature == 0 else np.float32(1 / max(temperature, COLDEST))


@compiled
def _weigh(logits, scale, weights):  # type: ignore[no-untyped-def]
    """weights = exp((logits - greatest) * scale); returns their sum in float64 (1 or more), the greatest logit and where it stands.

    The greatest is taken away before scaling: at 1e-6 a logit of 30 is scaled to 3e7, where float32 has steps of 2."""
    best, first, V = logits[0], 0, len(logits)
    for v in range(V):
        if logits[v] > best:
            best, first = logits[v], v
    for v in range(V):
        weights[v] = (logits[v] - best) * scale
    total = np.float64(0)
    for start in range(0, V, BLOCK):
        total += exponentials(weights[start : start + BLOCK], np.float32(0))
    return total, best, first


@compiled
def _log_probability(logit, scale, total, best):  # type: ignore[no-untyped-def]
    """Never above 0: neither is the first part, and `total` is at least the greatest logit's weight, which is exactly 1."""
    return np.float64((logit - best) * scale) - np.log(total)


@compiled
def _draw(weights, threshold, otherwise):  # type: ignore[no-untyped-def]
    """The first id whose sum reaches over the threshold; one without weight is never drawn. `otherwise`, where rounding lets no
    sum reach it."""
    reached = np.float64(0)
    for v in range(len(weights)):
        reached += weights[v]
        if reached > threshold:
            return v
    return otherwise
