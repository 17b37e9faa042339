"""Values: one value, one text; back again; compared type-exactly."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.problems import values
from shared.problems.values import decode, encode, equal, normalise, outcome, show

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=1 << 53, max_value=1 << 200)
    | st.floats()
    | st.text(st.characters())
    | st.text(st.characters(categories=["Cs"]), max_size=3)
    | st.binary(max_size=8)
)
hashables = st.recursive(scalars, lambda x: st.tuples(x) | st.tuples(x, x) | st.frozensets(x, max_size=3), max_leaves=5)
plain = st.recursive(
    scalars | hashables,
    lambda x: (
        st.lists(x, max_size=4)
        | st.lists(x, max_size=4).map(tuple)
        | st.sets(hashables, max_size=4)
        | st.dictionaries(hashables, x, max_size=4)
    ),
    max_leaves=20,
)


def kinds(value: object) -> object:
    """The value with every type spelled out, so that == is type-exact; nan stands for itself."""
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [kinds(v) for v in value])
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, sorted(repr(kinds(v)) for v in value))
    if isinstance(value, dict):
        return ("dict", [(kinds(k), kinds(v)) for k, v in value.items()])
    return (type(value).__name__, repr(value))


@given(plain)
def test_every_plain_value_survives_the_round_trip_with_its_types(value: object) -> None:
    text = encode(value)
    assert text.isascii()
    again = decode(text)
    assert kinds(again) == kinds(value)
    assert encode(again) == text
    assert equal(text, encode(again))


@given(plain, plain)
def test_equal_agrees_with_a_type_exact_comparison(a: object, b: object) -> None:
    def unordered(value: object) -> object:
        if isinstance(value, dict):
            return ("dict", sorted((repr(unordered(k)), repr(unordered(v))) for k, v in value.items()))
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, [unordered(v) for v in value])
        if isinstance(value, (set, frozenset)):
            return (type(value).__name__, sorted(repr(unordered(v)) for v in value))
        return kinds(value)

    assert equal(encode(a), encode(b)) == (repr(unordered(a)) == repr(unordered(b)))


@pytest.mark.parametrize(
    ("a", "b"), itertools.combinations([1, True, 1.0, "1", b"1", [1], (1,), {1}, frozenset({1})], 2)
)
def test_values_of_different_types_are_never_equal(a: object, b: object) -> None:
    assert not equal(encode(a), encode(b))


def test_dicts_keep_their_order_and_compare_without_it() -> None:
    a, b = {"x": 1, "y": [{2: 3, 4: 5}]}, {"y": [{4: 5, 2: 3}], "x": 1}
    assert list(decode(encode(b))) == ["y", "x"]
    assert encode(a) != encode(b)
    assert equal(encode(a), encode(b))
    assert not equal(encode({1: 2}), encode({True: 2}))


def test_the_text_of_a_set_does_not_depend_on_the_hash_seed() -> None:
    code = "from shared.problems.values import encode; print(encode({'b', 'a', ('c', 1), 10, 9, None, b'q', 1.5}))"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


@given(plain)
@settings(max_examples=60)
def test_shown_text_is_an_expression_of_the_same_value(value: object) -> None:
    names = {"set": set, "frozenset": frozenset, "float": float}
    assert encode(eval(show(encode(value)), {"__builtins__": names})) == encode(value)  # noqa: S307 our own text


def test_small_plain_values_are_shown_as_literals() -> None:
    for value in ([1, (2,), ()], {"a": {1, 2}}, {10, 9}, "it's", b"x", None, -1.5, []):
        assert ast.literal_eval(show(encode(value))) == value
    assert show(encode({10, 9})) == "{9, 10}"


class Sly(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize("value", [Sly(1), [Sly(1)], object(), OrderedDict(), 1j, bytearray(b"x"), int, {"a": {1}.pop}])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not a plain type"):
        encode(value)


def test_cycles_depth_and_size_are_bounded() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    for value in (cycle, [0] * (values.MAX_NODES + 1), "x" * (values.MAX_TEXT + 1), 1 << (5 * values.MAX_TEXT)):
        with pytest.raises(ValueError):
            encode(value)
    deep = "[" * 40 + "]" * 40
    for text in (deep, "[" * 100_000, " " * (values.MAX_TEXT + 1), '{"tuple": [' * 40 + "]}" * 40):
        for function in (decode, show):
            with pytest.raises(ValueError):
                function(text)
        assert not equal(text, "[]")


@pytest.mark.parametrize(
    "text",
    [
        *("", "NaN", "{}", '{"a": 1}', '{"set": [1, 1]}', '{"dict": [[1, 2], [true, 3]]}', '{"dict": [1]}'),
        *('{"set": [[]]}', '{"int": 3}', '{"int": "q"}', '{"bytes": "0"}', '{"str": [-1]}', '{"float": "x"}'),
        '{"int": "1", "set": []}',
        '{"int": "9007199254740993"}',
    ],
)
def test_text_that_is_no_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decode(text)


@given(st.text(max_size=30) | st.text("[]{}:\"', dictseuplnfao01", max_size=40))
def test_any_text_is_either_read_or_refused(text: str) -> None:
    try:
        value = decode(text)
    except ValueError:
        return
    assert encode(value)


def test_colliding_hashes_cost_no_quadratic_comparison() -> None:
    modulus = sys.hash_info.modulus
    members = ", ".join(f'{{"int": "{hex(i * modulus)}"}}' for i in range(1, 20_000))
    assert not equal(f'{{"dict": [[0, {{"set": [{members}]}}]]}}', '{"dict": []}')


def test_results_with_a_plain_reading_are_normalised() -> None:
    assert normalise(x for x in (1, 2)) == [1, 2]
    assert normalise(itertools.count()) == list(range(values.MAX_ITEMS))
    assert normalise(range(3)) == [0, 1, 2]
    assert normalise(zip([1], [2], strict=True)) == [(1, 2)]
    assert normalise({1: 2}.items()) == [(1, 2)]
    assert normalise(deque([1])) == [1]
    for mapping in (OrderedDict(a=1), defaultdict(int, a=1), Counter("a")):
        assert type(normalise(mapping)) is dict
        assert normalise(mapping) == {"a": 1}
    assert normalise(int) is int


def test_a_function_that_returns_none_is_judged_by_the_argument_it_changed() -> None:
    assert outcome(None, [[1, 2], [3]], lambda: [[2, 1], [3]]) == ("[1, 2]", True)
    assert outcome(None, [[1, 2]], lambda: [[1, 2]]) == ("null", False)
    assert outcome(7, [[1, 2]], lambda: [[]]) == ("7", False)
