"""How far trainer and sampler disagree about sampled tokens where one of them rounds: what router replay takes away.

The embedded engine samples with the shipped base policy, on Python source as prompts, many sessions at once: in bf16 arithmetic,
or in emulated FP8. A trainer computes the log-probabilities of the same tokens, once with the experts that the engine recorded and
once with its own. p99 is that of |log p_trainer - log p_sampler| over all sampled tokens.

- `mismatch.k1_fp8`: |mean of log q - log p| per token; q: the policy in FP8 before its first step, p: the reference of the KL
  penalty;
- `mismatch.replay_p99_ratio`: p99 without replay / with it, at age 0; engine in bf16, trainer in float32 on bf16 values;
- `mismatch.replay_p99_ratio_fp8`: the same, both in FP8;
- `mismatch.replay_p99_ratio_age_1`, `..._fp8_age_1`: the trainer is a step ahead (one AdamW step on the sampled tokens, with a
  random advantage for each attempt, at the default learning rate).

python -m benchmarks.mismatch [--quick] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from benchmarks.fp8 import Sampled, log_ratios, logprobs, policy, rounded, sample
from benchmarks.policies import BASE
from benchmarks.records import Bench, record
from services.trainer.engine import freeze
from services.trainer.loss import mismatch
from shared.contracts.run import TrainConfig
from shared.model import Transformer, load_checkpoint, published
from shared.model.fp8 import per_token, published_in_fp8

Rounds = Callable[[Transformer], AbstractContextManager[None]]


def a_step_later(sampled: Sampled, seed: int) -> Transformer:
    """Return the policy after one AdamW step on what it sampled."""
    model, config = policy().requires_grad_(True), TrainConfig()
    optimiser = torch.optim.AdamW(model.parameters(), config.learning_rate, config.betas)
    advantages = torch.randn(len(sampled), generator=torch.Generator().manual_seed(seed)).tolist()
    torch.manual_seed(seed)
    with torch.enable_grad(), published(model):
        for pair, advantage in zip(sampled, advantages, strict=True):
            (-advantage * logprobs(model, [pair])[0].sum() / len(sampled)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    optimiser.step()
    return model.requires_grad_(False)


def p99_ratio(model: Transformer, sampled: Sampled, rounds: Rounds) -> float:
    with rounds(model):
        own, replayed = (mismatch(log_ratios(model, sampled, replayed=r))["log_ratio_p99"] for r in (False, True))
    return own / replayed


def k1(sampled: Sampled) -> float:
    reference = freeze(policy(), TrainConfig(fp8=True))
    p = torch.cat(logprobs(reference, sampled))
    model = policy()
    with published_in_fp8(model):
        q = torch.cat(logprobs(model, sampled))
    return abs(float((q - p).mean()))


def main() -> None:
    bench = Bench.start(__doc__)
    drift, ratios = list[float](), {name: list[float]() for name in ("", "_age_1", "_fp8", "_fp8_age_1")}
    for seed in range(bench.pick(3, 1)):
        sessions = bench.pick(128, 12)
        in_bf16 = sample(load_checkpoint(BASE, torch.bfloat16).eval().requires_grad_(False), sessions, seed)
        in_fp8 = sample(rounded(per_token), sessions, seed)
        drift.append(k1(in_fp8))
        for name, sampled, rounds in (("", in_bf16, published), ("_fp8", in_fp8, published_in_fp8)):
            ratios[name].append(p99_ratio(policy(), sampled, rounds))
            ratios[f"{name}_age_1"].append(p99_ratio(a_step_later(sampled, seed), sampled, rounds))
    bench.add(
        record("mismatch.k1_fp8", "|k1| per token against the reference before the first step, in FP8", drift, "nats")
    )
    for name, found in ratios.items():
        age = 1 if name.endswith("age_1") else 0
        title = f"p99 |log ratio| without router replay / with it, {'FP8' if 'fp8' in name else 'bf16'}, age {age}"
        bench.add(record(f"mismatch.replay_p99_ratio{name}", title, found, "x"))
    bench.end()


if __name__ == "__main__":
    main()
