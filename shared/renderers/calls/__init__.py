"""Readers of tool calls: one for each form in which models write them. A checkpoint's card names its own (`calls`).

A reader splits a completion's text, control tokens visible, into parts. Nothing is lost: the parts cover the text in order.
A call that cannot be executed as it is written is a call part with an `error`, which says what is wrong and shows the valid
form. A call inside `<think>` is not executed: it counts as thinking.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

MAX_CALLS = 64  # read in one message: a model that repeats a tag without end costs no more time than one that does not
_TOO_MANY = f"found more than {MAX_CALLS} calls in one message. Write each further valid call in the next message"

Kind = Literal["text", "thinking", "call", "mark"]
Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """Characters [start, end) of a text. `mark`: structure that no one reads. Of a call: `written` is its arguments as the
    model wrote them, where they are JSON; `id` the name that the model gave the call, empty where it gave none."""

    kind: Kind
    start: int
    end: int
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    written: str = ""
    id: str = ""
    error: str | None = None


class Calls(Protocol):
    name: str
    form: str  # a valid call, as an example

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the spellings of control tokens that the reader needs to see."""

    @property
    def opens(self) -> tuple[str, ...]:
        """Return the spellings that begin a call."""

    def parts(self, text: str, thinking: bool = False, schemas: Schemas | None = None) -> list[Part]:
        """Split a completion into its parts: calls, thinking, text and marks. Never raises.

        `thinking`: True: the prompt has already opened a block of thinking, so the completion begins inside it.
        `schemas`: the JSON schema of each tool's parameters, by the tool's name; None: none is known, so a form that
        writes no types (XML) gives every value as text.
        """


class UnknownCalls(ValueError):
    """A card names a form of calls that no reader here knows."""


def _hermes() -> Calls:
    from shared.renderers.calls.hermes import Hermes

    return Hermes()


def _hermes_list() -> Calls:
    from shared.renderers.calls.hermes import HermesList

    return HermesList()


def _qwen_xml() -> Calls:
    from shared.renderers.calls.qwen_xml import QwenXml

    return QwenXml()


def _kimi() -> Calls:
    from shared.renderers.calls.sections import Kimi

    return Kimi()


def _deepseek() -> Calls:
    from shared.renderers.calls.sections import DeepSeek

    return DeepSeek()


def _deepseek_fenced() -> Calls:
    from shared.renderers.calls.sections import DeepSeekFenced

    return DeepSeekFenced()


def _glm() -> Calls:
    from shared.renderers.calls.glm import Glm

    return Glm()


def _harmony() -> Calls:
    from shared.renderers.calls.harmony import Harmony

    return Harmony()


def _llama() -> Calls:
    from shared.renderers.calls.llama import Llama

    return Llama()


CALLS: dict[str, Callable[[], Calls]] = {
    "hermes": _hermes,
    "hermes-list": _hermes_list,
    "qwen-xml": _qwen_xml,
    "kimi": _kimi,
    "deepseek": _deepseek,  # V3.1: name, separator, arguments
    "deepseek-fenced": _deepseek_fenced,  # V3, R1: arguments in a fenced block
    "glm": _glm,
    "harmony": _harmony,
    "llama": _llama,
}


def load_calls(name: Any) -> Calls:
    """Return the reader of that name. Raises UnknownCalls."""
    if not isinstance(name, str) or name not in CALLS:
        raise UnknownCalls(f"calls: found {name!r:.80}; allowed: {', '.join(CALLS)}")
    return CALLS[name]()


# What readers share


class Malformed(Exception):
    """A call that cannot be read; the text says why."""


def json_object(text: str, what: str = "the arguments") -> dict[str, Any]:
    """Return the object that the text is. Raises Malformed."""
    text = text.strip()
    value, end = json_value(text, 0, what)
    if end < len(text):
        raise Malformed(f"after {what} came {text[end : end + 20]!r}; allowed: one JSON object")
    if not isinstance(value, dict):
        raise Malformed(f"{what} are {kind_of(value)}; allowed: a JSON object")
    return value


def json_value(text: str, at: int, what: str) -> tuple[Any, int]:
    """Return the JSON value that begins at a character, and where it ends. Stricter than Python's reader: no NaN, no
    number without bounds, no key twice, no half characters. Raises Malformed."""
    try:
        value, end = DECODER.raw_decode(text, at)
        text[at:end].encode()
        if "\\u" in text[at:end]:  # escapes may spell half a character
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise Malformed(f"{what}: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise Malformed(f"{what}: no JSON ({error.msg} at character {error.pos - at} of it)") from None
    except ValueError as error:
        raise Malformed(f"{what}: no JSON ({error})"[:300]) from None
    if "\ufffd" in text[at:end]:
        raise Malformed(f"{what}: bytes that are no UTF-8")
    return value, end


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large")
    return number


DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def kind_of(value: Any) -> str:
    kinds = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return kinds.get(type(value), "null")


def tagged(
    text: str,
    thinking: bool,
    opens: Sequence[str],
    read: Callable[[int], list[Part]],
    think: tuple[str, str] = ("<think>", "</think>"),
) -> list[Part]:
    """Return the parts of a text in which calls begin with one of `opens`. `read` returns the parts from such a place on,
    at least one of them, each with an end behind that place. Behind MAX_CALLS calls the rest of the text is one broken call."""
    parts: list[Part] = []
    at = done = calls = 0
    tags = (*opens, think[0])
    places = dict.fromkeys(tags, -1)  # where each tag next stands; the text's length: nowhere
    if thinking:
        at = done = _thought(text, 0, think[1], parts)
    while at < len(text):
        for tag in tags:
            if places[tag] < at:
                places[tag] = found if (found := text.find(tag, at)) >= 0 else len(text)
        start, tag = min((places[tag], tag) for tag in tags)
        if start == len(text):
            break
        if start > done:
            parts.append(Part("text", done, start))
        if tag == think[0]:
            at = done = _thought(text, start, think[1], parts)
        elif calls >= MAX_CALLS:
            parts.append(Part("call", start, len(text), error=_TOO_MANY))
            at = done = len(text)
        else:
            found_parts = read(start)
            parts += found_parts
            calls += sum(part.kind == "call" for part in found_parts)
            at = done = parts[-1].end
    if done < len(text):
        parts.append(Part("text", done, len(text)))
    return parts


def _thought(text: str, start: int, close: str, parts: list[Part]) -> int:
    """Add the thinking that begins at `start` and return its end. Without a closing tag, the rest of the text is thinking."""
    found = text.find(close, start)
    end = len(text) if found < 0 else found + len(close)
    parts.append(Part("thinking", start, end))
    return end
