"""Calls as Llama 3 writes them: the whole message is JSON, several of it with semicolons between.

{"name": "read", "parameters": {"path": "a.py"}}
<|python_tag|>{"name": "read", "parameters": {…}}; {"name": …}
"""

from __future__ import annotations

import json
import re

from shared.renderers.calls import Malformed, Part, Schemas, json_value, kind_of

TAG = "<|python_tag|>"
_CALL = re.compile(r'\s*(?:<\|python_tag\|>|\{\s*"(?:name|type|function)"\s*:)')


class Llama:
    name = "llama"
    form = '{"name": "TOOL", "parameters": {"ARGUMENT": VALUE}}'
    marks = (TAG,)
    opens = (TAG, "{")

    def parts(self, text: str, thinking: bool = False, schemas: Schemas | None = None) -> list[Part]:
        if not _CALL.match(text):
            return [Part("text", 0, len(text))] if text else []
        parts: list[Part] = []
        start, at = 0, _space(text, 0)
        if text.startswith(TAG, at):
            at = _space(text, at + len(TAG))
        while True:
            part = self._call(text, start, at)
            parts.append(part)
            start, at = part.end, _space(text, part.end)
            if part.error is not None or at == len(text):
                break
            if not text.startswith(";", at):
                parts.append(Part("text", start, len(text)))
                return parts
            at = _space(text, at + 1)
            if at == len(text):
                break
        if start < len(text):
            parts.append(Part("mark", start, len(text)))
        return parts

    def _call(self, text: str, start: int, at: int) -> Part:
        name = ""
        try:
            value, end = json_value(text, at, "the call")
            if not isinstance(value, dict):
                raise Malformed(f"the call is {kind_of(value)}; allowed: an object with the keys name and parameters")
            if value.get("type") == "function":
                value = {key: of for key, of in value.items() if key != "type"}
            name = value["name"] if isinstance(value.get("name"), str) else ""
            if sorted(value) != ["name", "parameters"]:
                raise Malformed(f"found the keys {', '.join(sorted(value))[:120] or 'none'}; allowed: name, parameters")
            if not name:
                raise Malformed(f"name: found {kind_of(value['name'])}; allowed: a string that names a tool")
            if not isinstance(value["parameters"], dict):
                raise Malformed(f"parameters: found {kind_of(value['parameters'])}; allowed: an object")
        except Malformed as error:
            return Part("call", start, len(text), name, error=f"{error}. A valid call: {self.form}")
        return Part("call", start, end, name, value["parameters"], json.dumps(value["parameters"], ensure_ascii=False))


def _space(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())
