"""What goes over the wire, in SGLang's words: requests are read and refused, results are written.

Errors name the field, what was found and what is allowed.
"""

from __future__ import annotations

import base64
import itertools
import math
from typing import Any, TypeVar

import msgspec
import numpy as np

from services.inference.request import Result
from shared.chat.refusing import BIASED, NESTED, NEUTRAL, BadRequest, refuse_others, refuse_slips, refuse_unknown
from shared.model import ModelConfig

# SGLang's fields beside the sampling parameters that change what is answered, or what is sampled from, and the values that do not.
PLAIN: dict[str, tuple[Any, ...]] = {
    "text": (None, ""),
    "input_embeds": (None, []),
    "image_data": (None, []),
    "video_data": (None, []),
    "audio_data": (None, []),
    "logprob_start_len": (-1, None),
    "top_logprobs_num": (0, None),
    "token_ids_logprob": (None, []),
    "return_sampling_mask": (False, None),
    "return_hidden_states": (False, None),
    "return_entropy": (False, None),
    "return_prompt_token_ids": (False, None),
    "return_indexer_topk": (False, None),
    "session_params": (None, {}),
    "lora_path": (None, ""),
    "lora_id": (None, ""),
    "custom_logit_processor": (None, ""),
    "positional_embed_overrides": (None,),
    "max_thinking_tokens": (None,),
    "background": (False, None),
}
# Of a load of weights: what there is no other way to do.
PLAIN_LOAD: dict[str, tuple[Any, ...]] = {
    "load_format": (None, "auto", "safetensors"),
    "abort_all_requests": (False, None),
    "is_async": (False, None),
    "torch_empty_cache": (False, None),
    "keep_pause": (False, None),
    "recapture_cuda_graph": (False, None),
    "token_step": (0, None),
    "manifest": (None, {}),
}
# What clients of SGLang send along, and has no part in which tokens are sampled: of the text, of which there is none, and of
# how often a stream tells.
HARMLESS = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"})


class Conflict(BadRequest):
    """Well asked, and not to be had from this replica as it is used."""

    status = 409


class Unavailable(RuntimeError):
    """Not now; asking again later or elsewhere can help."""


class SamplingParams(msgspec.Struct, kw_only=True):
    temperature: float = 1.0
    max_new_tokens: int = 128
    stop_token_ids: list[int] | None = None
    sampling_seed: int | None = None
    ignore_eos: bool = True  # there is no implicit stop token: only stop_token_ids end a generation


class GenerateRequest(msgspec.Struct, kw_only=True):
    input_ids: list[int]
    sampling_params: msgspec.Raw = msgspec.Raw(b"{}")
    rid: str | None = None
    return_logprob: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    extra_key: str | None = None
    stream: bool = False
    # With `stream`: an event at most so often, in seconds, each with only what is new (docs/inference.md). 0: one for each token.
    told_every_s: float = 0.0


class AbortRequest(msgspec.Struct, kw_only=True):
    rid: str = ""
    abort_all: bool = False


class PauseRequest(msgspec.Struct, kw_only=True):
    mode: str = "abort"


class CheckerRequest(msgspec.Struct, kw_only=True):
    action: str = "checksum"


class PinRequest(msgspec.Struct, kw_only=True):
    serial: int


class UpdateRequest(msgspec.Struct, kw_only=True):
    model_path: str
    weight_version: str | int | None = None
    flush_cache: bool | None = None


D = TypeVar("D")

_GENERATE = msgspec.json.Decoder(GenerateRequest)
_SAMPLING = msgspec.json.Decoder(SamplingParams)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SERVED = SamplingParams.__struct_fields__


