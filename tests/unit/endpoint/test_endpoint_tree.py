"""The tree of appended tokens: what becomes a segment, and what is trained where."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.endpoint.tree import Node, Tree, cut
from services.rollout.generation import Generation

L, K = 2, 1


def generation(tokens: list[int], rows: int, version: int = 3) -> Generation:
    n = len(tokens)
    return Generation(
        tokens=tokens,
        logprobs_N=-np.arange(1, n + 1, dtype=np.float32) / 10,
        versions_N=np.full(n, version, np.int32),
        oldest_kv_version=version,
        experts_RLK=np.arange(rows * L * K, dtype=np.uint8).reshape(rows, L, K),
    )


@dataclass
class Grown:
    """A tree, and the ids that the engine saw and sampled for each of its requests."""

    tree: Tree = field(default_factory=Tree)
    requests: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def ask(self, parent: Node | None, appended: list[int], sampled: list[int]) -> Node:
        before = [] if parent is None else [*parent.before, *parent.generation.tokens]
        self.requests.append(([*before, *appended], sampled))
        known = 0 if parent is None else parent.rows
        rows = len(before) + len(appended) + len(sampled) - 1 - known
        made = generation(sampled, rows, version=len(self.requests))
        return self.tree.add(parent, appended, made, [], len(self.requests))


ids = st.lists(st.integers(0, 200), min_size=1, max_size=5)
steps = st.lists(st.tuples(st.integers(-1, 30), ids, ids), min_size=1, max_size=14)


@given(steps)
def test_every_sampled_id_is_trained_once_and_every_request_is_a_beginning_of_a_segment(
    steps: list[tuple[int, list[int], list[int]]],
) -> None:
    grown, nodes = Grown(), []
    for at, appended, sampled in steps:
        parent = nodes[at % len(nodes)] if nodes and at >= 0 else None
        nodes.append(grown.ask(parent, appended, sampled))
    recorder = grown.tree.recorder()
    segments, routing = recorder.segments(), recorder.routing()
    leaves = [node for node in nodes if not node.children]
    assert len(segments) == len(leaves)
    for leaf, segment, rows in zip(leaves, segments, routing, strict=True):
        segment.check()
        assert segment.tokens.tolist() == [*leaf.before, *leaf.generation.tokens]
        assert len(rows) == len(segment.tokens) - 1
    for context, sampled in grown.requests:  # id for id what the engine saw
        whole = [*context, *sampled]
        assert any(segment.tokens.tolist()[: len(whole)] == whole for segment in segments)
    # Each request has a version of its own here: so many trained ids of it are there, over all segments.
    for version, (_, sampled) in enumerate(grown.requests, 1):
        trained = [id for s in segments for id in s.tokens[s.loss_mask & (s.versions == version)].tolist()]
        assert trained == sampled
    assert grown.tree.oldest_version == 1
    assert grown.tree.newest_version == len(steps)


@given(ids, ids, st.integers(1, 6))
def test_a_cut_answer_is_what_sampling_less_would_have_given(context: list[int], sampled: list[int], n: int) -> None:
    whole = generation(sampled, len(context) + len(sampled) - 1)
    short = cut(whole, n)
    kept = min(n, len(sampled))
    assert short.tokens == sampled[:kept]
    assert np.array_equal(short.logprobs_N, whole.logprobs_N[:kept])
    assert short.experts_RLK is not None
    assert len(short.experts_RLK) == len(context) + kept - 1
    Tree().add(None, context, short, [], 1)


def test_an_answer_whose_arrays_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="routing rows, expected 3"):
        Tree().add(None, [1, 2], generation([3, 4], 2), [], 1)
    with pytest.raises(ValueError, match="0 sampled tokens"):
        Tree().add(None, [1], generation([], 0), [], 1)
