"""The cache's promise under any order of taking, writing, parking and evicting: what a row says it holds is what it holds."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.inference.cache import ACTIVE, FREE, SlotCache
from shared.model import ModelConfig

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "qwen3_moe",
        "vocab_size": 4,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
    }
)
ROWS, POSITIONS = 4, 12
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=POSITIONS)  # few tokens: prefixes meet often


def mark(tokens: np.ndarray, key: str) -> np.ndarray:
    """A number per position that depends on the whole prefix and the key: what keys and values depend on."""
    marks, state = [], int(key) + 1
    for token in tokens.tolist():
        state = (state * 31 + token + 7) % 1_000_003
        marks.append(state)
    return np.array(marks, np.float32)


class Sessions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = SlotCache(CONFIG, rows=ROWS, positions=POSITIONS)
        self.active: dict[int, str] = {}

    def write(self, row: int, upto: int) -> None:
        cache = self.cache
        start = int(cache.length[row])
        marks = mark(cache.tokens[row, :upto], cache.key[row])[start:]
        for tensor in (cache.keys, cache.values):
            tensor[:, row, :, start:upto] = tensor.new_tensor(marks)[None, None, :, None]
        cache.versions[row, start:upto] = marks
        cache.routing[row, start:upto] = (marks % 4).astype(np.uint8)[:, None, None]
        cache.length[row] = upto

    @rule(prompt=PROMPTS, key=st.sampled_from(["1", "2"]), compute=st.integers(0, POSITIONS))
    def take(self, prompt, key, compute):
        tokens = np.array(prompt, np.int32)
        idle = int((self.cache.state != ACTIVE).sum())
        taken = self.cache.take(tokens, key)
        assert (taken is None) == (idle == 0)
        if taken is None:
            return
        row, n = taken
        assert row not in self.active
        assert 0 <= n < len(tokens)
        self.active[row] = key
        self.write(row, max(n, min(compute, len(tokens))))

    @precondition(lambda self: self.active)
    @rule(data=st.data(), token=st.integers(0, 1))
    def sample_one(self, data, token):
        row = data.draw(st.sampled_from(sorted(self.active)))
        n = int(self.cache.length[row])
        if n < POSITIONS:
            self.cache.tokens[row, n] = token
            self.write(row, n + 1)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def park(self, data):
        row = data.draw(st.sampled_from(sorted(self.active)))
        self.cache.park(row)
        del self.active[row]

    @rule()
    def flush(self):
        self.cache.flush()
        assert all(self.cache.length[r] == 0 for r in range(ROWS) if r not in self.active)

    @invariant()
    def rows_hold_what_they_say(self):
        cache = self.cache
        assert {r for r in range(ROWS) if cache.state[r] == ACTIVE} == set(self.active)
        for row in range(ROWS):
            n = int(cache.length[row])
            assert n == 0 or cache.state[row] != FREE
            marks = mark(cache.tokens[row, :n], cache.key[row] or "0")
            for tensor in (cache.keys, cache.values):
                held = tensor[:, row, :, :n].numpy()
                assert (held == marks[None, None, :, None]).all()
            assert (cache.versions[row, :n] == marks).all()
            assert (cache.routing[row, :n, 0, 0] == marks % 4).all()


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_request_finds_the_longest_prefix_of_its_own_key_only():
    cache = SlotCache(CONFIG, rows=ROWS, positions=POSITIONS)
    for tokens, key in (([0, 1, 0], "1"), ([0, 1, 1, 1], "1"), ([0, 1, 1, 0, 1], "2")):
        row, _ = cache.take(np.array(tokens, np.int32), key)
        cache.length[row] = len(tokens)
        cache.park(row)
    assert cache.match(np.array([0, 1, 1, 0, 1, 1], np.int32), "1")[1] == 3
    assert cache.match(np.array([0, 1, 1, 0, 1, 1], np.int32), "2")[1] == 5
    assert cache.match(np.array([1], np.int32), "1") == (-1, 0)
    # The last token is always computed: what follows it must be known.
    assert cache.match(np.array([0, 1, 1, 1], np.int32), "1")[1] == 3


def test_the_least_recently_used_session_goes_first():
    cache = SlotCache(CONFIG, rows=2, positions=POSITIONS)
    for token in (0, 1):
        row, _ = cache.take(np.array([token] * 4, np.int32), "1")
        cache.length[row] = 4
        cache.park(row)
    row, n = cache.take(np.array([0, 0, 0, 0, 1], np.int32), "1")  # the first is used again
    assert n == 4
    cache.length[row] = 5
    cache.park(row)
    cache.take(np.array([3] * 4, np.int32), "1")
    assert cache.match(np.array([0, 0, 0, 0, 1, 1], np.int32), "1")[1] == 5
    assert cache.match(np.array([1, 1, 1, 1, 1], np.int32), "1")[1] == 0
