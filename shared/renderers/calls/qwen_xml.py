"""Calls as Qwen3-Coder and Qwen3.5 write them. XML has no types: a value is read by the type that the tool's schema names, and is a
string where it names none.

    <tool_call>
    <function=read>
    <parameter=path>
    a.py
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from shared.renderers.calls import Malformed, Part, Schemas, json_value, tagged

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\s]{1,128})>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]{1,128})>")
_END = re.compile(r"\s*</function>\s*</tool_call>")
# A value ends at the first closing tag that another parameter or the end of the call follows: it may hold the tag itself.
_VALUE_END = re.compile(r"</parameter>(?=\s*<parameter=|\s*</function>)")


class QwenXml:
    name = "qwen-xml"
    form = "<tool_call>\n<function=TOOL>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>\n</tool_call>"
    marks = (OPEN, CLOSE)
    opens = (OPEN,)

    def parts(self, text: str, thinking: bool = False, schemas: Schemas | None = None) -> list[Part]:
        return tagged(text, thinking, self.opens, lambda start: [self._call(text, start, schemas or {})])

    def _call(self, text: str, start: int, schemas: Schemas) -> Part:
        found = _FUNCTION.match(text, start + len(OPEN))
        name = found.group(1) if found else ""
        try:
            if found is None:
                raise Malformed(f"after {OPEN} came {text[start + len(OPEN) :][:20]!r}; allowed: <function=TOOL>")
            arguments, at = _arguments(text, found.end(), schemas.get(name, {}))
            end = _END.match(text, at)
            if end is None:
                raise Malformed(f"found {text[at : at + 20]!r}; allowed: <parameter=…>, or </function> and {CLOSE}")
        except Malformed as error:
            return Part("call", start, broken_end(text, start), name, error=f"{error}. A valid call: {self.form}")
        return Part("call", start, end.end(), name, arguments, json.dumps(arguments, ensure_ascii=False))


def _arguments(text: str, at: int, schema: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    arguments: dict[str, Any] = {}
    while found := _PARAMETER.match(text, at):
        key = found.group(1)
        if key in arguments:
            raise Malformed(f"parameter {key}: stands there twice")
        end = _VALUE_END.search(text, found.end())
        if end is None:
            raise Malformed(f"parameter {key}: found no </parameter> behind its value")
        value = text[found.end() : end.start()].removeprefix("\n").removesuffix("\n")
        if "\ufffd" in value:
            raise Malformed(f"parameter {key}: bytes that are no UTF-8")
        arguments[key] = typed(value, schema, key)
        at = end.end()
    return arguments, at


def typed(value: str, schema: Mapping[str, Any], key: str) -> Any:
    """Convert the value of the parameter `key` to the type that the tool's schema names. Return the text unchanged
    where the schema names no type or `string`, or where the text is not of the type that it names."""
    properties = schema.get("properties")
    about = properties.get(key) if isinstance(properties, Mapping) else None
    kind = about.get("type") if isinstance(about, Mapping) else None
    kinds = set(kind) if isinstance(kind, list) else {kind}
    if not kinds & {"integer", "number", "boolean", "array", "object", "null"}:
        return value
    text = value.strip()
    try:
        read, end = json_value({"True": "true", "False": "false", "None": "null"}.get(text, text), 0, key)
    except Malformed:
        return value
    whole = end == len({"True": "true", "False": "false", "None": "null"}.get(text, text))
    named = {
        bool: {"boolean"},
        int: {"integer", "number"},
        float: {"number"},
        list: {"array"},
        dict: {"object"},
        str: set(),
    }
    return read if whole and kinds & named.get(type(read), {"null"}) else value


def broken_end(text: str, start: int) -> int:
    """Return where a broken call ends: after its closing tag, or before the next opening tag if that one comes first.
    Without either tag it ends where the text ends."""
    close, following = text.find(CLOSE, start), text.find(OPEN, start + len(OPEN))
    if close >= 0 and (following < 0 or close < following):
        return close + len(CLOSE)
    return following if following >= 0 else len(text)
