"""Log-probabilities are never above 0 and within 1e-4 of float64, wherever one is made: sampling, speculation, the trainer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.inference.sampler import propose, sample
from services.inference.speculation import Draft, verify
from services.trainer.loss import token_logprobs

TEMPERATURES = (1e-6, 1e-4, 0.005, 0.02, 0.3, 1.0, 4.0)
CASES = [(V, size) for V in (64, 2048, 151_936) for size in (0.0, 1e-3, 4.0, 1e4)]  # logits within +-size


def rows(V: int, size: float, count: int = len(TEMPERATURES)) -> torch.Tensor:
    random = torch.Generator().manual_seed(V)
    x = (2 * torch.rand(count, V, generator=random) - 1) * size
    x[:, 0], x[:, 1] = size, float(np.nextafter(np.float32(size), np.float32(0)))  # two that are next to each other
    return x


def exact(logits_BV: torch.Tensor, temperatures: np.ndarray, tokens_B: np.ndarray) -> np.ndarray:
    scaled = logits_BV.double().numpy() / temperatures[:, None]
    shifted = scaled - scaled.max(1, keepdims=True)
    return shifted[np.arange(len(tokens_B)), tokens_B] - np.log(np.exp(shifted).sum(1))


def check(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.isfinite(found).all()
    assert found.max() <= 0
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-6)  # float32 has no finer steps beyond -1000


@pytest.mark.parametrize(("V", "size"), CASES)
def test_sampled_tokens(V: int, size: float) -> None:
    x, temperatures = rows(V, size), np.array(TEMPERATURES)
    for seed in range(3):
        tokens, found = sample(x, temperatures, np.random.default_rng(seed).random(len(x)))
        check(found, exact(x, temperatures, tokens))


def test_many_tokens_of_a_usual_vocabulary_at_low_temperatures() -> None:
    x = torch.randn(512, 2048, generator=torch.Generator().manual_seed(1)) * 4
    for temperature in (0.02, 0.005, 0.001, 1e-6):
        temperatures = np.full(len(x), temperature)
        tokens, found = sample(x, temperatures, np.random.default_rng(0).random(len(x)))
        check(found, exact(x, temperatures, tokens))


@pytest.mark.parametrize(("V", "size"), CASES)
def test_drafted_and_judged_tokens(V: int, size: float) -> None:
    for temperature in TEMPERATURES:
        random = np.random.default_rng(7)
        x, same = rows(V, size, 3), np.full(3, temperature)
        drafts, chances = propose(x, same, random.random(3))
        draft = Draft(drafts[:2].tolist(), chances[:2])
        judged = x.flip(1) if size < 1 else x  # the trunk thinks otherwise where it may
        verdict = verify(judged, [draft], np.array([temperature]), np.array([False]), random.random(3), random)
        tokens = np.array(verdict.tokens[0])
        check(np.array(verdict.logprobs[0]), exact(judged[: len(tokens)], same[: len(tokens)], tokens))


@pytest.mark.parametrize(("V", "size"), CASES)
def test_trained_tokens(V: int, size: float) -> None:
    x = rows(V, size)
    targets, temperatures = torch.arange(len(x)) % 3, torch.tensor(TEMPERATURES)
    hidden = torch.eye(len(x), requires_grad=True)  # picks each row of the logits as it is
    found, entropy = token_logprobs(hidden, x.T.contiguous(), targets, temperatures)
    check(found.detach().numpy(), exact(x, np.float64(temperatures.numpy()), targets.numpy()))
    assert ((entropy > -1e-4) & (entropy < np.log(V) + 1e-3)).all()
    (gradient,) = torch.autograd.grad(found.sum(), hidden)
    assert torch.isfinite(gradient).all()
