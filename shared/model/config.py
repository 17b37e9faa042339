"""The shape of a model, read from a Hugging Face `config.json`.

Field names are Hugging Face's, so that a reader of one knows the other. `model_type` names a family, and the family's own
file (`shared.model.families`) reads the rest: it refuses by name every field that would make the model compute otherwise
than here. Everything else in the project looks at the facts below and never at the name of the family.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.model.fields import Fields, UnknownModel

__all__ = ["Drafting", "Fields", "Mla", "ModelConfig", "Moe", "Rope", "Serving", "UnknownModel", "yarn_mscale"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. `kind` says how positions are stretched by `factor`:

    default  not at all
    linear   every rotation alike
    yarn     slow rotations only, with a ramp between `beta_slow` and `beta_fast` rotations over `original_positions`;
             `truncate`: the ends of the ramp are whole dimensions. `attention_factor`: what cos and sin are multiplied
             by, None where it follows from `factor` and the mscale pair
    llama3   slow rotations only, with a ramp between `low_freq_factor` and `high_freq_factor` rotations
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    interleaved: bool = False  # pairs are (2i, 2i+1) instead of (i, i + D/2): DeepSeek


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention: keys and values come from one small latent per token."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts. `scoring` softmax (Qwen) or sigmoid with a correction bias and group limit (DeepSeek)."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    scoring: str  # softmax | sigmoid
    norm_topk_prob: bool
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    n_shared_experts: int = 0


@dataclass(frozen=True, slots=True)
class Drafting:
    """How SGLang names an MTP layer. `live`: its modules for our enorm, hnorm, eh_proj and shared_head.norm. `decoder`: its
    decoder layer. `files`: prefixes in the files that SGLang loads, in the same order, then the decoder layer's; None:
    the published names."""

    live: tuple[str, str, str, str]
    decoder: str
    files: tuple[str, str, str, str, str] | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    """What SGLang does otherwise for one family. `model_type`: the name under which SGLang loads it, None: its own.
    `ties_head`: False where SGLang always holds a head of its own. `drafting`: None where it cannot draft."""

    model_type: str | None = None
    ties_head: bool = True
    drafting: Drafting | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`head_dim` is the size of a query/key head, `v_head_dim` of a value head; they differ only under MLA. `qk_norm`: RMS
    norm of every query and key head. `qkv_bias`: biases of the query, key and value projections."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float
    rope: Rope
    architecture: str  # the class in transformers
    qk_norm: bool = False
    qkv_bias: bool = False
    mla: Mla | None = None
    moe: Moe | None = None
    moe_layers: tuple[int, ...] = ()  # which of the num_hidden_layers are MoE; MTP layers are like the last one
    num_mtp_layers: int = 0
    serving: Serving = Serving()
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # config.json as it was read

    @staticmethod
    def load(directory: Path | str) -> ModelConfig:
        path = Path(directory) / "config.json"
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise UnknownModel("no config.json; expected a Hugging Face checkpoint directory", path.parent) from None
        except OSError as error:
            raise UnknownModel(f"cannot be read ({error.strerror})", path) from None
        except (ValueError, RecursionError) as error:
            raise UnknownModel(f"not JSON ({error})", path) from None
        return ModelConfig.from_dict(raw)

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> ModelConfig:
        """Raises UnknownModel for what cannot be represented, naming the field."""
        from shared.model.families import family

        if not isinstance(raw, dict):
            raise UnknownModel(f"config.json: found {type(raw).__name__}; allowed: a JSON object")
        found = family(raw.get("model_type"))
        return found.read(Fields(raw, f" (model_type {found.name})"))

    def to_dict(self) -> dict[str, Any]:
        """What goes into config.json: what was read, plus what loaders look for."""
        return {**self.raw, "model_type": self.model_type, "architectures": [self.architecture]}

    @property
    def num_moe_layers(self) -> int:
        """L of `experts_NLK`: the MoE layers of the trunk."""
        return len(self.moe_layers)

    @property
    def num_experts_per_tok(self) -> int:
        return self.moe.num_experts_per_tok if self.moe else 0

    @property
    def attention_scale(self) -> float:
        """What q·k is multiplied by; with YaRN and mscale_all_dim DeepSeek sharpens it, Qwen does not."""
        scale = self.head_dim**-0.5
        if self.mla and self.rope.kind == "yarn" and self.rope.factor > 1 and self.rope.mscale_all_dim:
            scale *= yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) ** 2
        return scale


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
