"""How surprising the reference repair of a problem is to a policy: what its hardness is guessed from before anybody tried.

    surprise = -log p(repair | task), in nats, of the calls that turn the broken file into the reference solution

written as the first thing after the prompt. It is no chance of success (a policy has several tries, and there may be other
repairs), but orders problems well: of 1,466 groups of eight attempts, 34 % held solved and unsolved attempts; of those
between 1.5 and 5 nats, 53 to 70 %; beyond 8 nats, 9 % (docs/results.md). The scheduler learns the chance of success per band
of surprise (services/curator/admission.py). Only the curator and the scheduler see it; it is made of hidden solutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from services.trainer.base import pack as packs
from services.trainer.base.traces import reference_repair
from shared.model import Transformer, causal_rows, load_checkpoint
from shared.problems import FunctionHidden, FunctionProblem
from shared.renderers.formats.compact_1 import Compact, FormatError

BATCH_TOKENS = 4096  # padded


def of_pack(checkpoint: Path, pack: Path, split: str, progress: Callable[[float], None]) -> dict[str, float]:
    """Problem id -> nats. Problems without a reference repair that the format can write are left out. `progress` is told
    the share that is done. Raises PackError, FileNotFoundError."""
    model, format = load_checkpoint(checkpoint), Compact.load(checkpoint)
    return surprises(model, format, packs.problems(pack, split), progress)


def surprises(
    model: Transformer,
    format: Compact,
    pairs: Sequence[tuple[FunctionProblem, FunctionHidden]],
    progress: Callable[[float], None],
) -> dict[str, float]:
    written = [(p.id, *parts) for p, h in pairs if (parts := _written(p, h, format)) is not None]
    written.sort(key=lambda item: len(item[1]) + len(item[2]))  # alike lengths together: little padding
    found: dict[str, float] = {}
    while len(found) < len(written):
        rest = written[len(found) :]
        count = 1
        while count < len(rest) and (count + 1) * len(rest[count][1] + rest[count][2]) <= BATCH_TOKENS:
            count += 1
        found.update(_batch(model, rest[:count]))
        progress(len(found) / len(written))
    return found


def _written(problem: FunctionProblem, hidden: FunctionHidden, format: Compact) -> tuple[list[int], list[int]] | None:
    """Prompt and calls."""
    calls = reference_repair(problem, hidden, format)
    if calls is None:
        return None
    try:
        return format.prompt(problem, problem.files), calls
    except FormatError:
        return None


@torch.inference_mode()
def _batch(model: Transformer, items: Sequence[tuple[str, list[int], list[int]]]) -> dict[str, float]:
    B, T = len(items), max(len(prompt) + len(calls) for _, prompt, calls in items)
    tokens_BT = torch.zeros(B, T, dtype=torch.long)
    for row, (_, prompt, calls) in enumerate(items):
        tokens_BT[row, : len(prompt) + len(calls)] = torch.tensor(prompt + calls)
    hidden_BTD = model(tokens_BT.flatten(), torch.arange(T).repeat(B), causal_rows(B, T)).hidden_ND.view(B, T, -1)
    found = {}
    for row, (name, prompt, calls) in enumerate(items):
        before = hidden_BTD[row, len(prompt) - 1 : len(prompt) + len(calls) - 1]
        logprobs_CV = model.logits(before).log_softmax(-1)
        found[name] = -float(logprobs_CV.gather(1, torch.tensor(calls)[:, None]).sum())
    return found
