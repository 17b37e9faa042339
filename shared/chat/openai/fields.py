"""Every field that a chat request may hold, object by object. Pure.

A field stands in one of three tables, or the request is refused by its name:

- served: the fields of the structs in `request`.
- NEUTRAL: another distribution, another prompt or another form of answer. Refused unless the value asks for what is done anyway.
- IGNORED: taken and not read, because nothing of the answer depends on it here. docs/inference.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shared.chat import refusing
from shared.chat.openai import structs
from shared.chat.refusing import BIASED, refuse_others, refuse_unknown

Neutral = Mapping[str, tuple[Any, ...]]

# Sampling that would bias training. `stop` is served here, in text.
SAMPLING: Neutral = {name: allowed for name, allowed in refusing.NEUTRAL.items() if name != "stop"}
NEUTRAL: Neutral = {
    # OpenAI's
    "top_logprobs": (0, None),
    "parallel_tool_calls": (True, None),
    "response_format": ({"type": "text"}, None),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (["text"], None),
    "audio": (None,),
    # of vLLM and SGLang: another distribution or another end
    "typical_p": (1, None),
    "length_penalty": (1, None),
    "min_tokens": (0, None),
    "best_of": (1, None),
    "use_beam_search": (False, None),
    "ignore_eos": (False, None),
    "stop_token_ids": (None, []),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "guided_json": (None,),
    "guided_regex": (None, ""),
    "guided_choice": (None, []),
    "guided_grammar": (None, ""),
    "structured_outputs": (None, {}),
    "logits_processors": (None, []),
    "custom_logit_processor": (None, ""),
    "repetition_detection": (None,),
    "watermark": (None, {}),
    "thinking_token_budget": (None,),
    "lora_path": (None, ""),
    "vllm_xargs": (None, {}),
    # another prompt
    "continue_final_message": (False, None),
    "add_generation_prompt": (True, None),
    "add_special_tokens": (False, None),
    "chat_template": (None, ""),
    "documents": (None, []),
    "truncate_prompt_tokens": (None,),
    "input_ids": (None, []),
    "session_params": (None, {}),
    "task": (None,),
    "thinking": (None,),
    "enable_thinking": (None,),
    # another form of answer
    "prompt_logprobs": (None,),
    "echo": (False, None),
    "include_stop_str_in_output": (False, None),
    "no_stop_trim": (False, None),
    "skip_special_tokens": (True, None),
    "separate_reasoning": (False, None),
    "include_reasoning": (True, None),
    "return_tokens_as_token_ids": (False, None),
    "return_prompt_token_ids": (False, None),
    "return_prompt_text": (False, None),
    "return_token_offsets": (False, None),
    "return_assistant_tokens_mask": (False, None),
    "return_hidden_states": (False, None),
    "return_routed_experts": (False, None),
    "routed_experts_start_len": (0, None),
    "return_meta_info": (False, None),
    "return_cached_tokens_details": (False, None),
    "return_spec_tokens_details": (False, None),
    "return_input_ids_in_sglext": (False, None),
    "return_output_ids_in_sglext": (False, None),
    "return_sampling_mask": (False, None),
}
IGNORED: frozenset[str] = frozenset({
    # a provider's bookkeeping
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    # hints that only models of OpenAI know, and a guess at the answer, which changes its speed alone
    "verbosity", "web_search_options", "max_tool_calls", "prediction",
    # which request is served when, where, and under which name
    "priority", "rid", "request_id", "session_id", "cache_salt", "data_parallel_rank", "kv_transfer_params", "ec_transfer_params",
    # how often a stream tells, and the spaces between special tokens, which no text holds
    "stream_interval", "stream_reasoning", "spaces_between_special_tokens",
    # of images and sound, which no message can hold
    "mm_processor_kwargs", "media_io_kwargs", "images_config", "video_config", "use_audio_in_video",
    "max_dynamic_patch", "min_dynamic_patch",
    # parts of fields that are refused
    "truncation_side", "guided_decoding_backend", "guided_whitespace_pattern",
})  # fmt: skip


@dataclass(frozen=True)
class Fields:
    """The fields of one object of a request. `inside`: those that hold objects with fields of their own."""

    served: frozenset[str]
    neutral: Neutral = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    inside: Mapping[str, Fields] = field(default_factory=dict)

    def require(self, raw: bytes | msgspec.Raw, where: str = "") -> None:
        """Raise BadRequest for the first field that is refused, by its place in the request. `raw`: JSON that the structs have
        taken. Anything but an object or an array of them holds no fields."""
        found = _VALUE.decode(raw)
        if isinstance(found, dict):
            self._require(found, f"{where}." if where else "")
        for i, one in enumerate(found if isinstance(found, list) else ()):
            self._require(_OBJECT.decode(one), f"{where}[{i}].")

    def _require(self, fields: Mapping[str, msgspec.Raw], where: str) -> None:
        others = {name: msgspec.json.decode(of) for name, of in fields.items() if name not in self.served}
        refuse_others(others, {n: of for n, of in self.neutral.items() if n in SAMPLING}, where=where, why=BIASED)
        refuse_others(others, self.neutral, where=where)
        refuse_unknown(others, sorted(self.served), {*self.neutral, *self.ignored, *self.served}, where=where)
        for name, inner in self.inside.items():
            if name in fields:
                inner.require(fields[name], f"{where}{name}")


def _of(struct: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(struct.__struct_fields__)


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VALUE = msgspec.json.Decoder(dict[str, msgspec.Raw] | list[msgspec.Raw] | str | float | bool | None)
# What clients send back with an earlier answer, of their own and of their libraries'.
_KEPT = frozenset({"cache_control", "provider_specific_fields"})
PART = Fields(_of(structs.ContentPart), ignored=_KEPT | {"annotations"})
FUNCTION = Fields(_of(structs.FunctionCall), ignored=_KEPT | {"parsed_arguments"})
CALL = Fields(_of(structs.ToolCall), ignored=_KEPT | {"index", "extra_content"}, inside={"function": FUNCTION})
MESSAGE = Fields(
    _of(structs.ChatMessage),
    neutral={
        "refusal": (None, ""),
        "audio": (None,),
        "function_call": (None,),
        "prefix": (False, None),
        "tools": (None, []),
    },
    ignored=_KEPT | {"annotations", "id", "parsed", "phase", "reasoning_details", "thinking_blocks"},
    inside={"content": PART, "tool_calls": CALL},
)
STREAM = Fields(
    _of(structs.StreamOptions),
    neutral={"continuous_usage_stats": (False, None)},
    ignored=frozenset({"include_obfuscation"}),
)
REQUEST = Fields(
    _of(structs.ChatRequest),
    neutral={**SAMPLING, **NEUTRAL},
    ignored=IGNORED,
    inside={"messages": MESSAGE, "stream_options": STREAM},
)
