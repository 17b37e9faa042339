"""Tool calls are checked before they run, and a wrong one is answered with what would be right."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.environments import Call, ToolSpec
from shared.environments.calling import checked, form, objection
from shared.environments.tools import PLUGINS, load

TOOLS = tuple(load(name).spec for name in PLUGINS.own)


def call(name: str, arguments: Any, id: str = "1") -> Call:
    return Call(id, name, arguments, 0, 0)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("raed", {"path": "x"}, "tool 'raed': not offered; did you mean 'read'?"),
        ("fly", {}, "tool 'fly': not offered; allowed: edit, grep"),
        ("read", {}, "argument 'path': missing. Valid: read(path: string, start?: integer, end?: integer)"),
        ("read", {"path": "x", "strat": 1}, "argument 'strat': not known; did you mean 'start'?"),
        ("read", {"path": 3}, "argument 'path': found 3; allowed: string"),
        ("read", {"path": "x", "start": "1"}, "argument 'start': found '1'; allowed: integer"),
        ("read", {"path": "x", "start": True}, "argument 'start': found True; allowed: integer"),
        ("read", {"path": "x", "start": 0}, "argument 'start': found 0; allowed: at least 1"),
        ("list", {"depth": 50}, "argument 'depth': found 50; allowed: at most 20"),
        ("todo", {"open": ["a", 1]}, "argument 'open': item 1: found 1; allowed: string"),
        ("todo", {"open": "a"}, "argument 'open': found 'a'; allowed: array"),
        ("read", ["x"], "arguments: found ['x']; allowed: an object"),
    ],
)
def test_a_wrong_call_is_answered_with_what_was_found_and_what_is_allowed(name: str, arguments: Any, said: str) -> None:
    found = objection(call(name, arguments), TOOLS)
    assert found is not None
    assert said in found


@pytest.mark.parametrize("arguments", [{"path": "x"}, {"path": "x", "start": 2.0, "end": 5}])
def test_a_right_call_has_no_error(arguments: dict[str, Any]) -> None:
    assert checked([call("read", arguments)], TOOLS)[0].error is None


def test_an_enum_names_its_values() -> None:
    spec = ToolSpec("go", "", {"properties": {"to": {"enum": ["up", "down"]}}, "required": ["to"]})
    assert objection(call("go", {"to": "left"}), [spec]) == (
        "argument 'to': found 'left'; allowed: 'up', 'down'. Valid: go(to: up|down)"
    )


def test_an_error_is_kept_and_a_repeated_id_is_one() -> None:
    broken = Call("1", "read", {}, 0, 0, error="no JSON")
    first, second, third = checked([broken, call("submit", {}, "2"), call("submit", {}, "2")], TOOLS)
    assert first.error == "no JSON"
    assert second.error is None
    assert third.error == "call id '2': found twice in one turn; allowed: one call for each id"


@given(
    st.sampled_from([*PLUGINS.own, "other"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["path", "open", "q"]), inner),
        max_leaves=8,
    ),
)
def test_any_arguments_are_accepted_or_refused_with_a_sentence(name: str, arguments: Any) -> None:
    error = checked([call(name, arguments)], TOOLS)[0].error
    assert error is None or len(error) < 600


def test_descriptions_are_short() -> None:
    """A small model reads them in every attempt: about 4 characters a token."""
    usual = ("read", "edit", "write", "list", "grep", "shell", "submit")
    assert sum(len(load(name).spec.description) + len(form(load(name).spec)) for name in usual) < 800
    assert all(json.dumps(load(name).spec.parameters) for name in PLUGINS.own)
    assert [load(name).spec.name for name in PLUGINS.own] == list(PLUGINS.own)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    max_leaves=6,
)
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "array", "object", "null", "tuple"])
SCHEMAS = JSON | st.fixed_dictionaries(
    {},
    optional={
        "type": TYPES | st.lists(TYPES | JSON, max_size=3) | JSON,
        "enum": st.lists(JSON, max_size=3) | JSON,
        "minimum": JSON,
        "maximum": JSON,
        "items": st.fixed_dictionaries({"type": TYPES | JSON, "minimum": JSON}) | JSON,
    },
)
PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "properties": st.dictionaries(st.sampled_from(["a", "b"]), SCHEMAS, max_size=2) | JSON,
        "required": st.lists(JSON, max_size=2) | JSON,
    },
)


@settings(max_examples=300, deadline=None)
@given(PARAMETERS, st.dictionaries(st.sampled_from(["a", "b"]), JSON, max_size=2) | JSON)
def test_no_schema_and_no_arguments_raise(parameters: dict[str, Any], arguments: Any) -> None:
    found = objection(call("go", arguments), [ToolSpec("go", "", parameters)])
    assert found is None or "go(" in found


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": ["string", "null"]}, ["x", None], [1]),
        ({"type": "null"}, [None], [0, "", False]),
        ({"minimum": 1}, [1, "text", None, [0], True], [0, 0.5]),
        ({"type": ["integer", "string"], "maximum": 3}, [3, "9"], [4, 2.5]),
        ({"type": "array", "items": {"type": ["integer", "null"]}}, [[], [1, None]], [["1"]]),
        ({"type": "tuple"}, [1, None], []),
        ({"type": "string", "minimum": "a", "enum": "xyz"}, ["x", "q"], [1]),
        (True, [1, None], []),
    ],
)
def test_what_a_foreign_schema_says_is_held_to_as_far_as_it_is_known(
    schema: Any, good: list[Any], bad: list[Any]
) -> None:
    spec = ToolSpec("go", "", {"properties": {"to": schema}})
    assert [objection(call("go", {"to": value}), [spec]) for value in good] == [None] * len(good)
    assert all(objection(call("go", {"to": value}), [spec]) for value in bad)
