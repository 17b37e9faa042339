"""Does the gradient of half of a batch point where the other half's does? By way of giving credit, on the shipped policy.

A policy gradient from few attempts is mostly noise. Its signal is what two independent halves have in common: the cosine
between them. The second figure is the cosine of the whole with the gradient of what practice is for, the probability of
the right first edit on the dev split.

[ETUDE_PACK=DIR] python -m benchmarks.credit [--quick] [--json FILE]      DIR: .cache/pack, what `make pack` makes
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.learning.loop import BASE, Pair, Practice
from benchmarks.records import Bench, record
from services.trainer import packing
from services.trainer.base.traces import perfect
from services.trainer.layout import attend_shared, lay_out
from services.trainer.loss import policy_loss, token_logprobs
from services.trainer.packing import TrainSequence
from shared.contracts.run import Credit, TrainConfig
from shared.model import causal_rows, published

PACK = Path(os.environ.get("ETUDE_PACK", ".cache/pack"))
WAYS = {
    "attempt": ("by attempt (Dr. GRPO)", Credit(per="attempt")),
    "discounted": ("by turn, discount 0.5, no faults", Credit(per="turn", discount=0.5, faults={})),
    "turn": ("by turn, discount 0, no faults", Credit(per="turn", discount=0.0, faults={})),
    "faults": ("by turn, discount 0, with faults", Credit(per="turn")),
}


def flat(model: torch.nn.Module) -> Tensor:
    """All gradients as one vector; they are dropped."""
    named = [p for n, p in model.named_parameters() if not n.startswith("mtp")]
    found = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in named])
    for p in named:
        p.grad = None
    return found


def policy_gradient(practice: Practice, sequences: Sequence[TrainSequence]) -> Tensor:
    units = packing.form_units([s for s in sequences if s.has_signal], replay=False)
    model = practice.model
    with published(model):
        for part in packing.micro_batches(units, practice.train_config.micro_batch_tokens):
            batch = lay_out(part)
            out = model(batch.tokens_N, batch.positions_N, attend_shared(batch.blocks))
            logprobs, _ = token_logprobs(
                out.hidden_ND[batch.predict_S], model.head(), batch.target_S, batch.temperature_S
            )
            policy_loss(
                logprobs, batch.sampled_logprobs_S, None, batch.advantage_S, clip=2.0, kl=0.0, norm=1.0
            ).backward()
    return flat(model)


def aim(practice: Practice, pairs: Sequence[Pair]) -> Tensor:
    """Gradient of -(mean probability of the right first edit)."""
    model, format = practice.model, practice.format
    with published(model):
        for problem, hidden in pairs:
            trace = perfect(problem, hidden, format)
            if not trace:
                continue
            prompt = format.prompt(problem, problem.files)
            tokens = torch.as_tensor(trace[0].ids, dtype=torch.int64)
            end = tokens.tolist().index(format.test, len(prompt))
            hidden_ND = model(tokens[:end], torch.arange(end), causal_rows(1, end)).hidden_ND[len(prompt) - 1 : end - 1]
            targets = tokens[len(prompt) : end]
            logprobs = model.logits(hidden_ND).log_softmax(-1).gather(1, targets[:, None])
            (-logprobs.sum().exp() / len(pairs)).backward()
    return flat(model)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def main() -> None:
    bench = Bench.start(__doc__)
    torch.manual_seed(1)
    practice = Practice(BASE, TrainConfig(router_replay=False, mtp=False, norm_tokens=40.0))
    pool = practice.problems(PACK, "rl")
    random.Random(1).shuffle(pool)
    groups = practice.attempts(pool[: bench.pick(384, 32)], 8)
    half = len(groups) // 2
    goal = aim(practice, practice.problems(PACK, "dev")[: bench.pick(400, 20)])
    for name, (what, how) in WAYS.items():
        a, b = (policy_gradient(practice, practice.sequences(part, how)) for part in (groups[:half], groups[half:]))
        bench.add(record(f"credit.agreement.{name}", f"two halves' gradients, credit {what}", [cosine(a, b)], "cosine"))
        bench.add(
            record(
                f"credit.aim.{name}", f"gradient and that of the aim, credit {what}", [cosine(a + b, goal)], "cosine"
            )
        )
    practice.close()
    bench.end()


if __name__ == "__main__":
    main()
