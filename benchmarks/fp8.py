"""What FP8 engines cost a trainer in agreement, and how much of it comes back where it rounds as they do.

The embedded engine samples with the shipped base policy in emulated FP8 (`shared.model.fp8`), on Python source as prompts, many
sessions at once; then a plain forward over every attempt, with the engine's experts, in three ways. k3 = mean(r - 1 - log r) of
the ratios r of the trainer's to the sampler's probability is the estimate of KL(sampler || trainer) per token.

- `fp8.k3.bf16`: the trainer computes in bf16's values, as it does without FP8;
- `fp8.k3.matching`: it rounds as the engine does (`train.fp8`);
- `fp8.k3.per_tensor`: both round with one scale per tensor instead of one per token and 128 numbers;
- `fp8.share_left`: matching / bf16.

python -m benchmarks.fp8 [--quick] [--json FILE]
"""

from __future__ import annotations

import inspect
import json
import queue
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import Tensor

from benchmarks.policies import BASE
from benchmarks.records import Bench, record
from services.inference.engine import Engine
from services.inference.request import Request, Result
from services.trainer.loss import mismatch
from shared.model import Replay, Transformer, causal_rows, load_checkpoint, published
from shared.model.fp8 import Rounding, per_tensor, per_token, published_in_fp8, round_inputs, round_weights
from shared.renderers.formats.compact_1 import Compact

PROMPT, NEW = 48, 96
Sampled = list[tuple[np.ndarray, Result]]


def policy() -> Transformer:
    return load_checkpoint(BASE).eval().requires_grad_(False)


def rounded(rounding: Rounding) -> Transformer:
    """Return the policy as an engine in FP8 computes with it, but for its inputs, which are rounded by `rounding`."""
    model = policy()
    round_weights(model)
    round_inputs(model, rounding=rounding)
    return model


@contextmanager
def engine(model: Transformer) -> Iterator[Engine]:
    torch.set_num_threads(1)
    found = Engine(model, 0, rows=64, positions=256, prefill_tokens=2048, queue_limit=1000)
    found.start()
    try:
        yield found
    finally:
        found.stop()


def sample(model: Transformer, sessions: int, seed: int) -> Sampled:
    """Return prompts and attempts at them, sampled by the embedded engine with this model."""
    tokens = Compact.load(BASE).encode(inspect.getsource(json.decoder) + inspect.getsource(inspect))
    starts = np.random.default_rng(seed).integers(0, len(tokens) - PROMPT, sessions)
    ended: queue.SimpleQueue[tuple[np.ndarray, Result]] = queue.SimpleQueue()
    with engine(model) as running:
        for start in starts:
            prompt = np.array(tokens[start : start + PROMPT], np.int32)

            def done(result: Result, prompt: np.ndarray = prompt) -> None:
                ended.put((prompt, result))

            running.submit(Request(rid="", tokens_P=prompt, max_new_tokens=NEW, done=done, routing_start=0))
        return [ended.get() for _ in starts]


def logprobs(model: Transformer, sampled: Sampled, *, replayed: bool = True) -> list[Tensor]:
    """Return, for each attempt, the model's log-probabilities of its sampled tokens. `replayed`: with the engine's experts; else
    with the model's own."""
    found = []
    for prompt_P, result in sampled:
        assert result.routing is not None
        whole = torch.from_numpy(np.concatenate([prompt_P, result.tokens_C])).long()
        T, P = len(whole), len(prompt_P)
        experts = torch.zeros(T, *result.routing.shape[1:], dtype=torch.long)
        experts[: T - 1] = torch.from_numpy(result.routing.astype(np.int64))
        replay = Replay(experts, torch.arange(T) < T - 1)
        out = model(whole, torch.arange(T), causal_rows(1, T), replay if replayed else None)
        logits = model.logits(out.hidden_ND[P - 1 : -1]).float()
        found.append(logits.log_softmax(-1)[torch.arange(T - P), whole[P:]])
    return found


def log_ratios(model: Transformer, sampled: Sampled, *, replayed: bool = True) -> np.ndarray:
    """Return log p_trainer - log p_sampler of every sampled token."""
    own = logprobs(model, sampled, replayed=replayed)
    return np.concatenate([x.numpy() - result.logprobs_C for x, (_, result) in zip(own, sampled, strict=True)])


def compare(sampled: Sampled, rounds: Callable[[Transformer], AbstractContextManager[None]]) -> float:
    model = policy()
    with rounds(model):
        return mismatch(log_ratios(model, sampled))["k3"]


def main() -> None:
    bench = Bench.start(__doc__)
    plain, matching, tensor = list[float](), list[float](), list[float]()
    for seed in range(bench.pick(3, 1)):
        sampled = sample(rounded(per_token), bench.pick(128, 16), seed)
        plain.append(compare(sampled, published))
        matching.append(compare(sampled, published_in_fp8))
        other = sample(rounded(per_tensor), bench.pick(128, 16), seed)
        tensor.append(compare(other, lambda model: published_in_fp8(model, rounding=per_tensor)))
    bench.add(record("fp8.k3.bf16", "k3 KL per token, engine in FP8, trainer in bf16", plain, "nats"))
    bench.add(record("fp8.k3.matching", "k3 KL per token, both in FP8", matching, "nats"))
    bench.add(record("fp8.k3.per_tensor", "k3 KL per token, both in FP8 with one scale per tensor", tensor, "nats"))
    left = [after / before for after, before in zip(matching, plain, strict=True)]
    bench.add(record("fp8.share_left", "matching / bf16", left, "x"))
    bench.end()


if __name__ == "__main__":
    main()
