from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from services.rollout.generation import BadReply, RoutingShape, parse

SHAPE = RoutingShape(layers=3, moe_layers=(1, 2), top_k=2, experts=8)


def encoded(experts: np.ndarray) -> str:
    return base64.b64encode(experts.astype("<i4").tobytes()).decode()


def reply(**meta: Any) -> bytes:
    body = {
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 9, None]],
        "weight_version": "4",
        "oldest_kv_version": 2,
        "finish_reason": {"type": "stop", "matched": 9},
        **meta,
    }
    return json.dumps({"output_ids": [7, 9], "meta_info": body}).encode()


def read(data: bytes, routing: RoutingShape | None = None, first_row: int = 1) -> Any:
    return parse(data, prompt_tokens=3, first_row=first_row, routing=routing)


def test_versions_come_per_token_from_the_spans() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": 4, "start": 1, "end": 2}]
    generation = read(reply(weight_versions=spans, oldest_kv_version=1))
    assert generation.versions_N.tolist() == [3, 4]
    assert generation.oldest_kv_version == 1
    assert generation.tokens == [7, 9]
    assert generation.finish == "stop"


def test_the_key_of_the_cache_entries_is_the_one_that_the_engine_reports() -> None:
    assert read(reply(extra_key="@4")).cache_key == "@4"
    assert read(reply()).cache_key is None


@pytest.mark.parametrize("layers", [2, 3])
def test_routing_is_read_with_and_without_the_dense_layers(layers: int) -> None:
    experts_RLK = np.arange(3 * layers * 2).reshape(3, layers, 2) % 8
    generation = read(reply(routed_experts=encoded(experts_RLK)), SHAPE)
    assert generation.experts_RLK.dtype == np.uint8
    np.testing.assert_array_equal(generation.experts_RLK, experts_RLK if layers == 2 else experts_RLK[:, 1:])


@pytest.mark.parametrize(
    ("data", "routing", "says"),
    [
        (b"{", None, "/generate"),
        (reply(output_token_logprobs=[[None, 7, None], [-0.1, 9, None]]), None, "log-probability"),
        (reply(output_token_logprobs=[[0.19, 7, None], [-0.1, 9, None]]), None, "found a log-probability of 0.19"),
        (reply(output_token_logprobs=[[-0.1, 7, None], [-0.1, 8, None]]), None, "output_ids"),
        (reply(weight_version="default"), None, "serial"),
        (reply(oldest_kv_version=None), None, "oldest_kv_version"),
        (reply(weight_versions=[{"version": "3", "start": 0, "end": 1}]), None, "cover"),
        (reply(), SHAPE, "routed_experts"),
        (reply(routed_experts=encoded(np.zeros((2, 2, 2)))), SHAPE, "rows"),
        (reply(routed_experts=encoded(np.full((3, 2, 2), 8))), SHAPE, "outside"),
        (reply(routed_experts="***"), SHAPE, "routed_experts"),
    ],
)
def test_what_cannot_be_recorded_exactly_is_refused(data: bytes, routing: RoutingShape | None, says: str) -> None:
    with pytest.raises(BadReply, match=says):
        read(data, routing)


def test_which_layers_have_experts_is_read_from_the_models_configuration() -> None:
    deepseek = {"num_hidden_layers": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    qwen = {
        "num_hidden_layers": 4,
        "num_experts": 300,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
    }
    saved = {**{name: value for name, value in qwen.items() if name != "num_experts"}, "num_local_experts": 300}
    assert RoutingShape.of({"num_hidden_layers": 4}) is None
    for config, experts in ((deepseek, 8), (qwen, 300), (saved, 300)):
        assert RoutingShape.of(config) == RoutingShape(layers=4, moe_layers=(1, 2, 3), top_k=2, experts=experts)
