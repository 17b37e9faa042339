"""Messages to token ids, as the checkpoint itself says: its tokenizer, and its chat template (Jinja).

The template is a program that comes with the weights. It runs in Jinja's sandbox, with the same names and filters as in
transformers, and so gives the same ids (tested); transformers itself is no dependency of a service.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from services.inference.chat.calls import CLOSE, OPEN
from services.inference.wire import BadRequest

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"


class ChatTemplate:
    """A checkpoint's tokenizer and templates: `default`, and where it has one for tools, `tool_use`. `names`: its special tokens,
    for the templates. `stop_tokens`: end an answer. `hidden`: tokens that are no text."""

    def __init__(
        self, tokenizer: Tokenizer, templates: Mapping[str, jinja2.Template], names: Mapping[str, str], ends: set[int]
    ) -> None:
        self.tokenizer, self._templates, self._names = tokenizer, templates, names
        special = {
            id
            for id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
            and token.content not in (OPEN, CLOSE)  # a call's tags are text, whatever they are marked as
        }
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)
        self.stop_tokens = frozenset(ends)
        self.hidden = frozenset(special | ends)

    def prompt(
        self, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None, more: Mapping[str, Any], *, context: int
    ) -> list[int]:
        """The ids that an answer to the messages goes on from, at most `context` of them. Raises BadRequest."""
        template = self._templates.get("tool_use" if tools else "default", self._templates["default"])
        given = {**self._names, **more, "messages": turns, "tools": tools, "documents": None}
        try:
            text = template.render({**given, "add_generation_prompt": True})
        except Exception as error:  # it may raise whatever it likes at what it was not written for
            said = str(error) or type(error).__name__
            raise BadRequest(f"messages: the checkpoint's chat template refuses them: {said[:500]}") from None
        if (
            len(text) > context * self._longest
        ):  # known without the time and the memory that it would take to count them
            raise BadRequest(f"messages: with the tools they are {len(text)} characters; allowed: {context} tokens")
        ids = list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        if not 0 < len(ids) <= context:
            raise BadRequest(f"messages: with the tools they are {len(ids)} tokens; allowed: 1..{context}")
        return ids


def load(directory: Path) -> ChatTemplate:
    """Of a checkpoint directory. Raises BadRequest where it has none, or none that can be read."""
    try:
        config = _json(directory / CONFIG)
        sources = _sources(directory, config)
        if "default" not in sources or not (directory / "tokenizer.json").is_file():
            lacks = "tokenizer.json" if sources else f"chat template ({FILE}, or `chat_template` in {CONFIG})"
            raise BadRequest(
                f"messages: the served checkpoint has no {lacks}, and so no text can be written for it; send token ids to "
                "/generate, or serve a checkpoint that has one"
            )
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        names = {name: text for name, value in config.items() if name.endswith("_token") and (text := _token(value))}
        environment = _environment()
        templates = {name: environment.from_string(source) for name, source in sources.items()}
        return ChatTemplate(tokenizer, templates, names, _ends(directory, tokenizer, names))
    except BadRequest:
        raise
    except Exception as error:  # the tokenizers package raises nothing narrower
        said = str(error).replace(f"{directory}/", "")
        raise BadRequest(f"messages: the served checkpoint's chat template cannot be read: {said[:500]}") from None


def _sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name; a file goes before the configuration."""
    path = directory / FILE
    found = path.read_text() if path.is_file() else config.get("chat_template")
    if isinstance(found, list):
        return {entry["name"]: entry["template"] for entry in found}
    return {"default": found} if found else {}


def _token(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else value if isinstance(value, str) else ""


def _ends(directory: Path, tokenizer: Tokenizer, names: Mapping[str, str]) -> set[int]:
    """Tokens that end an answer, whichever of the checkpoint's files names them."""
    found = [tokenizer.token_to_id(names["eos_token"])] if "eos_token" in names else []
    for name in ("generation_config.json", "config.json"):
        named = _json(directory / name).get("eos_token_id")
        found += named if isinstance(named, list) else [named]
    return {id for id in found if isinstance(id, int)}


def _json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}


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
    """Jinja's own writes < and > as escapes, and no model was taught so."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **more)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
