"""A tiny chat checkpoint with a byte-level tokenizer, a corpus and a configuration for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.trainer.phases.config import Phase, PhaseConfig, read
from services.trainer.phases.corpus import encoded, marks_of
from services.trainer.phases.shards import checksum, write
from shared.model import ModelConfig, Transformer, save_checkpoint
from shared.renderers.vocabulary import Vocabulary

SHAPE = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "initializer_range": 0.2,
}
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
TEXTS = [f"def f{i}(x):\n    return x * {i} + {i * i}\n" * (1 + i % 3) for i in range(12)]


def checkpoint(folder: Path, **shape: Any) -> Path:
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "etude.json").write_text(json.dumps({"format": "chatml", "calls": "hermes", "context": 2048}))
    torch.manual_seed(0)
    save_checkpoint(Transformer(ModelConfig.from_dict({**SHAPE, **shape})), folder)
    return folder


def tokens(folder: Path, start: Path, texts: list[str], shard_tokens: int = 300) -> Path:
    folder.mkdir(parents=True)
    vocabulary = Vocabulary.load(start)
    marks = marks_of(start, vocabulary, "", "")
    write(
        folder,
        ((encoded(text, vocabulary, marks), len(text.encode())) for text in texts),
        tokenizer=checksum(start / "tokenizer.json"),
        vocab_size=vocabulary.size,
        begin="",
        end=marks.end_text,
        shard_tokens=shard_tokens,
    )
    return folder


def configured(folder: Path, phase: Phase, text: str, name: str = "phase.toml") -> PhaseConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return read(folder / name, phase)


PRETRAIN = """
checkpoint = "start"
out = "{out}"
seed = 3
[data]
tokens = ["corpus"]
held_out = ["other"]
length = 48
[train]
tokens = 900
step_tokens = 120
micro_batch_tokens = 100
learning_rate = 3e-3
mtp_learning_rate = 1e-2
warmup_steps = 2
checkpoint_every = 2
[measure]
window = 48
stride = 24
"""


def pretraining(folder: Path, out: str = "made", phase: Phase = "cpt", more: str = "") -> PhaseConfig:
    """Return a configuration in `folder`, with its checkpoint and corpora made."""
    if not (folder / "start").exists():
        start = checkpoint(folder / "start")
        tokens(folder / "corpus", start, TEXTS)
        tokens(folder / "other", start, ["class Other:\n    pass\n" * 4, "x = 1\n" * 9])
    return configured(folder, phase, PRETRAIN.format(out=out) + more)
