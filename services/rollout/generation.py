"""What one call of the engine returned, read from the JSON of SGLang's `/generate` and checked. Pure.

N sampled tokens, R routing rows, L MoE layers, K experts per token.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

ROUNDING = 1e-4  # a log-probability may lie so far above 0; further above, it is not of what was sampled


class BadReply(ValueError):
    """The engine answered with something that cannot be recorded exactly; the text says what."""


@dataclass(frozen=True, slots=True)
class Generation:
    """`tokens` are as sampled, the stop token included. `experts_RLK`: the rows of prompt + tokens from the first one
    asked for to the last but one token (the last has none); None for a dense model. `finish`: stop | length | abort."""

    tokens: list[int]
    logprobs_N: np.ndarray  # float32, under the sampling temperature
    versions_N: np.ndarray  # int32, the serial that sampled each token
    oldest_kv_version: int
    experts_RLK: np.ndarray | None = None
    finish: str = "stop"
    cached_tokens: int = 0
    cache_key: str | None = None  # what its cache entries are kept under; None: the engine does not say

    def then(self, more: Generation) -> Generation:
        """Return this generation continued by `more`, which an engine sampled from exactly the tokens of this one. `more` has the
        routing rows from where this one's end, or all of them if this one has none."""
        rows = [rows for rows in (self.experts_RLK, more.experts_RLK) if rows is not None]
        return replace(
            more,
            tokens=[*self.tokens, *more.tokens],
            logprobs_N=np.concatenate([self.logprobs_N, more.logprobs_N]),
            versions_N=np.concatenate([self.versions_N, more.versions_N]),
            oldest_kv_version=min(self.oldest_kv_version, more.oldest_kv_version),
            experts_RLK=np.concatenate(rows) if rows else None,
            cached_tokens=self.cached_tokens,
        )

    def first(self, n: int, rows: int, finish: str) -> Generation:
        """Return its first `n` sampled tokens, and its first `rows` routing rows if it has any."""
        return replace(
            self,
            tokens=self.tokens[:n],
            logprobs_N=self.logprobs_N[:n],
            versions_N=self.versions_N[:n],
            experts_RLK=None if self.experts_RLK is None else self.experts_RLK[:rows],
            finish=finish,
        )

    @property
    def rows(self) -> int:
        """Return how many routing rows it has."""
        return 0 if self.experts_RLK is None else len(self.experts_RLK)


class _VersionSpan(msgspec.Struct):
    version: int | str
    start: int
    end: int


class _Meta(msgspec.Struct):
    output_token_logprobs: list[tuple[float | None, int, Any]]
    oldest_kv_version: int | None = None  # the engine alone knows what it read; a plain SGLang does not say
    weight_version: int | str | None = None
    weight_versions: list[_VersionSpan] | None = None
    routed_experts: str | None = None
    cached_tokens: int = 0
    extra_key: str | None = None
    finish_reason: dict[str, Any] | str | None = None


class _Reply(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] | None = None


_REPLY = msgspec.json.Decoder(_Reply)


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """How the engine's routing rows read: SGLang exports all layers, dense ones included; only the MoE layers are kept."""

    layers: int
    moe_layers: tuple[int, ...]
    top_k: int
    experts: int

    @staticmethod
    def of(config: dict[str, Any]) -> RoutingShape | None:
        """From a Hugging Face config.json (qwen3_moe, deepseek_v3); None for a dense model."""
        counts = ("num_experts", "num_local_experts", "n_routed_experts")  # the second is what transformers 5 writes
        experts = int(next((config[name] for name in counts if config.get(name)), 0))
        if experts == 0:
            return None
        layers = int(config["num_hidden_layers"])
        first = int(config.get("first_k_dense_replace", 0))
        dense = set(config.get("mlp_only_layers") or ())
        step = int(config.get("decoder_sparse_step") or 1)  # qwen3_moe: layer i is sparse where (i + 1) % step == 0
        every = int(config.get("moe_layer_freq") or 1)  # deepseek_v3: where i % freq == 0
        moe = [i for i in range(layers) if i >= first and i not in dense and (i + 1) % step == 0 and i % every == 0]
        return RoutingShape(
            layers=layers, moe_layers=tuple(moe), top_k=int(config["num_experts_per_tok"]), experts=experts
        )

    def read(self, encoded: str, rows: int) -> np.ndarray:
        """base64 of int32 [rows, layers or MoE layers, K] to uint8|uint16 [rows, L, K]. Raises BadReply."""
        try:
            flat = np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
        except (binascii.Error, ValueError) as error:
            raise BadReply(f"/generate: routed_experts: {error}") from None
        for layers in (len(self.moe_layers), self.layers):
            if flat.size == rows * layers * self.top_k:
                experts_RLK = flat.reshape(rows, layers, self.top_k)
                break
        else:
            raise BadReply(
                f"/generate: routed_experts has {flat.size} values; expected {rows} rows x "
                f"{len(self.moe_layers)} or {self.layers} layers x {self.top_k} experts"
            )
        if layers != len(self.moe_layers):
            experts_RLK = experts_RLK[:, list(self.moe_layers)]
        if experts_RLK.size and not 0 <= experts_RLK.min() <= experts_RLK.max() < self.experts:
            raise BadReply(f"/generate: routed_experts outside of [0, {self.experts})")
        return experts_RLK.astype(np.uint8 if self.experts <= 256 else np.uint16)


