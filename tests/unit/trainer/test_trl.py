"""The gradient of a step is TRL's, tensor by tensor, where both compute the same formula.

TRL: `GRPOTrainer` with loss_type "dr_grpo", advantages as they are, beta 0, no clipping in effect (ratio 1).
Ours: `norm_tokens` is TRL's `max_completion_length`. Both compute in float32 on the weights of one checkpoint.
`make trl` runs this file in an environment that has TRL.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.trainer.engine import StepResult
from services.trainer.packing import TrainSequence
from services.trainer.replay_step import GradientOnly
from services.trainer.step import Trainer
from shared.contracts.run import TrainConfig
from shared.model import Transformer, causal_rows, load_checkpoint, published_tensors

if os.environ.get("ETUDE_TEST_TRL") != "require":
    pytest.importorskip("trl", reason="TRL is not here; make trl")

VOCABULARY, LONGEST = 61, 24
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


class Kept(GradientOnly):
    """Leaves the gradient of the step where it was added up."""

    def step(self, step: int, progress: float = 0.0) -> StepResult:
        return StepResult(0.0, 0.0, applied=False, mtp_applied=False)


def theirs(family: str, folder: Path) -> Any:
    """Return a GRPOTrainer of a random policy whose weights are values of bfloat16. Its checkpoint lies in `folder`."""
    import transformers
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    shape = getattr(transformers, f"{family}Config")(**SIZES)
    kind = getattr(transformers, f"{family}ForCausalLM")
    kind(shape).to(torch.bfloat16).save_pretrained(folder)
    words = {"<pad>": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")), pad_token="<pad>", eos_token="w2"
    )
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
        max_completion_length=LONGEST,
        num_generations=4,
        per_device_train_batch_size=8,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        temperature=1.0,
    )
    return GRPOTrainer(
        model=kind.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "w3 w4"}] * 8),
        processing_class=tokenizer,
    )


def drawn(rng: np.random.Generator, groups: int = 2, attempts: int = 4) -> list[TrainSequence]:
    """Groups whose completions differ in length; some tokens were observed, not sampled."""
    found = []
    for number in range(groups):
        prompt = rng.integers(1, VOCABULARY, int(rng.integers(3, 20)))
        for _ in range(attempts):
            length = int(rng.integers(1, LONGEST + 1))
            sampled = rng.random(length) < 0.8
            sampled[0] = True
            whole = len(prompt) + length
            found.append(
                TrainSequence(
                    group=number,
                    tokens_T=np.concatenate((prompt, rng.integers(1, VOCABULARY, length))).astype(np.int32),
                    sampled_T=np.concatenate((np.zeros(len(prompt), bool), sampled)),
                    logprobs_T=np.zeros(whole, np.float32),
                    versions_T=np.zeros(whole, np.int32),
                    advantages_T=np.full(whole, rng.normal(), np.float32),
                    temperature=1.0,
                    experts_TLK=None,
                )
            )
    return found


def padded(sequences: list[TrainSequence]) -> dict[str, Tensor]:
    """Return the batch as TRL holds it: prompts padded on the left, completions on the right, observed tokens in `tool_mask`."""
    starts = [int(np.argmax(s.sampled_T)) for s in sequences]
    longest = max(starts)
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    completion = torch.zeros(len(sequences), LONGEST, dtype=torch.long)
    completion_mask, tool_mask = torch.zeros_like(completion), torch.zeros_like(completion)
    for i, (s, start) in enumerate(zip(sequences, starts, strict=True)):
        length = len(s.tokens_T) - start
        ids[i, longest - start :] = torch.tensor(s.tokens_T[:start])
        mask[i, longest - start :] = 1
        completion[i, :length] = torch.tensor(s.tokens_T[start:])
        completion_mask[i, :length] = 1
        tool_mask[i, :length] = torch.tensor(s.sampled_T[start:]).long()
    return {
        "prompt_ids": ids,
        "prompt_mask": mask,
        "completion_ids": completion,
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": torch.tensor([float(s.advantages_T[-1]) for s in sequences]),
    }


def with_logprobs_of(model: Transformer, sequences: list[TrainSequence]) -> list[TrainSequence]:
    """Return the sequences as this policy would have sampled them: the ratio of every token is 1."""
    found = []
    for s in sequences:
        tokens = torch.tensor(s.tokens_T, dtype=torch.long)
        with torch.no_grad():
            out = model(tokens, torch.arange(len(tokens)), causal_rows(1, len(tokens)))
            logits = model.logits(out.hidden_ND)
        logprobs = torch.log_softmax(logits[:-1].float(), -1).gather(1, tokens[1:, None])[:, 0]
        found.append(replace(s, logprobs_T=np.concatenate(([0.0], logprobs.numpy())).astype(np.float32)))
    return found


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
@pytest.mark.parametrize("share", [True, False])
def test_the_gradient_is_that_of_grpo_trainer(family: str, share: bool, tmp_path: Path) -> None:
    peer = theirs(family, tmp_path)
    ours = load_checkpoint(tmp_path, dtype=torch.float32)
    sequences = with_logprobs_of(ours, drawn(np.random.default_rng(1)))

    peer.current_gradient_accumulation_steps = 1
    peer.model.train()
    peer._compute_loss(peer.model, padded(sequences)).backward()
    expected = {name: p.grad for name, p in peer.model.named_parameters() if p.grad is not None}

    config = TrainConfig(norm_tokens=float(LONGEST), mtp=False, router_replay=False)
    Trainer(Kept(ours, config), config, share_prefixes=share).train(sequences, len(sequences), step=1)
    with torch.no_grad():
        for p in ours.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    found = {name: tensor for name, tensor in published_tensors(ours).items() if name in expected}

    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = float((found[name] - gradient).norm() / gradient.norm())
        assert difference <= 1e-5, (name, difference)
