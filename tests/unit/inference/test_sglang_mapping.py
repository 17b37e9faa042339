"""Our contract to SGLang's and back, on answers as SGLang 0.5.23 gave them."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference.sglang.mapping import BadAnswer, answer, failure, request_body, sent_rid, stream_part
from services.inference.wire import BadRequest, Unavailable, parse_generate
from services.rollout.generation import RoutingShape, parse

ROUTING = np.arange(6 * 3 * 2, dtype=np.int32).reshape(6, 3, 2) % 8


def recorded(**changes: Any) -> dict[str, Any]:
    """An answer of SGLang 0.5.23 to four prompt tokens, three new ones, over an update in flight."""
    meta = {
        "id": "1:x",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 4,
        "weight_version": "8",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[-1.25, 11, None], [-0.5, 12, None], [-2.0, 13, None]],
        "output_token_logprobs_length": 3,
        "reasoning_tokens": 0,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "weight_versions": [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 3}],
        "routed_experts": base64.b64encode(ROUTING.tobytes()).decode(),
        "spec_accept_length": 1.5,
        "spec_verify_ct": 2,
        "e2e_latency": 0.1,
        **changes,
    }
    return {"text": "", "output_ids": [11, 12, 13], "meta_info": {k: v for k, v in meta.items() if v is not None}}


def asked(**changes: Any) -> Any:
    body = {
        "input_ids": [1, 2, 3, 4],
        "sampling_params": {"temperature": 0.7, "max_new_tokens": 3, "stop_token_ids": [9]},
        "return_logprob": True,
        "return_routed_experts": True,
        "extra_key": "6",
        **changes,
    }
    return parse_generate(json.dumps(body).encode())


def sent(request: Any, **changes: Any) -> dict[str, Any]:
    more = {"vocabulary": 512, "context": 64, "serial": 8, "routing": True, "seed": 5, "lineage": "a1", **changes}
    return json.loads(request_body("x", *request, **more))


def back(reply: dict[str, Any], request: Any = None, **changes: Any) -> dict[str, Any]:
    more = {"serial": 8, "routing": True, **changes}
    return answer(json.dumps(reply).encode(), "x", *(request or asked()), **more)


def test_stop_tokens_are_not_ignored_with_the_end_of_text():
    assert sent(asked())["sampling_params"]["ignore_eos"] is False  # true would switch stop_token_ids off as well
    assert sent(asked(sampling_params={}))["sampling_params"]["ignore_eos"] is True


def test_only_the_temperature_shapes_the_distribution():
    params = sent(asked())["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["min_p"]) == (0.7, 1.0, -1, 0.0)


@pytest.mark.parametrize(("asks", "sends"), [(0.0, 0.0), (1e-9, 1e-6), (1e-6, 1e-6), (2.5, 2.5)])
def test_a_temperature_is_never_taken_for_greedy_with_log_probabilities_at_1(asks, sends):
    """SGLang does so with all below 1e-6."""
    assert sent(asked(sampling_params={"temperature": asks}))["sampling_params"]["temperature"] == sends


def test_a_generation_ends_at_the_context_instead_of_being_refused():
    params = {"max_new_tokens": 1000}
    assert sent(asked(sampling_params=params))["sampling_params"]["max_new_tokens"] == 64 + 1 - 4


def test_every_request_has_a_seed_of_its_own_where_it_brings_none():
    assert sent(asked())["sampling_params"]["sampling_seed"] == 5  # SGLang gives all of them 42
    assert sent(asked(sampling_params={"sampling_seed": 3}))["sampling_params"]["sampling_seed"] == 3


def test_cache_entries_are_keyed_by_the_version_that_a_session_began_under():
    assert sent(asked())["extra_key"] == "a1/6"
    assert sent(asked(extra_key=None))["extra_key"] == "a1/@8"


def test_the_key_that_was_chosen_is_told_and_names_the_oldest_version_that_may_have_been_read():
    """A swap between the choice and the first token: what is in the cache under that key is of the version before."""
    spans = [{"version": "9", "start": 0, "end": 3}]
    meta = back(recorded(weight_versions=spans), asked(extra_key=None))["meta_info"]
    assert (meta["extra_key"], meta["oldest_kv_version"]) == ("@8", 8)
    assert back(recorded())["meta_info"]["extra_key"] == "6"


def test_routing_is_asked_for_where_the_model_has_experts():
    request = asked(routed_experts_start_len=2)
    assert sent(request)["routed_experts_start_len"] == 2
    assert "return_routed_experts" not in sent(request, routing=False)
    assert "return_routed_experts" not in sent(asked(return_routed_experts=False))


@pytest.mark.parametrize(
    ("ids", "said"),
    [([], "1..64"), ([1] * 65, "65 tokens"), ([512], "0..511"), ([-1], "negative"), ([1 << 40], "0..511")],
)
def test_prompts_that_would_take_the_server_down_are_refused_here(ids, said):
    with pytest.raises(BadRequest, match=r"input_ids.*" + said.replace(".", r"\.")):
        sent(asked(input_ids=ids))


@given(st.text(), st.text())
def test_no_sent_id_begins_with_another(one, other):
    """SGLang aborts whatever begins with the id that it is told."""
    assert one == other or not sent_rid(one).startswith(sent_rid(other))


def test_a_dense_model_answers_no_rows_as_in_the_embedded_engine():
    assert back(recorded(routed_experts=None), routing=False)["meta_info"]["routed_experts"] == ""
    assert "routed_experts" not in back(recorded(), asked(return_routed_experts=False))["meta_info"]


def test_an_answer_has_our_fields_and_the_rollout_worker_reads_it():
    mine = back(recorded())
    meta = mine["meta_info"]
    assert (mine["text"], mine["output_ids"]) == ("", [11, 12, 13])
    assert meta["id"] == "x"
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert meta["weight_version"] == "8"
    assert meta["oldest_kv_version"] == 6  # its key says so: SGLang does not
    generation = parse(
        msgspec.json.encode(mine),
        prompt_tokens=4,
        first_row=0,
        routing=RoutingShape(layers=3, moe_layers=(1, 2), top_k=2, experts=8),
    )
    assert generation.tokens == [11, 12, 13]
    assert generation.cache_key == "6"
    assert generation.logprobs_N.tolist() == [-1.25, -0.5, -2.0]
    assert generation.versions_N.tolist() == [7, 8, 8]
    assert generation.experts_RLK is not None
    assert np.array_equal(generation.experts_RLK, ROUTING[:, 1:])


def test_what_speculation_and_the_cache_did_is_passed_on():
    meta = json.loads(msgspec.json.encode(back(recorded())))["meta_info"]
    assert (meta["spec_accept_length"], meta["spec_verify_ct"], meta["num_retractions"]) == (1.5, 2, 0)
    assert "e2e_latency" not in meta


def test_what_the_step_in_hand_sampled_is_never_counted_as_a_later_versions():
    """SGLang books it under the new version where scheduling overlaps with the device."""
    spans = [
        {"version": "6", "start": 0, "end": 1},
        {"version": "7", "start": 1, "end": 2},
        {"version": "8", "start": 2, "end": 3},
    ]

    def cut(lag: int) -> list[tuple[str, int, int]]:
        found = back(recorded(weight_versions=spans), lag=lag, serial=6)["meta_info"]["weight_versions"]
        return [(s["version"], s["start"], s["end"]) for s in found]

    assert cut(0) == [("6", 0, 1), ("7", 1, 2), ("8", 2, 3)]
    assert cut(1) == [("6", 0, 2), ("7", 2, 3)]
    assert cut(3) == [("6", 0, 3)]


@pytest.mark.parametrize("spans", [[{"version": "8", "start": 0, "end": 3}], None])
def test_what_a_prompts_own_step_sampled_is_never_counted_as_a_later_versions(spans):
    """SGLang books no update of a request that has no token yet, though its first may be on its way."""

    def cut(lag: int, serial: int) -> list[tuple[str, int, int]]:
        found = back(recorded(weight_versions=spans), lag=lag, serial=serial)["meta_info"]["weight_versions"]
        return [(s["version"], s["start"], s["end"]) for s in found]

    assert cut(1, 7) == [("7", 0, 1), ("8", 1, 3)]
    assert cut(2, 7) == [("7", 0, 2), ("8", 2, 3)]
    assert cut(5, 7) == [("7", 0, 3)]
    assert cut(2, 8) == cut(0, 7) == [("8", 0, 3)]  # nothing was swapped, or nothing overlaps


def test_a_request_without_a_key_has_read_nothing_older_than_the_key_that_was_sent_for_it():
    request, reply = asked(extra_key=None), recorded(weight_versions=None)  # all tokens are of version 8
    assert sent(request, serial=7)["extra_key"] == "a1/@7"
    assert back(reply, request, serial=7)["meta_info"]["oldest_kv_version"] == 7
    assert back(reply, request, serial=7, flushes=True)["meta_info"]["oldest_kv_version"] == 8


def test_routing_that_was_computed_again_by_another_version_is_no_answer():
    assert back(recorded(num_retractions=0))
    with pytest.raises(Unavailable, match="versions 7 and 8"):
        back(recorded(num_retractions=1))
    with pytest.raises(Unavailable, match="versions 7 and 8"):  # the first token may have been sampled before the swap
        back(recorded(num_retractions=1, weight_versions=None), serial=7, lag=1)
    assert back(recorded(num_retractions=1, weight_versions=None))  # the same weights, the same experts
    assert back(recorded(num_retractions=1), asked(return_routed_experts=False))
    assert back(recorded(num_retractions=1, routed_experts=None), routing=False)
    assert back(recorded(num_retractions=1), flushes=True)  # asked for


def test_an_answer_without_spans_is_of_one_version():
    meta = back(recorded(weight_versions=None))["meta_info"]
    assert meta["weight_versions"] == [{"version": "8", "start": 0, "end": 3}]


def test_an_abort_before_the_first_token_is_an_abort():
    reply = {
        "text": "",
        "output_ids": [],
        "meta_info": {
            "id": "1:x",
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": "8",
            "completion_tokens": 0,
        },
    }
    meta = back(reply)["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert (meta["weight_versions"], meta["output_token_logprobs"], meta["prompt_tokens"]) == ([], [], 4)


def test_a_stop_token_that_was_asked_for_is_a_stop():
    reply = recorded(finish_reason={"type": "stop", "matched": 9})
    assert back(reply)["meta_info"]["finish_reason"] == {"type": "stop", "matched": 9}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"finish_reason": {"type": "stop", "matched": 2}}, "did not name"),  # an end-of-text token of the checkpoint
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "NaN"),  # the last token is made up then
        ({"output_token_logprobs": [[-1.0, 11, None]]}, "3 output_ids"),
        ({"output_token_logprobs": [[None, 11, None]] * 3}, "null"),
        (
            {"output_token_logprobs": [[0.19, 11, None], [-1.0, 12, None], [-1.0, 13, None]]},
            "found a log-probability of 0.19",
        ),
        ({"weight_versions": [{"version": "7", "start": 0, "end": 2}]}, "end at 2 of 3"),
        ({"weight_versions": [{"version": "7", "start": 1, "end": 3}]}, "do not cover"),
        ({"weight_versions": None, "weight_version": "default"}, "serial"),
        ({"routed_experts": None}, "--enable-return-routed-experts"),
    ],
)
def test_what_cannot_be_recorded_exactly_is_never_passed_on(changes, said):
    with pytest.raises(BadAnswer, match=said):
        back(recorded(**changes))


def test_a_log_probability_that_rounding_left_above_zero_is_zero():
    pairs = [[1e-7, 11, None], [-0.5, 12, None], [-2.0, 13, None]]
    assert [p for p, _, _ in back(recorded(output_token_logprobs=pairs))["meta_info"]["output_token_logprobs"]] == [
        0.0,
        -0.5,
        -2.0,
    ]


def test_statuses_are_the_clients_mistake_not_now_or_a_failure():
    refused = failure(400, b'{"error": {"message": "too long"}}')
    assert isinstance(refused, BadRequest)
    assert str(refused) == "too long"
    assert isinstance(failure(503, b'{"detail": "The request queue is full."}'), Unavailable)
    assert isinstance(failure(500, b"Internal Server Error"), BadAnswer)


def test_a_stream_tells_the_tokens_so_far():
    part = recorded(finish_reason=None)
    part["meta_info"]["finish_reason"] = None
    assert stream_part(json.dumps(part).encode(), "x") == ([11, 12, 13], False)
    assert stream_part(json.dumps(recorded()).encode(), "x") == ([11, 12, 13], True)
    with pytest.raises(BadAnswer, match="too long"):
        stream_part(b'{"error": {"message": "too long"}}', "x")


def test_where_a_swap_flushes_the_cache_nothing_older_was_read_than_what_sampled():
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 3}]
    kept = back(recorded(weight_versions=spans))["meta_info"]
    flushed = back(recorded(weight_versions=spans), flushes=True)["meta_info"]
    assert (kept["oldest_kv_version"], flushed["oldest_kv_version"]) == (6, 7)