def parse(
    data: bytes, *, prompt_tokens: int, first_row: int, routing: RoutingShape | None, versioned: bool = True
) -> Generation:
    """Read a reply to a request with `prompt_tokens` input ids and `routed_experts_start_len=first_row`.

    `versioned`: True: a missing or non-numeric version raises BadReply. False, for plain SGLang: it is recorded as 0. Raises
    BadReply where a token lacks its log-probability or is left out of `weight_versions`, or the routing does not fit the sequence.
    """
    try:
        reply = _REPLY.decode(data)
    except msgspec.DecodeError as error:
        raise BadReply(f"/generate: {error}") from None
    meta = reply.meta_info
    tokens = [token for _, token, _ in meta.output_token_logprobs]
    if reply.output_ids is not None and reply.output_ids != tokens:
        raise BadReply(
            f"/generate: the {len(reply.output_ids)} output_ids differ from the {len(tokens)} with log-probabilities"
        )
    logprobs_N = np.array([np.nan if p is None else p for p, _, _ in meta.output_token_logprobs], dtype=np.float32)
    if not np.isfinite(logprobs_N).all():
        raise BadReply("/generate: a sampled token without a finite log-probability")
    if (logprobs_N > ROUNDING).any():
        raise BadReply(f"/generate: found a log-probability of {logprobs_N.max():.3g}; allowed: at most 0")
    if meta.oldest_kv_version is None and versioned:
        raise BadReply("/generate: found no oldest_kv_version; allowed: the serial of the oldest version that was read")
    versions_N = _versions(meta, len(tokens), versioned)
    experts_RLK = None
    if routing is not None and tokens:
        if meta.routed_experts is None:
            raise BadReply(
                "/generate: no routed_experts, yet the model has experts; start the engine with their export on"
            )
        experts_RLK = routing.read(meta.routed_experts, prompt_tokens + len(tokens) - 1 - first_row)
    finish = meta.finish_reason.get("type", "") if isinstance(meta.finish_reason, dict) else (meta.finish_reason or "")
    return Generation(
        tokens=tokens,
        logprobs_N=np.minimum(logprobs_N, np.float32(0)),  # rounding may leave +1e-8 at probability one
        versions_N=versions_N,
        oldest_kv_version=meta.oldest_kv_version or 0,
        experts_RLK=experts_RLK,
        finish=finish,
        cached_tokens=meta.cached_tokens,
        cache_key=meta.extra_key,
    )


def _serial(version: int | str | None, versioned: bool) -> int:
    try:
        return int(version)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        if not versioned:
            return 0
        raise BadReply(f"/generate: weight version {version!r}; expected the serial of a published version") from None


def _versions(meta: _Meta, n: int, versioned: bool) -> np.ndarray:
    if not meta.weight_versions:
        return np.full(n, _serial(meta.weight_version, versioned), dtype=np.int32)
    versions_N = np.full(n, -1, dtype=np.int32)
    for span in meta.weight_versions:
        versions_N[span.start : span.end] = _serial(span.version, versioned)
    if (versions_N < 0).any():
        raise BadReply(f"/generate: weight_versions do not cover the {n} sampled tokens")
    return versions_N
