"""Calls as GLM-4.5 and its successors write them. A value is JSON unless the tool's schema names a string.

<tool_call>read
<arg_key>path</arg_key>
<arg_value>a.py</arg_value>
</tool_call>
"""

from __future__ import annotations

import json
import re

from shared.renderers.calls import Malformed, Part, Schemas, tagged
from shared.renderers.calls.qwen_xml import CLOSE, OPEN, broken_end, typed

_NAME = re.compile(r"\s*([^\s<]{1,128})\s*(?=<arg_key>|</tool_call>)")
_PAIR = re.compile(r"\s*<arg_key>(.{1,128}?)</arg_key>\s*<arg_value>", re.DOTALL)
_VALUE_END = re.compile(r"</arg_value>(?=\s*<arg_key>|\s*</tool_call>)")
_END = re.compile(r"\s*</tool_call>")


class Glm:
    name = "glm"
    form = "<tool_call>TOOL\n<arg_key>ARGUMENT</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>"
    marks = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    opens = (OPEN,)

    def parts(self, text: str, thinking: bool = False, schemas: Schemas | None = None) -> list[Part]:
        return tagged(text, thinking, self.opens, lambda start: [self._call(text, start, schemas or {})])

    def _call(self, text: str, start: int, schemas: Schemas) -> Part:
        found = _NAME.match(text, start + len(OPEN))
        name = found.group(1) if found else ""
        try:
            if found is None:
                raise Malformed(f"after {OPEN} came {text[start + len(OPEN) :][:20]!r}; allowed: a tool's name")
            arguments, at = {}, found.end()
            while pair := _PAIR.match(text, at):
                key, end = pair.group(1).strip(), _VALUE_END.search(text, pair.end())
                if key in arguments or end is None:
                    why = "stands there twice" if key in arguments else "found no </arg_value> behind its value"
                    raise Malformed(f"argument {key}: {why}")
                value = text[pair.end() : end.start()]
                if "\ufffd" in value:
                    raise Malformed(f"argument {key}: bytes that are no UTF-8")
                arguments[key], at = typed(value, schemas.get(name, {}), key), end.end()
            closed = _END.match(text, at)
            if closed is None:
                raise Malformed(f"found {text[at : at + 20]!r}; allowed: <arg_key>, or {CLOSE}")
        except Malformed as error:
            return Part("call", start, broken_end(text, start), name, error=f"{error}. A valid call: {self.form}")
        return Part("call", start, closed.end(), name, arguments, json.dumps(arguments, ensure_ascii=False))
