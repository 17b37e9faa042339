"""The model card beside the checkpoint: from what it was made, how, and with what figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from services.trainer.base.leak import LeakReport
from services.trainer.base.probe import Probe
from services.trainer.base.settings import ADAM_LR, MODEL, MUON_LR, TOKENS_PER_RANK

_CARD = """\
---
license: apache-2.0
library_name: transformers
tags: [code, mixture-of-experts, reinforcement-learning, small]
---
# Étude base policy

A code model of {total:.1f}M parameters ({active:.1f}M active per token) that repairs small Python functions by calls in
the `compact-1` format (docs/base.md). It was made by this project's own recipe on two CPU cores and is where `etude demo`
begins. It knows nothing but repairing short functions: no chat, no English, no free generation.

- Architecture: Qwen3-MoE, {layers} layers, hidden {hidden}, {heads} heads on {groups} key-value heads, {experts} experts of
  {width} (top {top}), vocabulary {vocab}, context {context}, tied embeddings, one MTP layer (DeepSeek-V3 names).
- Data: Python functions of the standard library, this project's pinned dependencies and the distributions of
  `shared/problems/corpus.txt`, train split only, {functions} functions and {problems} repair problems. No source code is shipped;
  `signatures.npz` names the functions by MinHash, and every pack is filtered against it.
- Phases: {phases}.
- Optimiser: Muon {muon} for matrices (experts one by one), Adam {adam} for embeddings, norms and routers; {tokens} tokens
  a step; router load-balancing loss 0.01.
- Made by: `make base BASE="--minutes {minutes:g} --seed {seed} --processes {processes}"`. Phases end by the clock: another
  machine, other weights.

## Figures

{table}

`exact`: dev samples whose action tokens are all the likeliest ones, teacher-forced (mtp: agreement of the MTP layer with
the main head; its loss is the soft cross-entropy against it). Curves: `losses.png`.

{probe}## Leak report

{streams} functions are in the training streams. Of the other splits' functions, in the streams exactly (alpha-renamed
syntax tree) or nearly (MinHash, estimated similarity of 4-grams at least 0.6):

{leaks}

`python -m services.trainer.base leaks --pack DIR` makes this report anew, from the streams or else from `signatures.npz`.
"""


def write_card(
    out: Path,
    work: Path,
    figures: Probe,
    leaks: LeakReport,
    functions: int,
    *,
    seed: int,
    minutes: float,
    processes: int,
) -> None:
    """`figures`: of the checkpoint in `out`, on dev."""
    lines = [json.loads(line) for line in (work / "losses.jsonl").read_text().splitlines()]
    last = {line["phase"]: line for line in lines}
    complete = json.loads((work / "streams" / "complete.json").read_text())
    total, active = parameters()
    rows = [
        "| phase | minutes | steps | tokens | train loss | dev loss per action token | exact |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {x['minutes']:.1f} | {x['step']} | {x['tokens'] / 1e6:.1f}M | {x['train']:.3f} | {_dev(x)} |"
            for name, x in last.items()
        ),
    ]
    splits = [
        "| split | functions | exact | near |",
        "|---|---|---|---|",
        *(f"| {name} | {s.functions} | {s.exact} | {s.near} |" for name, s in leaks.splits.items()),
    ]
    text = _CARD.format(
        total=total / 1e6,
        active=active / 1e6,
        layers=MODEL["num_hidden_layers"],
        hidden=MODEL["hidden_size"],
        heads=MODEL["num_attention_heads"],
        groups=MODEL["num_key_value_heads"],
        experts=MODEL["num_experts"],
        width=MODEL["moe_intermediate_size"],
        top=MODEL["num_experts_per_tok"],
        vocab=MODEL["vocab_size"],
        context=MODEL["max_position_embeddings"],
        functions=functions,
        problems=complete["problems"],
        phases="pretraining (code and multi-bug denoising), SFT on agent traces, MTP self-distillation",
        muon=MUON_LR,
        adam=ADAM_LR,
        tokens=TOKENS_PER_RANK * processes,
        minutes=minutes,
        seed=seed,
        processes=processes,
        table="\n".join(rows),
        probe=_probe(figures),
        streams=leaks.streams,
        leaks="\n".join(splits),
    )
    (out / "README.md").write_text(text)


def _dev(line: dict) -> str:
    """Two cells. The dev figures are of traces in the agent's format, which pretraining has not seen."""
    return "– | –" if line["phase"] == "pretrain" else f"{line['action']:.3f} | {line['exact']:.3f}"


def _probe(figures: Probe) -> str:
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in asdict(figures).items())
    return (
        f"Agentic, dev split, temperature 1 (`python -m services.trainer.base probe`):\n\n| | |\n|---|---|\n{rows}\n\n"
    )


def parameters() -> tuple[int, int]:
    """(all, active per token without the MTP layer)."""
    from shared.model import ModelConfig, Transformer
    from shared.model.moe import MixtureOfExperts

    model = Transformer(ModelConfig.from_dict(MODEL))
    total = sum(p.numel() for p in model.parameters())
    trunk = total - sum(p.numel() for p in model.mtp_layers.parameters())
    idle = 0
    for layer in model.layers:
        moe = layer.mlp
        if isinstance(moe, MixtureOfExperts):
            share = 1 - MODEL["num_experts_per_tok"] / MODEL["num_experts"]
            idle += int((moe.gate_up.numel() + moe.down.numel()) * share)
    return total, trunk - idle
