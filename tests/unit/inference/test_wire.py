"""What /generate takes and refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference.wire import (
    HARMLESS,
    PLAIN,
    PLAIN_LOAD,
    SamplingParams,
    parse_generate,
    parse_update,
)
from shared.chat.refusing import MOST_SHOWN, NEUTRAL, BadRequest

KNOWN = {*SamplingParams.__struct_fields__, *NEUTRAL, *HARMLESS}


def parsed(sampling: dict[str, Any], **fields: Any) -> SamplingParams:
    return parse_generate(json.dumps({"input_ids": [1], "sampling_params": sampling, **fields}).encode())[1]


@given(st.text(max_size=40).filter(lambda name: name not in KNOWN), st.none() | st.integers() | st.text(max_size=9))
def test_a_sampling_parameter_that_no_engine_knows_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        parsed({"temperature": 0.5, name: value})
    assert f"sampling_params.{name}: found {repr(value)[:MOST_SHOWN]}" in str(refused.value)
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
    others = (
        "return_text_in_logprobs",
        "log_metrics",
        "data_parallel_rank",
        "priority",
        "session_id",
        "bootstrap_host",
    )
    assert parsed({}, **dict.fromkeys(others)) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_logprobs_num", 5),
        ("logprob_start_len", 0),
        ("token_ids_logprob", [1]),
        ("return_hidden_states", True),
        ("session_params", {"id": "s"}),
        ("text", "Hello"),
        ("lora_path", "mine"),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name_and_value_and_neutral_ones_are_taken(
    name: str, value: Any
) -> None:
    with pytest.raises(BadRequest) as refused:
        parsed({}, **{name: value})
    assert str(refused.value) == f"{name}: found {value!r}; allowed: {PLAIN[name][0]!r}"
    for allowed in PLAIN[name]:
        assert parsed({}, **{name: allowed}) == SamplingParams()


def test_a_load_of_weights_refuses_what_it_would_not_do_and_what_nobody_knows() -> None:
    def body(**fields: Any) -> bytes:
        return json.dumps({"model_path": "base", **fields}).encode()

    neutral = {name: allowed[0] for name, allowed in PLAIN_LOAD.items()}
    assert parse_update(body(**neutral, flush_cache=False, weight_version="3")).weight_version == "3"
    for field, said in {
        ("load_format", "pt"): "load_format: found 'pt'; allowed: None",
        ("abort_all_requests", True): "abort_all_requests: found True; allowed: False",
        ("keep_pause", True): "keep_pause: found True; allowed: False",
        ("flush", True): "flush: found True, but no engine knows it; allowed: model_path, weight_version, flush_cache",
    }.items():
        with pytest.raises(BadRequest) as refused:
            parse_update(body(**dict([field])))
        assert said in str(refused.value)
    with pytest.raises(BadRequest, match="model_path"):
        parse_update(b"{}")
