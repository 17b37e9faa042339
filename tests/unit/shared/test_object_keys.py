"""Keys of objects: what is written by a prefix is read back, and nothing else is taken for ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.ids import (
    attempt_prefix,
    checkpoint_prefix,
    parse_attempt,
    parse_checkpoint,
    parse_policy,
    policy_prefix,
)

NAMES = st.text("abcr-0123456789.", min_size=1, max_size=12)
NUMBERS = st.integers(0, 10**12)  # more digits than the prefix pads to
FILES = st.sampled_from(["manifest.json", "0000-0000.bin", "routing-1.zst", "below/a/folder"])


@given(NAMES, NAMES, NUMBERS, NUMBERS, FILES)
def test_a_key_says_what_its_prefix_was_made_of(run: str, attempt: str, a: int, b: int, name: str) -> None:
    assert parse_attempt(f"{attempt_prefix(run, attempt, a)}/{name}") == (run, attempt, a, name)
    assert parse_policy(f"{policy_prefix(run, a)}/{name}") == (run, a, name)
    assert parse_checkpoint(f"{checkpoint_prefix(run, a, b)}/{name}") == (run, a, b, name)


@pytest.mark.parametrize("parse", [parse_attempt, parse_policy, parse_checkpoint])
@given(st.text("runsattempolicch/-0123456789.\n", max_size=40))
def test_whatever_else_lies_there_is_nobodys(parse, key: str) -> None:
    assert parse(key) is None
    for prefix in (attempt_prefix("r", "a", 0), policy_prefix("r", 0), checkpoint_prefix("r", 0, 0)):
        assert parse(prefix) is None
        assert parse(f"packs/{prefix}/manifest.json") is None