def parse_generate(body: bytes) -> tuple[GenerateRequest, SamplingParams]:
    """Raises BadRequest."""
    try:
        request, top = _GENERATE.decode(body), _FIELDS.decode(body)
        if misplaced := next((name for name in top if name in _SERVED or name in NEUTRAL), None):
            raise BadRequest(f"{misplaced}: found beside sampling_params; allowed: in sampling_params")
        refuse_slips(top, {*GenerateRequest.__struct_fields__, *PLAIN})
        refuse_others({name: msgspec.json.decode(top[name]) for name in PLAIN if name in top}, PLAIN)
        fields = msgspec.json.decode(request.sampling_params)
        if not isinstance(fields, dict):
            raise BadRequest(f"sampling_params: found {fields!r}; allowed: an object")
        refuse_others(fields, NEUTRAL, where="sampling_params.", why=BIASED)
        refuse_unknown(fields, _SERVED, {*NEUTRAL, *HARMLESS}, where="sampling_params.")
        sampling = _SAMPLING.decode(request.sampling_params)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"request body: {error}") from None
    except RecursionError:
        raise BadRequest(NESTED) from None
    if not (math.isfinite(sampling.temperature) and 0 <= sampling.temperature <= 100):
        raise BadRequest(f"sampling_params.temperature: found {sampling.temperature!r}; allowed: 0..100")
    if sampling.max_new_tokens < 1:
        raise BadRequest(f"sampling_params.max_new_tokens: found {sampling.max_new_tokens}; allowed: 1 and more")
    if request.return_routed_experts and not 0 <= request.routed_experts_start_len <= len(request.input_ids):
        raise BadRequest(
            f"routed_experts_start_len: found {request.routed_experts_start_len}; allowed: 0..{len(request.input_ids)}"
        )
    if not 0 <= request.told_every_s <= 3600:
        raise BadRequest(f"told_every_s: found {request.told_every_s!r}; allowed: 0..3600")
    return request, sampling


def parse_update(body: bytes) -> UpdateRequest:
    """Raises BadRequest."""
    asked, fields = decode(UpdateRequest, body), decode(dict, body)
    refuse_others(fields, PLAIN_LOAD)
    refuse_unknown(fields, UpdateRequest.__struct_fields__, PLAIN_LOAD, where="")
    return asked


def version_spans(versions_C: np.ndarray) -> list[dict[str, Any]]:
    """Runs of equal versions over the sampled tokens: [{version, start, end}]. SGLang writes versions as text."""
    if not len(versions_C):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(versions_C)) + 1).tolist(), len(versions_C)]
    return [{"version": str(versions_C[a]), "start": a, "end": b} for a, b in itertools.pairwise(cuts)]


def encode_routing(routing: np.ndarray, config: ModelConfig) -> str:
    """base64 of int32 [rows, num_hidden_layers, K], C order, as SGLang exports it: dense layers stand in as zeros."""
    full = routing.astype(np.int32)
    if config.num_moe_layers < config.num_hidden_layers:
        full = np.zeros((len(routing), config.num_hidden_layers, config.num_experts_per_tok), np.int32)
        full[:, list(config.moe_layers)] = routing
    return base64.b64encode(np.ascontiguousarray(full)).decode()


def key_of(asked: GenerateRequest, serial: int) -> str:
    """What its cache entries are kept under: what it says, else a name of the version that serves now."""
    return asked.extra_key if asked.extra_key is not None else f"@{serial}"


def answer(rid: str, key: str, result: Result, config: ModelConfig, *, logprobs: bool) -> dict[str, Any]:
    """The body of /generate. `key`: as of `key_of`. `text` is empty: token ids are the only truth here, no text is ever
    tokenised again."""
    finish: dict[str, Any] = {"type": result.finish.type}
    if result.finish.type == "stop":
        finish["matched"] = result.finish.matched
    elif result.finish.type == "length":
        finish["length"] = len(result.tokens_C)
    else:
        finish["message"] = result.finish.message
    tokens = result.tokens_C.tolist()
    meta: dict[str, Any] = {
        "id": rid,
        "extra_key": key,
        "finish_reason": finish,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": len(tokens),
        "cached_tokens": result.cached_tokens,
        "weight_version": str(result.weight_version),
        "weight_versions": version_spans(result.versions_C),
        "oldest_kv_version": result.oldest_kv_version,
    }
    if result.judged:
        meta["spec_verify_ct"] = result.judged
        meta["spec_accept_length"] = 1 + result.accepted / result.judged
    if logprobs:
        meta["input_token_logprobs"] = []  # as SGLang, of whom nobody asks them: those of a prompt are refused
        meta["output_token_logprobs"] = [(p, t, None) for p, t in zip(result.logprobs_C.tolist(), tokens, strict=True)]
    if result.routing is not None:
        meta["routed_experts"] = encode_routing(result.routing, config)
    return {"text": "", "output_ids": tokens, "meta_info": meta}


def decode(kind: type[D], body: bytes) -> D:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"request body: {error}") from None
    except RecursionError:
        raise BadRequest(NESTED) from None


def token_array(ids: list[int]) -> np.ndarray:
    try:
        return np.array(ids, np.int32)
    except OverflowError:
        raise BadRequest("input_ids: a value beyond 32 bits; allowed: token ids of the vocabulary") from None
