"""Checks tool calls against what an environment offers, before anything is executed. Pure.

The subset of JSON schema that tools use: an object with `properties` and `required`; of a property `type` (a name or several),
`enum`, `items`, `minimum`, `maximum`. Other packages bring tools, and endpoints their schemas: a keyword that is unknown, or
has another form than here, is not checked. Nothing here raises for one. A wrong call gets an `error` for the model to read:
what was found, what is allowed, and the call's valid form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from shared.environments import Call, ToolSpec

_SHOWN = 60  # characters of what was found
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}


def checked(calls: Sequence[Call], tools: Sequence[ToolSpec]) -> list[Call]:
    """Return the calls of one turn, each with an `error` where it cannot be executed. An error that a call has is kept."""
    seen: set[str] = set()
    result = []
    for call in calls:
        error = call.error or (_twice(call) if call.id in seen else objection(call, tools))
        seen.add(call.id)
        result.append(replace(call, error=error) if error else _whole(call, tools))
    return result


def _whole(call: Call, tools: Sequence[ToolSpec]) -> Call:
    """Return the call with whole numbers as int where the schema says integer: a model may write 3.0."""
    spec = next((tool for tool in tools if tool.name == call.name), None)
    properties = spec.parameters.get("properties", {}) if spec is not None else {}
    whole = {
        name: int(value)
        for name, value in call.arguments.items()
        if isinstance(value, float) and properties.get(name, {}).get("type") == "integer"
    }
    return replace(call, arguments={**call.arguments, **whole}) if whole else call


def objection(call: Call, tools: Sequence[ToolSpec]) -> str | None:
    """Return why the call cannot be executed: what was found and what is allowed. None: it can."""
    spec = next((tool for tool in tools if tool.name == call.name), None)
    if spec is None:
        return _unknown_tool(call.name, [tool.name for tool in tools])
    if not isinstance(call.arguments, Mapping):
        return f"arguments: found {_short(call.arguments)}; allowed: an object. {form(spec)}"
    properties = _properties(spec)
    for name in call.arguments:
        if properties is not None and name not in properties:
            return f"argument {_short(name)}: not known; {_meant(str(name), list(properties))}. {form(spec)}"
    for name in _required(spec):
        if name not in call.arguments:
            return f"argument {name!r}: missing. {form(spec)}"
    for name, value in call.arguments.items():
        if wrong := _wrong(value, (properties or {}).get(name)):
            return f"argument {name!r}: {wrong}. {form(spec)}"
    return None


def form(spec: ToolSpec) -> str:
    """Return how a valid call looks: `Valid: read(path: string, start?: integer)`."""
    required = _required(spec)
    parts = [
        f"{name}{'' if name in required else '?'}: {_kind(schema)}"
        for name, schema in (_properties(spec) or {}).items()
    ]
    return f"Valid: {spec.name}({', '.join(parts)})"


def _properties(spec: ToolSpec) -> Mapping[str, Any] | None:
    """Return the schema of each argument, or None where the schema says them in another form."""
    found = spec.parameters.get("properties", {})
    return found if isinstance(found, Mapping) else None


def _required(spec: ToolSpec) -> list[str]:
    found = spec.parameters.get("required", ())
    return [name for name in found if isinstance(name, str)] if isinstance(found, list | tuple) else []


def _kind(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        return "any"
    if isinstance(schema.get("enum"), list | tuple):
        return "|".join(map(str, schema["enum"]))
    return "|".join(_types(schema)) or "any"


def _types(schema: Mapping[str, Any]) -> list[str]:
    """Return the names of the types that a value may have; none: any, or a form that is not known here."""
    found = schema.get("type")
    names: Sequence[Any] = found if isinstance(found, list | tuple) else [found]
    return list(names) if all(isinstance(name, str) and name in _TYPES for name in names) else []


def _wrong(value: Any, schema: Any) -> str | None:
    """Return what is wrong with a value, or None."""
    if not isinstance(schema, Mapping):
        return None
    kinds, options = _types(schema), schema.get("enum")
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"found {_short(value)}; allowed: {' or '.join(kinds)}"
    if isinstance(options, list | tuple) and value not in options:
        return f"found {_short(value)}; allowed: {', '.join(map(repr, options))}"
    if _number(value):
        if _number(least := schema.get("minimum")) and value < least:
            return f"found {value}; allowed: at least {least}"
        if _number(most := schema.get("maximum")) and value > most:
            return f"found {value}; allowed: at most {most}"
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if wrong := _wrong(item, schema.get("items")):
                return f"item {index}: {wrong}"
    return None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):  # which is an int in Python
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _unknown_tool(name: str, offered: list[str]) -> str:
    if not offered:
        return f"tool {_short(name)}: not offered; there are no tools here, answer in plain text"
    return f"tool {_short(name)}: not offered; {_meant(name, offered)}"


def _twice(call: Call) -> str:
    return f"call id {_short(call.id)}: found twice in one turn; allowed: one call for each id"


def _meant(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, 1)
    allowed = f"allowed: {', '.join(known) or 'none'}"
    return f"did you mean {near[0]!r}? {allowed}" if near else allowed


def _short(found: Any) -> str:
    try:
        text = repr(found)
    except RecursionError:
        return "a value that is nested too deeply"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
