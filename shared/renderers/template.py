"""A checkpoint's own chat template (Jinja): messages to text, as transformers renders them.

The template is a program that comes with the weights. It runs in Jinja's sandbox, with the same names and filters as in
transformers, and so gives the same text (tested); transformers itself is no dependency of a service.

Files are read as transformers 5 reads them: `chat_template.jinja` before `chat_template` of tokenizer_config.json, and each
`additional_chat_templates/NAME.jinja` by its name. A template named `tool_use` is taken where tools are given.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.renderers.chat import token_text

FILE, CONFIG, MORE = "chat_template.jinja", "tokenizer_config.json", "additional_chat_templates"


class BadTemplate(ValueError):
    """A template that cannot be read; the text says why."""


class Refused(ValueError):
    """A template refuses the messages; the text is what it said."""


class ChatTemplate:
    """Renders messages with a checkpoint's templates.

    `sources`: the text of each template, by its name; `default` must be among them. `names`: the checkpoint's special
    tokens, by the names that templates use for them (e.g. `bos_token`).
    """

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, str]) -> None:
        self.sources, self._names = dict(sources), dict(names)
        environment = _environment()
        self._templates = {name: environment.from_string(source) for name, source in sources.items()}

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """Return the templates of a checkpoint directory; None where it has none. Raises BadTemplate."""
        try:
            config = json.loads((directory / CONFIG).read_text()) if (directory / CONFIG).is_file() else {}
            sources = _sources(directory, config)
            if "default" not in sources:
                return None
            names = {
                name: text for name, value in config.items() if name.endswith("_token") and (text := token_text(value))
            }
            return cls(sources, names)
        except Exception as error:  # a template may be anything, and so may what Jinja raises at it
            said = str(error).replace(f"{directory}/", "")
            raise BadTemplate(f"the chat template cannot be read: {said[:500]}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] | None = None,
        *,
        prompt: bool = True,
    ) -> str:
        """Return the conversation as text. `more`: further names for the template. `prompt`: with what it writes before a
        generation. Raises Refused."""
        template = self._templates.get("tool_use" if tools else "default", self._templates["default"])
        given = {**self._names, **(more or {}), "messages": list(messages), "tools": list(tools) if tools else None}
        try:
            return str(template.render({**given, "documents": None, "add_generation_prompt": prompt}))
        except Exception as error:  # it may raise whatever it likes at what it was not written for
            raise Refused((str(error) or type(error).__name__)[:500]) from None

    @functools.cached_property
    def for_tools(self) -> ChatTemplate:
        """Return the template that is taken where tools are given, alone: only it may write calls, or another form of them."""
        source = self.sources.get("tool_use")
        return self if source is None else ChatTemplate({"default": source}, self._names)

    @functools.cached_property
    def writes_tools(self) -> bool:
        """Return whether the prompt contains the tools that are offered."""
        return self._writes([_USER], [_MARK], tools=[PROBE_TOOL])

    @functools.cached_property
    def calls_as(self) -> tuple[bool, str | None] | None:
        """Return (arguments as objects?, empty content) of the first combination with which the template writes a call, or None
        if it writes no calls. Objects are tried before JSON in a string, null before ''."""
        for objects in (True, False):
            for nothing in (None, ""):
                if self._writes(*_called(1, objects, nothing), without=("None", _REPR)):
                    return objects, nothing
        return None

    @functools.cached_property
    def writes_several(self) -> bool:
        """Return whether two calls of one turn are both written. gpt-oss writes the first, Llama 3.1 refuses two."""
        return self.calls_as is not None and self._writes(*_called(2, *self.calls_as))

    @functools.cached_property
    def writes_beside_text(self) -> bool:
        """Return whether a call is written in a turn that has text too. DeepSeek-V3 writes the text alone."""
        return self.calls_as is not None and self._writes(*_called(1, self.calls_as[0], "a"))

    @functools.cached_property
    def thought_as(self) -> str | None:
        """Return the field of a message in which the template looks for thinking, or None if it writes none. gpt-oss and LFM2.5
        say `thinking`."""
        spoken = {"role": "assistant", "content": "a"}
        for name in ("reasoning_content", "reasoning", "thinking"):
            turns = [[_USER, spoken | {name: _THOUGHT}]]
            if self.calls_as is not None:
                (_, called, *answers), _ = _called(1, *self.calls_as)
                turns.append([_USER, called | {name: _THOUGHT}, *answers])
            if any(self._writes(messages, [_THOUGHT]) for messages in turns):
                return name
        return None

    def _writes(
        self,
        messages: Sequence[Mapping[str, Any]],
        marks: Sequence[str],
        *,
        tools: Any = None,
        without: Sequence[str] = (),
    ) -> bool:
        try:
            text = self.render(messages, tools)
        except Refused:
            return False
        return all(mark in text for mark in marks) and not any(word in text for word in without)


def _called(number: int, objects: bool, content: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a conversation with so many calls in one turn and their results, and a word of each call's arguments."""
    marks = [f"{_CALL}{i}" for i in range(number)]
    ids = [f"call0000{i}" for i in range(number)]  # Mistral's templates want nine characters
    arguments: list[Any] = [{"path": mark} if objects else json.dumps({"path": mark}) for mark in marks]
    calls = [
        {"type": "function", "id": id, "function": {"name": _MARK, "arguments": of}}
        for id, of in zip(ids, arguments, strict=True)
    ]
    results = [{"role": "tool", "tool_call_id": id, "name": _MARK, "content": "a"} for id in ids]
    return [_USER, {"role": "assistant", "content": content, "tool_calls": calls}, *results], marks


_MARK, _CALL, _THOUGHT = "qzxkw", "Qzxkw", "QZxkw"  # no template has these words
_REPR = f"'path': '{_CALL}"  # an object that was joined to text: Python's spelling, and no JSON
_USER = {"role": "user", "content": "a"}
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _MARK,
        "description": _MARK,
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "description": "a"}},
            "required": ["path"],
        },
    },
}


def _sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates' text by name. If there is any file, the configuration is not read, as in transformers."""
    files = (
        {path.stem: path for path in sorted((directory / MORE).glob("*.jinja"))} if (directory / MORE).is_dir() else {}
    )
    if (directory / FILE).is_file():
        files["default"] = directory / FILE
    if files:
        return {name: path.read_text() for name, path in files.items()}
    found = config.get("chat_template")
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}
    return {"default": found} if found else {}


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks for trainers what an assistant said; here it is read over."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, **more: Any) -> str:
    """Return a value as JSON. Jinja's own filter escapes < and >, which models have not been trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **more)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
