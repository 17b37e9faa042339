"""A probe's file is taken as a whole or refused with field, value and what is allowed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.probe import BadProbe, Probe, Tried, read, require_known

ONE = '{"version": 1, "problems": {"p": %s}}'
BAD = [
    (b"\xff", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    ("7", "found 7; allowed: a file that `etude tasks probe --out FILE` wrote"),
    ("{}", "version: found nothing; allowed: 1"),
    ('{"version": 2, "problems": {"p": {"attempts": 1, "solved": 1}}}', "version: found 2; allowed: 1"),
    ('{"version": true, "problems": {"p": {"attempts": 1, "solved": 1}}}', "version: found true; allowed: 1"),
    ('{"version": 1, "problems": {}}', "problems: found 0 problems; allowed: an object of 1 to 100000 problems"),
    ('{"version": 1, "problems": [1]}', "problems: found [1]"),
    ('{"version": 1, "weight": 2, "problems": {"p": {"attempts": 1, "solved": 1}}}', "found the field 'weight'"),
    ('{"version": 1, "checkpoint": 5, "problems": {"p": {"attempts": 1, "solved": 1}}}', "checkpoint: found 5"),
    (ONE % "0.5", "problems.p: found 0.5; allowed: an object with attempts and solved"),
    (ONE % '{"attempts": 4}', "problems.p: found"),
    (ONE % '{"attempts": 0, "solved": 0}', "problems.p.attempts: found 0; allowed: a whole number from 1 to 10000"),
    (ONE % '{"attempts": NaN, "solved": 0}', "problems.p.attempts: found nan; allowed"),
    (ONE % '{"attempts": 4.0, "solved": 0}', "problems.p.attempts: found 4.0; allowed"),
    (
        ONE % '{"attempts": 4, "solved": -1}',
        "problems.p.solved: found -1; allowed: a whole number from 0 to 4, its attempts",
    ),
    (ONE % '{"attempts": 4, "solved": 5}', "problems.p.solved: found 5; allowed"),
    (ONE % '{"attempts": 4, "solved": NaN}', "problems.p.solved: found nan; allowed"),
    (ONE % '{"attempts": 4, "solved": "1"}', "problems.p.solved: found '1'; allowed"),
    (
        '{"version": 1, "problems": {"p": {"attempts": 1, "solved": 1}, "p": {"attempts": 2, "solved": 1}}}',
        "'p' is named twice in one object",
    ),
]


@pytest.mark.parametrize(("data", "why"), BAD)
def test_what_no_probe_may_be_is_refused(data: str | bytes, why: str) -> None:
    with pytest.raises(BadProbe) as refused:
        read(data.encode() if isinstance(data, str) else data)
    assert why in str(refused.value)


def test_many_objections_are_counted() -> None:
    some = {f"p{i}": {"attempts": 0, "solved": 0} for i in range(9)}
    with pytest.raises(BadProbe, match=r"p4.*; and 4 more"):
        read(json.dumps({"version": 1, "problems": some}).encode())


@given(st.dictionaries(st.text(max_size=9), st.tuples(st.integers(1, 10_000), st.integers(0, 10_000)), min_size=1))
def test_what_is_whole_is_read(counts: dict[str, tuple[int, int]]) -> None:
    problems = {name: Tried(attempts=max(pair), solved=min(pair)) for name, pair in counts.items()}
    raw = {name: {"attempts": one.attempts, "solved": one.solved} for name, one in problems.items()}
    data = json.dumps({"version": 1, "checkpoint": "c", "problems": raw}).encode()
    assert read(data) == Probe(checkpoint="c", problems=problems)


def test_a_probe_of_other_problems_is_refused() -> None:
    probe = Probe(problems={name: Tried(attempts=1, solved=0) for name in ("a", "b", "c")})
    require_known(probe, {"a", "b", "c", "d"}, "the pack")
    with pytest.raises(BadProbe, match=r"problems: found 'b' and 1 more; allowed: ids of the pack"):
        require_known(probe, {"a"}, "the pack")
