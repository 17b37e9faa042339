"""`etude plan train`: memory and communication of one rank of the trainer, reckoned from config.json. Pure arithmetic.

D: hidden size, H and G: query and key-value heads, d: size of a head, I: intermediate size, E experts of which a token uses K,
V: words of the vocabulary, N: tokens of a micro-batch.

What it models is services/trainer: float32 masters with AdamW; while a step computes, a copy of the weights as they are published;
gradients in float32. All ranks hold all dense weights; `expert` ranks divide the experts. Activations are those that autograd keeps
for the backward (tests/unit/etude/test_plan_train.py counts them). Where a CPU has no fused attention (a value head of another size
than a key head: MLA), the scores are kept too; a CUDA device is assumed to have one.

Not in it: fragments of the allocator, buckets of DeepSpeed's reductions, and the second copy of an expert's rows under imbalance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shared.model import ModelConfig

FLOAT, BF16 = 4, 2  # bytes
ROWS = 1024  # rows of logits that the loss holds at a time (services/trainer/loss.py)
PART = 256 << 20  # bytes of a version that are encoded at a time (shared/weights/store.py)
GIB = 1 << 30


class Parameters(NamedTuple):
    """`dense`: what every rank holds, MTP layers too. `experts`: of all layers. `head`: the output head, whose gradient is there
    first. `used`: what one token meets."""

    dense: int
    experts: int
    head: int
    used: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True, slots=True)
class Ranks:
    """`world` ranks: world / context data parts of `context` ranks each, which share a sequence. Apart from that, `expert` ranks
    divide the experts, so that world / expert ranks hold the same ones. Raises ValueError naming the option."""

    world: int = 1
    context: int = 1
    expert: int = 1
    zero: int = 0

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ValueError(f"--ranks: found {self.world}; allowed: 1 or more")
        for name in ("context", "expert"):
            if getattr(self, name) < 1 or self.world % getattr(self, name):
                allowed = ", ".join(str(n) for n in range(1, self.world + 1) if self.world % n == 0)
                raise ValueError(f"--{name}: found {getattr(self, name)} of {self.world} ranks; allowed: {allowed}")
        if self.zero not in (0, 1, 2):
            raise ValueError(f"--zero: found {self.zero}; allowed: 0, 1, 2")


@dataclass(frozen=True, slots=True)
class Work:
    """`tokens`: of a micro-batch, over all ranks that share it; it is one sequence. `recompute`: activation checkpointing. `kl`: a
    reference policy is held. `fused`: attention keeps no scores even where value heads are of another size than key heads."""

    tokens: int = 4096
    recompute: bool = False
    kl: bool = False
    fused: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes of one rank. `device`: by what they are for, at the greatest moment. `host`: in main memory (on a CPU both are there).
    `sent`: over the network in a step of one micro-batch. `peak`: of the device; `moment`: when it is."""

    parameters: Parameters
    device: dict[str, float]
    host: dict[str, float]
    sent: dict[str, float] = field(default_factory=dict)
    moment: str = ""

    @property
    def peak(self) -> float:
        return sum(self.device.values())


def parameters(shape: ModelConfig) -> Parameters:
    """Count what `shared.model.Transformer` holds, buffers left out."""
    D, layers = shape.hidden_size, shape.num_hidden_layers
    mtp_moe = layers - 1 in shape.moe_layers
    moe_layers = len(shape.moe_layers) + (shape.num_mtp_layers if mtp_moe else 0)
    dense_layers = layers + shape.num_mtp_layers - moe_layers
    head = shape.vocab_size * D
    dense = (layers + shape.num_mtp_layers) * (
        _attention(shape) + 2 * D
    ) + dense_layers * 3 * D * shape.intermediate_size
    dense += head * (1 if shape.tie_word_embeddings else 2) + D
    dense += shape.num_mtp_layers * (3 * D + 2 * D * D)  # two norms before eh_proj, one after the layer
    experts = used = 0
    if shape.moe is not None:
        wide, E, shared = shape.moe.intermediate_size, shape.moe.num_experts, shape.moe.n_shared_experts
        dense += moe_layers * (E * D + 3 * D * wide * shared)
        experts = moe_layers * E * 3 * D * wide
        used = experts // E * shape.moe.num_experts_per_tok
    return Parameters(dense, experts, head, dense + used)


