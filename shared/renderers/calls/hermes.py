"""Calls as Hermes, Qwen2.5 and Qwen3 write them, and the list of them that SmolLM2 was taught.

<tool_call>                                              <tool_call>[
{"name": "read", "arguments": {"path": "a.py"}}          {"name": "read", "arguments": {"path": "a.py"}}
</tool_call>                                             ]</tool_call>
"""

from __future__ import annotations

import re
from typing import Any

from shared.renderers.calls import DECODER, Malformed, Part, Schemas, json_value, kind_of, tagged

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")


class Hermes:
    name = "hermes"
    form = '<tool_call>\n{"name": "TOOL", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>'
    marks = (OPEN, CLOSE)
    opens = (OPEN,)

    def parts(self, text: str, thinking: bool = False, schemas: Schemas | None = None) -> list[Part]:
        return tagged(text, thinking, self.opens, lambda start: self._call(text, start))

    def _call(self, text: str, start: int) -> list[Part]:
        """Read the call at `start`. Parse the object as JSON before looking for the closing tag: a string in it may hold one."""
        at = past_space(text, start + len(OPEN))
        try:
            value, end = json_value(text, at, "the call")
            name, arguments = _fields(value)
        except Malformed as error:
            return [self._broken(text, start, str(error), name_in(text[at : _end(text, start)]))]
        close = past_space(text, end)
        if not text.startswith(CLOSE, close):
            found = repr(text[close : close + 20]) if close < len(text) else "the end"
            return [self._broken(text, start, f"after the object came {found}; allowed: {CLOSE}", name)]
        return [Part("call", start, close + len(CLOSE), name, arguments, written_arguments(text, at, end))]

    def _broken(self, text: str, start: int, reason: str, name: str = "") -> Part:
        return Part("call", start, _end(text, start), name, error=f"{reason}. A valid call: {self.form}")


class HermesList(Hermes):
    """One pair of tags holds an array of calls; a lone object is read too. The first call's range has the opening tag, the last
    call's the closing one."""

    name = "hermes-list"
    form = '<tool_call>[\n{"name": "TOOL", "arguments": {"ARGUMENT": VALUE}}\n]</tool_call>'

    def _call(self, text: str, start: int) -> list[Part]:
        at = past_space(text, start + len(OPEN))
        if not text.startswith("[", at):
            return super()._call(text, start)
        parts: list[Part] = []
        begin, at = start, past_space(text, at + 1)
        while not text.startswith("]", at):
            try:
                value, end = json_value(text, at, "the call")
                name, arguments = _fields(value)
            except Malformed as error:
                parts.append(self._broken(text, begin, str(error), name_in(text[at : _end(text, begin)])))
                return parts
            parts.append(Part("call", begin, end, name, arguments, written_arguments(text, at, end)))
            at = past_space(text, end)
            if text.startswith(",", at):
                at = past_space(text, at + 1)
            elif not text.startswith("]", at):
                last = parts.pop()
                parts.append(self._broken(text, last.start, "the array of calls has no end", last.name))
                return parts
            begin = end
        close = past_space(text, at + 1)
        if not text.startswith(CLOSE, close):
            begin, name = (parts[-1].start, parts.pop().name) if parts else (start, "")
            parts.append(self._broken(text, begin, f"the array of calls is not followed by {CLOSE}", name))
            return parts
        end = close + len(CLOSE)
        if not parts:
            return [Part("mark", start, end)]  # SmolLM2's way to say that it calls nothing
        last = parts[-1]
        parts[-1] = Part("call", last.start, end, last.name, last.arguments, last.written)
        return parts


def past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def written_arguments(text: str, start: int, end: int) -> str:
    """Return the value of `arguments` within the object [start, end), as it is written."""
    at = past_space(text, start + 1)
    while at < end:
        key, at = DECODER.raw_decode(text, at)
        at = past_space(text, past_space(text, at) + 1)  # the colon
        _, stop = DECODER.raw_decode(text, at)
        if key == "arguments":
            return text[at:stop]
        at = past_space(text, past_space(text, stop) + 1)  # the comma
    return ""


def name_in(text: str) -> str:
    """Return the tool that a broken call seems to mean; empty where it names none."""
    found = re.search(r'"name"\s*:\s*"([^"\\]{1,64})"', text)
    return found.group(1) if found else ""


def _fields(value: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(value, dict):
        raise Malformed(f"the call is {kind_of(value)}; allowed: an object with the keys name and arguments")
    if sorted(value) != ["arguments", "name"]:
        raise Malformed(f"found the keys {', '.join(sorted(value))[:120] or 'none'}; allowed: name, arguments")
    name, arguments = value["name"], value["arguments"]
    if not isinstance(name, str) or not name:
        raise Malformed(f"name: found {kind_of(name)}; allowed: a string that names a tool")
    if not isinstance(arguments, dict):
        raise Malformed(f"arguments: found {kind_of(arguments)}; allowed: an object")
    return name, arguments


def _end(text: str, start: int) -> int:
    """Return the place where a broken call ends: behind its closing tag, before the next opening one, or at the end of the text."""
    close, following = text.find(CLOSE, start), text.find(OPEN, start + len(OPEN))
    if close >= 0 and (following < 0 or close < following):
        return close + len(CLOSE)
    return following if following >= 0 else len(text)
