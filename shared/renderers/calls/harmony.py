"""Calls as gpt-oss writes them (Harmony). Every message of the assistant has a channel; one to a function is a call.

    <|channel|>analysis<|message|>thinking<|end|>
    <|start|>assistant<|channel|>commentary to=functions.read <|constrain|>json<|message|>{"path": "a.py"}<|call|>
    <|start|>assistant<|channel|>final<|message|>what the user reads<|return|>

The prompt ends with `<|start|>assistant`, so a completion begins within a head.
"""

from __future__ import annotations

import json
import re

from shared.renderers.calls import Malformed, Part, Schemas, json_object

START, MESSAGE, CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
_ENDS = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")
_TO = re.compile(r"to=(\S+?)(?=\s|<\||$)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class Harmony:
    name = "harmony"
    form = '<|channel|>commentary to=functions.TOOL <|constrain|>json<|message|>{"ARGUMENT": VALUE}<|call|>'
    marks = (START, MESSAGE, CHANNEL, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
    opens = (CHANNEL, START)

    def parts(self, text: str, thinking: bool = False, schemas: Schemas | None = None) -> list[Part]:
        parts: list[Part] = []
        at = 0
        while at < len(text):
            body = text.find(MESSAGE, at)
            if body < 0 or CHANNEL not in text[at:body]:
                called = _TO.search(text, at) if CHANNEL in text[at:] else None
                if called is not None:
                    name = called.group(1).removeprefix("functions.")
                    parts.append(
                        Part("call", at, len(text), name, error=f"the call has no {MESSAGE}. A valid call: {self.form}")
                    )
                else:
                    parts.append(Part("mark" if CHANNEL in text[at:] or START in text[at:] else "text", at, len(text)))
                break
            head = text[at:body]
            ended = _ENDS.search(text, body + len(MESSAGE))
            stop, end = (ended.start(), ended.end()) if ended else (len(text), len(text))
            parts += self._message(text, head, at, body + len(MESSAGE), stop, end)
            at = end
        return parts

    def _message(self, text: str, head: str, start: int, body: int, stop: int, end: int) -> list[Part]:
        to = _TO.search(head)
        channel = _CHANNEL.search(head)
        if to is not None and to.group(1) not in ("assistant", "user"):
            return [self._call(text[body:stop], to.group(1), start, end)]
        kind = "thinking" if channel is not None and channel.group(1) == "analysis" else "text"
        parts = [Part("mark", start, body), Part(kind, body, stop)]  # type: ignore[arg-type]
        return [*parts, Part("mark", stop, end)] if end > stop else parts

    def _call(self, body: str, to: str, start: int, end: int) -> Part:
        name = to.removeprefix("functions.")
        try:
            if not to.startswith("functions.") or not name:
                raise Malformed(f"to: found {to!r:.80}; allowed: functions.TOOL")
            arguments = json_object(body)
        except Malformed as error:
            return Part("call", start, end, name, error=f"{error}. A valid call: {self.form}")
        return Part("call", start, end, name, arguments, json.dumps(arguments, ensure_ascii=False))
