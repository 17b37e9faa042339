"""Calls between control tokens: Kimi K2's sections and DeepSeek's.

kimi              <|tool_calls_section_begin|><|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…
                  <|tool_calls_section_end|>
deepseek          <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…<｜tool▁calls▁end｜>
deepseek-fenced   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read↵```json↵{…}↵```<｜tool▁call▁end｜>…
"""

from __future__ import annotations

import json
import re
from typing import Any

from shared.renderers.calls import MAX_CALLS, Malformed, Part, Schemas, json_object, json_value, tagged
from shared.renderers.calls.hermes import past_space


class Sections:
    """Reads calls that stand in a section; base class of the formats below.

    The section stands between `begin` and `end`. Each call in it stands between `call` and `call_end`, with `separator`
    between its head and its arguments. A subclass gives these marks and reads the head.
    """

    name: str
    form: str
    begin: str
    end: str
    call: str
    separator: str
    call_end: str

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin, self.end, self.call, self.separator, self.call_end

    @property
    def opens(self) -> tuple[str, ...]:
        return self.begin, self.call

    def parts(self, text: str, thinking: bool = False, schemas: Schemas | None = None) -> list[Part]:
        return tagged(text, thinking, self.opens, lambda start: self._section(text, start))

    def head(self, head: str, body: str) -> tuple[str, str, dict[str, Any]]:
        """Return name, id and arguments of a call. Raises Malformed."""
        raise NotImplementedError

    def _section(self, text: str, start: int) -> list[Part]:
        """Return the marks and calls that follow one another without other text, MAX_CALLS calls at most."""
        parts: list[Part] = []
        at, calls = start, 0
        while True:
            mark = next((tag for tag in (self.begin, self.end) if text.startswith(tag, at)), None)
            if mark is not None:
                parts.append(Part("mark", at, at + len(mark)))
            elif text.startswith(self.call, at) and calls < MAX_CALLS:
                parts.append(self._call(text, at))
                calls += 1
            else:
                return parts
            at = parts[-1].end
            space = past_space(text, at)
            if any(text.startswith(tag, space) for tag in (self.call, self.end)) and space > at:
                parts.append(Part("mark", at, space))
                at = space

    def _call(self, text: str, start: int) -> Part:
        body = start + len(self.call)
        stops = [found for tag in (self.call, self.end, self.begin) if (found := text.find(tag, body)) >= 0]
        end = text.find(self.call_end, body)
        separator = text.find(self.separator, body)
        if separator >= 0 and (end < 0 or separator < end):
            end = _past_object(text, separator + len(self.separator), self.call_end, end)
            stops = [stop for stop in stops if end < 0 or stop > end]
        whole = end >= 0 and all(end < stop for stop in stops)
        stop = end + len(self.call_end) if whole else min(stops, default=len(text))
        inside = text[body : end if whole else stop]
        head, divided, rest = inside.partition(self.separator)
        name = self.seems(head, rest)
        try:
            if not divided:
                raise Malformed(f"found no {self.separator} behind the head of the call")
            if not whole:
                raise Malformed(f"found no {self.call_end} behind the arguments")
            name, id, arguments = self.head(head, rest)
        except Malformed as error:
            return Part("call", start, stop, name, error=f"{error}. A valid call: {self.form}")
        return Part("call", start, stop, name, arguments, json.dumps(arguments, ensure_ascii=False), id)

    def seems(self, head: str, rest: str) -> str:
        """Return the tool that a call seems to mean; empty where it names none."""
        return head.strip()[:64]


class Kimi(Sections):
    name = "kimi"
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call, separator, call_end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    form = f"{begin}{call}functions.TOOL:NUMBER{separator}" + '{"ARGUMENT": VALUE}' + f"{call_end}{end}"

    def head(self, head: str, body: str) -> tuple[str, str, dict[str, Any]]:
        id = head.strip()
        found = re.fullmatch(r"(?:functions\.)?([A-Za-z0-9_.-]+):(\d+)", id)
        if found is None:
            raise Malformed(f"found the id {id!r:.80}; allowed: functions.TOOL:NUMBER")
        return found.group(1), id, json_object(body)

    def seems(self, head: str, rest: str) -> str:
        return head.strip().removeprefix("functions.").partition(":")[0][:64]


class DeepSeek(Sections):
    name = "deepseek"
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call, separator, call_end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    form = f"{begin}{call}TOOL{separator}" + '{"ARGUMENT": VALUE}' + f"{call_end}{end}"

    def head(self, head: str, body: str) -> tuple[str, str, dict[str, Any]]:
        name = head.strip()
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise Malformed(f"found the name {name!r:.80}; allowed: a tool's name")
        return name, "", json_object(body)


class DeepSeekFenced(DeepSeek):
    name = "deepseek-fenced"
    form = (
        f"{DeepSeek.begin}{DeepSeek.call}function{DeepSeek.separator}TOOL\n```json\n"
        + '{"ARGUMENT": VALUE}'
        + f"\n```{DeepSeek.call_end}{DeepSeek.end}"
    )

    def head(self, head: str, body: str) -> tuple[str, str, dict[str, Any]]:
        if head.strip() != "function":
            raise Malformed(f"found {head.strip()!r:.40} before {self.separator}; allowed: function")
        found = re.fullmatch(r"\s*([A-Za-z0-9_.-]+)\s*```(?:json)?\s*\n(.*?)\s*```\s*", body, re.DOTALL)
        if found is None:
            raise Malformed("found no name with a fenced block of JSON behind it")
        return found.group(1), "", json_object(found.group(2))

    def seems(self, head: str, rest: str) -> str:
        return rest.lstrip().partition("\n")[0].strip()[:64]


def _past_object(text: str, at: int, close: str, found: int) -> int:
    """Return the place of the tag that closes a call, or -1. A string in the arguments may spell that tag too, and is skipped."""
    begin = text.find("{", at)
    if begin < 0 or (0 <= found < begin):
        return found
    try:
        _, end = json_value(text, begin, "")
    except Malformed:
        return found
    return text.find(close, end)
