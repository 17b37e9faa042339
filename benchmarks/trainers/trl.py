"""TRL's GRPOTrainer as a peer of `benchmarks.train_step`: loss, backward and AdamW over the same groups.

    python -m benchmarks.trainers.trl CHECKPOINT BATCH.npz THREADS REPEATS ROWS…

Prints one JSON line for each number of ROWS of a padded micro-batch: {"rows", "seconds", "memory_mib"}. `seconds`: processor
seconds of each repeated step. The caller tries several ROWS and takes the best. Sequences are sorted by length, so that padding
is least, and each micro-batch is padded to its own longest prompt and completion. Nothing is sampled; no reward is computed.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer


def trainer(checkpoint: Path, folder: str, longest: int) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="sdpa"
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), pad_token="a", eos_token="b"
    )
    config = GRPOConfig(
        output_dir=folder,
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        max_completion_length=longest,
        num_generations=8,
        per_device_train_batch_size=8,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
    )
    data = Dataset.from_list([{"prompt": "a"}] * 8)
    made = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    )
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


Sequence_ = tuple[Tensor, Tensor, float]  # tokens [T], whether each was sampled [T], advantage


def read(path: Path) -> list[Sequence_]:
    """Return the batch: flat arrays, cut at `starts`."""
    with np.load(path) as file:
        cuts = file["starts"][1:]
        tokens = np.split(file["tokens"].astype(np.int64), cuts)
        sampled = np.split(file["sampled"], cuts)
        return [
            (torch.tensor(t), torch.tensor(s), float(a))
            for t, s, a in zip(tokens, sampled, file["advantages"], strict=True)
        ]


def micro_batches(batch: Sequence[Sequence_], rows: int) -> Iterator[dict[str, Tensor]]:
    order = sorted(batch, key=lambda s: len(s[0]))
    for at in range(0, len(order), rows):
        yield padded(order[at : at + rows])


def padded(part: Sequence[Sequence_]) -> dict[str, Tensor]:
    """Prompts are padded on the left, completions on the right; `tool_mask` leaves out what was observed."""
    prompts = [int(sampled.int().argmax()) for _, sampled, _ in part]
    P, C = max(prompts), max(len(tokens) - p for (tokens, _, _), p in zip(part, prompts, strict=True))
    ids, mask = (torch.zeros(len(part), P, dtype=torch.long) for _ in range(2))
    completion, seen, tool = (torch.zeros(len(part), C, dtype=torch.long) for _ in range(3))
    for row, ((tokens, sampled, _), p) in enumerate(zip(part, prompts, strict=True)):
        length = len(tokens) - p
        ids[row, P - p :], mask[row, P - p :] = tokens[:p], 1
        completion[row, :length], seen[row, :length], tool[row, :length] = tokens[p:], 1, sampled[p:].long()
    return {
        "prompt_ids": ids,
        "prompt_mask": mask,
        "completion_ids": completion,
        "completion_mask": seen,
        "tool_mask": tool,
        "advantages": torch.tensor([advantage for *_, advantage in part]),
    }


def step(peer: Any, optimiser: torch.optim.Optimizer, batch: Sequence[Sequence_], rows: int) -> None:
    for inputs in micro_batches(batch, rows):
        share = len(inputs["advantages"]) / len(batch)  # TRL divides by the rows of the micro-batch
        (peer._compute_loss(peer.model, inputs) * share).backward()
    torch.nn.utils.clip_grad_norm_(peer.model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad()


def main(checkpoint: str, file: str, threads: str, repeats: str, *rows: str) -> None:
    torch.set_num_threads(int(threads))
    batch = read(Path(file))
    longest = max(len(tokens) - int(sampled.int().argmax()) for tokens, sampled, _ in batch)
    answers, sys.stdout = sys.stdout, sys.stderr
    with tempfile.TemporaryDirectory() as folder:
        peer = trainer(Path(checkpoint), folder, longest)
        optimiser = torch.optim.AdamW(peer.model.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=True)
        for number in map(int, rows):
            step(peer, optimiser, batch[:number], number)  # warm up
            seconds = []
            for _ in range(int(repeats)):
                began = time.process_time()
                step(peer, optimiser, batch, number)
                seconds.append(time.process_time() - began)
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(json.dumps({"rows": number, "seconds": seconds, "memory_mib": memory}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