def _attention(shape: ModelConfig) -> int:
    D, H, G, d = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    if (m := shape.mla) is None:
        norms = 2 * d if shape.qk_norm else 0
        return D * (H + 2 * G) * d + H * d * D + norms + ((H + 2 * G) * d if shape.qkv_bias else 0)
    query = D * H * d if m.q_lora_rank is None else (D + 1 + H * d) * m.q_lora_rank
    latent = D * (m.kv_lora_rank + m.qk_rope_head_dim) + m.kv_lora_rank
    return query + latent + m.kv_lora_rank * H * (m.qk_nope_head_dim + m.v_head_dim) + H * m.v_head_dim * D


def kept(shape: ModelConfig, tokens: int, *, moe: bool, fused: bool) -> float:
    """Return the bytes for each token that one layer keeps for its backward. `tokens`: that the token may attend to."""
    D, H, d, dv = shape.hidden_size, shape.num_attention_heads, shape.head_dim, shape.v_head_dim
    floats = 2.0 * (3 * D + 1)  # of a norm: its input, the input normed, its output, the root mean square
    scores = 2 * H if fused or d == dv else H * tokens  # fused: a sum for each head; the result is kept
    if (m := shape.mla) is None:
        G = shape.num_key_value_heads
        floats += (H + 2 * G) * d + 2 * H * dv + H  # q, k, v; the result twice (by heads, by rows); log-sum-exp
        if shape.qk_norm:
            floats += (H + 2 * G) * d + (H + G) * (d + 1)
    else:
        floats += H * (2 * d + dv) + H * dv
        floats += H * dv + H if fused or d == dv else scores
        floats += 3 * m.q_lora_rank + 1 if m.q_lora_rank else 0
        floats += 3 * m.kv_lora_rank + m.qk_rope_head_dim + 1
    return FLOAT * (floats + _feed_forward(shape, moe))


def _feed_forward(shape: ModelConfig, moe: bool) -> float:
    """Floats for each token. gate and up, silu(gate), and its product with up; of experts K times, with the rows sent to them and
    their answers. Indices are int64."""
    if not moe or shape.moe is None:
        return 4 * shape.intermediate_size
    m, D = shape.moe, shape.hidden_size
    K, wide = m.num_experts_per_tok, m.intermediate_size
    router = (
        m.num_experts + (1 + K if m.norm_topk_prob else 0) + 7 * K
    )  # scores, weights, experts, order and its inverse
    return router + K * (2 * D + 4 * wide) + 4 * wide * m.n_shared_experts


def plan(shape: ModelConfig, ranks: Ranks = Ranks(), work: Work = Work()) -> Plan:
    """Raises ValueError if the ranks cannot divide the experts."""
    found = parameters(shape)
    E = shape.moe.num_experts if shape.moe else 0
    if ranks.expert > 1 and (not E or E % ranks.expert):
        raise ValueError(
            f"--expert: found {ranks.expert} for {E} experts; allowed: divisors of both {E} and {ranks.world}"
        )
    experts = found.experts / ranks.expert
    own = found.dense + experts
    device = _static(found, ranks, work, own)
    N = work.tokens / ranks.context
    held, layer = _activations(shape, N, work)
    # The forward of the loss holds two chunks of logits. Its backward holds one, and the gradient of the head. After that the last
    # layer is computed again (with `recompute`), and has gradients of its own. Other gradients come as activations go.
    chunk, start = FLOAT * min(ROWS, N) * shape.vocab_size, float(FLOAT * found.head)
    hidden = FLOAT * 3 * N * shape.hidden_size
    if chunk + max(chunk, start) >= layer + start:
        activations, loss, start = (
            held,
            hidden + (2 * chunk if chunk > start else chunk),
            start if chunk <= start else 0.0,
        )
    else:
        activations, loss = held + layer, hidden
    gradients = FLOAT * (found.dense / (ranks.world if ranks.zero == 2 else 1))
    gradients += FLOAT * experts / (ranks.world / ranks.expert if ranks.zero == 2 else 1)
    if activations + loss + start > gradients:
        moment = "as the backward begins"
        device |= {"activations": activations, "logits and hidden states of the loss": loss, "gradients": start}
    else:
        moment = "as the backward ends"
        device |= {"activations": 0.0, "logits and hidden states of the loss": 0.0, "gradients": gradients}
    if ranks.context > 1:
        device["keys and values of all ranks (one layer)"] = 2 * FLOAT * work.tokens * _keys_and_values(shape)
    host = {
        "versions: the bits published last, and the next": 2.0 * BF16 * own,
        "encoding one part of a version": 3.0 * min(PART, BF16 * own),
    }
    return Plan(found, device, host, _sent(shape, found, ranks, work), moment)


