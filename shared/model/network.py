"""The transformer: embedding, layers, final norm, head, MTP layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared.model.attention import Attend, GroupedQueryAttention, LatentAttention, RmsNorm, Rotary, Rotation
from shared.model.config import ModelConfig
from shared.model.moe import LayerReplay, MixtureOfExperts, Mlp, Replay, Routing
from shared.model.mtp import MtpLayer
from shared.weights.low_precision import Format


@dataclass(slots=True)
class Output:
    """hidden_ND: after the final norm, the head's input. residual_ND: before it, what `mtp` takes. experts_NLK: int64,
    the experts that were used. replaced: share of replayed experts that the plausibility filter replaced.
    router_logits: [N, E] per MoE layer, with graph."""

    hidden_ND: Tensor
    residual_ND: Tensor
    experts_NLK: Tensor
    router_logits: list[Tensor]
    _replaced: Tensor | int
    _replayed: Tensor | int

    @property
    def replaced(self) -> float:
        return float(self._replaced) / max(float(self._replayed), 1.0)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, *, moe: bool) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config) if config.mla else GroupedQueryAttention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.is_moe = moe
        self.mlp = MixtureOfExperts(config) if moe else Mlp(config.hidden_size, config.intermediate_size)

    def forward(
        self, index: int, x_ND: Tensor, rotation: Rotation, attend: Attend, replay: LayerReplay | None = None
    ) -> tuple[Tensor, Routing | None]:
        x_ND = x_ND + self.self_attn(index, self.input_layernorm(x_ND), rotation, attend)
        normed = self.post_attention_layernorm(x_ND)
        if isinstance(self.mlp, MixtureOfExperts):
            out, routing = self.mlp(normed, replay)
            return x_ND + out, routing
        return x_ND + self.mlp(normed), None


class Transformer(nn.Module):
    """`model(tokens_N, positions_N, attend, replay)`: see the package docstring. Starts with random weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.emulates: Format | None = None  # shared.model.fp8
        self.recomputes = (
            False  # activation checkpointing: a layer keeps its input alone, and computes the rest again in backward
        )
        moe = set(config.moe_layers)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, moe=i in moe) for i in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        like_last = config.num_hidden_layers - 1 in moe
        self.mtp_layers = nn.ModuleList(
            MtpLayer(config, DecoderLayer(config, moe=like_last)) for _ in range(config.num_mtp_layers)
        )
        self.rotary = Rotary(config.rope, config.mla.qk_rope_head_dim if config.mla else config.head_dim)
        self.initialise()

    def initialise(self) -> None:
        """Normal(0, initializer_range) for matrices; those that write into the residual are scaled by 1/sqrt(2 layers). Biases
        start at 0."""
        std = self.config.initializer_range
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight", "mlp.down"))
                nn.init.normal_(parameter, std=std / (2 * len(self.layers)) ** 0.5 if into_residual else std)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, replay: Replay | None = None) -> Output:
        rotation = self.rotary(positions_N)
        x_ND = self.embed_tokens(tokens_N)
        experts: list[Tensor] = []
        logits: list[Tensor] = []
        replaced: Tensor | int = 0
        for index, layer in enumerate(self.layers):
            recorded = None
            if replay is not None and layer.is_moe:
                recorded = LayerReplay(replay.experts_NLK[:, len(experts)], replay.valid_N, replay.tau)
            if self.recomputes and torch.is_grad_enabled():
                x_ND, routing = checkpoint(layer, index, x_ND, rotation, attend, recorded, use_reentrant=False)
            else:
                x_ND, routing = layer(index, x_ND, rotation, attend, recorded)
            if routing is not None:
                experts.append(routing.experts_NK)
                logits.append(routing.logits_NE)
                replaced = replaced + routing.replaced
        K = self.config.num_experts_per_tok
        return Output(
            hidden_ND=self.norm(x_ND),
            residual_ND=x_ND,
            experts_NLK=torch.stack(experts, 1) if experts else tokens_N.new_empty(len(tokens_N), 0, K),
            router_logits=logits,
            _replaced=replaced,
            _replayed=replay.valid_N.sum() * len(experts) * K if replay else 0,
        )

    def head(self) -> Tensor:
        """[V, D]"""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return F.linear(hidden_ND, self.head())

    def mtp(
        self, residual_ND: Tensor, next_tokens_N: Tensor, positions_N: Tensor, attend: Attend, depth: int = 0
    ) -> Tensor:
        """Hidden states whose `mtp_logits` predict x_{t+2}, from h_t and the embedding of x_{t+1}.

        `residual_ND` is `Output.residual_ND` for depth 0, the result of depth d - 1 after it. Trunk, embedding and
        final norm are detached: MTP follows the policy and never moves it (recipe, "Continued pretraining, SFT, MTP").
        The serving engines feed an MTP layer with the hidden state after the final norm; so does this.
        """
        hidden = residual_ND.detach() if depth == 0 else residual_ND
        if depth == 0:
            hidden = F.rms_norm(hidden, self.norm.weight.shape, self.norm.weight.detach(), self.norm.eps)
        embedded = F.embedding(next_tokens_N, self.embed_tokens.weight.detach())
        index = self.config.num_hidden_layers + depth
        return self.mtp_layers[depth](index, embedded, hidden, self.rotary(positions_N), attend)

    def mtp_logits(self, mtp_hidden_ND: Tensor) -> Tensor:
        """As `logits`, with the shared head detached."""
        return F.linear(mtp_hidden_ND, self.head().detach())
