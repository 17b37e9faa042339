"""The policy: one readable decoder-only transformer, of the families in `families`.

Llama, Qwen2, Qwen3 (dense), Qwen3-MoE, DeepSeek-V3 and Kimi K2 (MLA, sigmoid router with correction bias, shared experts),
each with optional MTP layers. Reads and writes Hugging Face checkpoints under their published names (`checkpoint`).

Invariants:
- Token-flat: every module sees N tokens of any sequences. Which token may look at which lives only in `attend`, a
  function that the caller passes: packed rows for training, a KV cache for serving, shared prefixes.
- Routed experts can be taken out (`Output.experts_NLK`) and put back (`Replay`), with live gate scores.
- Every published tensor is a contiguous view of a parameter, so loading and publishing never reshuffle memory.

Shapes: N tokens, H heads, G key-value heads, Dk/Dv head sizes, E experts, K experts per token, L MoE layers, V words.
"""

from shared.model.attention import Attend, causal_rows
from shared.model.checkpoint import load_checkpoint, published_tensors, save_checkpoint
from shared.model.config import ModelConfig, UnknownModel
from shared.model.moe import Replay, load_balancing_loss
from shared.model.network import Output, Transformer
from shared.model.rounding import published

__all__ = [
    "Attend",
    "ModelConfig",
    "Output",
    "Replay",
    "Transformer",
    "UnknownModel",
    "causal_rows",
    "load_balancing_loss",
    "load_checkpoint",
    "published",
    "published_tensors",
    "save_checkpoint",
]
