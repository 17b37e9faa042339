"""What /generate takes and refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference.wire import HARMLESS, NEUTRAL, BadRequest, SamplingParams, parse_generate

KNOWN = {*SamplingParams.__struct_fields__, *NEUTRAL, *HARMLESS}


def parsed(sampling: dict[str, Any], **fields: Any) -> SamplingParams:
    return parse_generate(json.dumps({"input_ids": [1], "sampling_params": sampling, **fields}).encode())[1]


@given(st.text(max_size=40).filter(lambda name: name not in KNOWN), st.none() | st.integers() | st.text(max_size=9))
def test_a_sampling_parameter_that_no_engine_knows_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        parsed({"temperature": 0.5, name: value})
    assert f"sampling_params.{name}: found {value!r}" in str(refused.value)
    assert "allowed: temperature, max_new_tokens" in str(refused.value)


def test_the_refusal_of_a_slip_names_the_nearest_name() -> None:
    for slip, meant in {"temprature": "temperature", "top-p": "top_p", "max_tokens": "max_new_tokens"}.items():
        with pytest.raises(BadRequest, match=rf"Did you mean {meant}\?"):
            parsed({slip: 1})


def test_a_name_without_end_is_refused_in_few_words() -> None:
    with pytest.raises(BadRequest) as refused:
        parsed({"temperature" * 100_000: "x" * 1_000_000})
    assert len(str(refused.value)) < 500


def test_what_changes_nothing_is_taken() -> None:
    neutral = {name: allowed[0] for name, allowed in NEUTRAL.items()}
    harmless = dict.fromkeys(HARMLESS, True)
    assert parsed({**neutral, **harmless, "temperature": 0.5}) == parsed({"temperature": 0.5})


def test_parameters_beside_sampling_params_and_slips_of_fields_are_refused_and_other_fields_of_sglang_are_not() -> None:
    for fields, said in {
        ("temperature", 0.5): "temperature: found beside sampling_params",
        ("sampling_parms", None): "Did you mean sampling_params",
        ("return_logprobs", True): "Did you mean return_logprob",
    }.items():
        with pytest.raises(BadRequest, match=said):
            parsed({}, **dict([fields]))
    others = ("text", "top_logprobs_num", "logprob_start_len", "token_ids_logprob", "return_text_in_logprobs")
    others += ("log_metrics", "return_hidden_states", "data_parallel_rank", "priority", "session_params")
    assert parsed({}, **dict.fromkeys(others)) == SamplingParams()
