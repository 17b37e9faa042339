"""The policies that benchmarks train and serve, and real AdamW steps of them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from shared.model import ModelConfig, Transformer, causal_rows, load_checkpoint, published_tensors
from shared.weights.torch_tensors import to_bits

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "etude" / "data" / "base"  # of the demo
SMOLLM = ROOT / ".cache" / "smollm"  # SmolLM2-135M-Instruct; made by `make smollm`
DEMO_SHAPE = {
    "model_type": "qwen3_moe", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 192, "norm_topk_prob": True, "tie_word_embeddings": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
THIRTY_MILLION = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 8192, "hidden_size": 512,
    "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 512, "initializer_range": 0.02, "hidden_act": "silu", "attention_bias": False,
    "dtype": "bfloat16",
}  # fmt: skip
Tensors = dict[str, np.ndarray]
ROWS, LENGTH = 16, 128


def is_here(checkpoint: Path) -> bool:
    return (checkpoint / "model.safetensors").exists()


def start() -> Transformer:
    """Return the demo's base policy; where it is absent, a random one of the same shape."""
    return load_checkpoint(BASE) if is_here(BASE) else random_policy(DEMO_SHAPE)


def random_policy(shape: dict[str, object]) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig.from_dict(shape))


def tokens(vocab: int, checkpoint: Path = BASE) -> torch.Tensor:
    """Return source of the standard library: by the checkpoint's tokenizer, or byte by byte."""
    text = "".join(inspect.getsource(module) for module in (inspect, textwrap))
    if (checkpoint / "tokenizer.json").exists():
        return torch.tensor(Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids)
    return torch.tensor(list(text.encode())) % vocab


def adamw_steps(rate: float, model: Transformer | None = None, data: torch.Tensor | None = None) -> Iterator[Tensors]:
    """Yield the published bits after every step, the start first. Without `model`: the demo's base policy."""
    model = start() if model is None else model
    data = tokens(model.config.vocab_size) if data is None else data
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    rng = np.random.default_rng(0)
    positions = torch.arange(LENGTH).repeat(ROWS)
    attend = causal_rows(ROWS, LENGTH)
    while True:
        yield to_bits(published_tensors(model))
        starts = rng.integers(0, len(data) - LENGTH - 1, ROWS)
        x = torch.cat([data[s : s + LENGTH] for s in starts])
        y = torch.cat([data[s + 1 : s + LENGTH + 1] for s in starts])
        optimiser.zero_grad()
        F.cross_entropy(model.logits(model(x, positions, attend).hidden_ND), y).backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimiser.step()