def _static(found: Parameters, ranks: Ranks, work: Work, own: float) -> dict[str, float]:
    moments = FLOAT * 2 * own
    masters = FLOAT * own
    if ranks.zero:
        share = found.dense / ranks.world + found.experts / ranks.world  # experts: expert ranks x their replicas
        masters += FLOAT * share  # the flat part that the rank steps, beside the weights
        moments = FLOAT * 2 * share
    result = {"masters": masters, "weights as published": FLOAT * own, "moments of AdamW": moments}
    if work.kl:
        result["reference policy"] = FLOAT * own
    return result


def _activations(shape: ModelConfig, N: float, work: Work) -> tuple[float, float]:
    """Bytes that are held when the forward is over, and what the backward of a layer adds: gradients of its feed-forward and, with
    `recompute`, the layer computed again. With `recompute` the forward keeps the input of each layer alone."""
    moe = set(shape.moe_layers)
    layers = [N * kept(shape, work.tokens, moe=i in moe, fused=work.fused) for i in range(shape.num_hidden_layers)]
    ends = N * FLOAT * (2 * shape.hidden_size + 1)  # the last norm: its input is kept by nothing else
    if work.tokens > N:  # a context rank keeps keys and values of all rows, and the mask of its own as numbers
        gathered = FLOAT * ((work.tokens - N) * _keys_and_values(shape) + N * work.tokens)
        layers = [one + gathered for one in layers]
        ends += N * work.tokens  # the mask, a byte each
    wide = shape.intermediate_size
    if shape.moe is not None:
        wide = max(wide, shape.moe.intermediate_size * (shape.moe.num_experts_per_tok + shape.moe.n_shared_experts))
    gradients = N * FLOAT * (3 * wide + 2 * shape.hidden_size)
    if not work.recompute:
        return sum(layers) + ends, gradients
    return N * FLOAT * shape.hidden_size * len(layers) + ends, max(layers) + gradients


def _keys_and_values(shape: ModelConfig) -> int:
    """Floats of a token's keys and values, as attention sees them (MLA: expanded to all heads)."""
    return shape.num_key_value_heads * (shape.head_dim + shape.v_head_dim)


def _sent(shape: ModelConfig, found: Parameters, ranks: Ranks, work: Work) -> dict[str, float]:
    """A reduction over n ranks sends 2 (n - 1) / n of what is reduced; a gather, or all-to-all, (n - 1) / n of it."""
    copies = ranks.world // ranks.expert
    around, among = (ranks.world - 1) / ranks.world, (copies - 1) / copies
    result: dict[str, float] = {}
    reduced = 2 * FLOAT * (found.dense * around + found.experts / ranks.expert * among)
    if ranks.world > 1:
        result["gradients, a step"] = reduced
    passes = 2 if work.recompute else 1
    N = work.tokens / ranks.context
    if ranks.context > 1:
        share = (ranks.context - 1) / ranks.context
        all_rows = FLOAT * work.tokens * _keys_and_values(shape) * shape.num_hidden_layers
        result["keys and values, a micro-batch"] = all_rows * share * (passes + 2)
    if ranks.expert > 1 and shape.moe:
        rows = FLOAT * N * shape.moe.num_experts_per_tok * shape.hidden_size * len(shape.moe_layers)
        result["rows to experts and back, a micro-batch"] = 2 * rows * (ranks.expert - 1) / ranks.expert * (passes + 1)
    return result
