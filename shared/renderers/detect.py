"""Finds the renderer and the reader of calls that fit a checkpoint, when the checkpoint is imported.

The checkpoint's name decides nothing. This module renders the checkpoint's chat template and compares the text with the
text that a renderer writes and a reader reads.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shared.environments import Brief, Message, Result, ToolSpec
from shared.renderers import Tail
from shared.renderers.calls import CALLS, load_calls
from shared.renderers.chat import UnfitCheckpoint, read_json, result, schema_of, user
from shared.renderers.formats.chatml import BEGIN, END, PROMPTS, Card, ChatML
from shared.renderers.formats.jinja import WAY_OUT, parts_of
from shared.renderers.proof import MARKS, Bridge, Proof, prove
from shared.renderers.template import ChatTemplate, Refused
from shared.renderers.vocabulary import Vocabulary

_TOOL = ToolSpec(
    "read", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
)
# A family's name in the package `renderers`, by a control token that no other family has.
_PACKAGED = {
    "<｜tool▁calls▁begin｜>": "deepseek-v3",
    "<|tool_calls_section_begin|>": "kimi-k2",
    "<arg_key>": "glm-4.5",
    "<|python_tag|>": "llama-3",
}


def format_of(directory: Path) -> dict[str, Any]:
    """Return the fields of etude.json that the checkpoint's tokenizer and chat template prove: `format`, `calls`, `context` where
    config.json names one, and those of the format. A ChatML template without calls gets `hermes` by default. Raises UnfitCheckpoint
    with the reason and the way out."""
    vocabulary, template, ends = parts_of(directory)
    proof = prove(template, vocabulary, ends, {})
    if isinstance(proof, list):
        raise UnfitCheckpoint(f"its chat template: {'; '.join(dict.fromkeys(proof))}; {_way_out(vocabulary)}")
    calls = calls_of(template, vocabulary, ends)
    card = _chatml(template, vocabulary, ends, proof, calls)
    if card is None:
        if calls is None:
            raise UnfitCheckpoint(
                f"its chat template: no reader here reads the calls that it writes ({', '.join(CALLS)}); "
                f"{_way_out(vocabulary)}"
            )
        card = {"format": "jinja", "calls": calls}
    context = _context(directory)
    return card if context is None else {**card, "context": context}


def calls_of(template: ChatTemplate, vocabulary: Vocabulary, ends: Any) -> str | None:
    """Return the reader that reads a call as the template writes it; None: none does, or it writes none."""
    if template.calls_as is None:
        return None
    objects, nothing = template.calls_as
    arguments = {"path": "a b"}
    function = {"name": "read", "arguments": arguments if objects else '{"path": "a b"}'}
    message = {
        "role": "assistant",
        "content": nothing,
        "tool_calls": [{"id": "functions.read:0", "type": "function", "function": function}],
    }
    try:
        before = template.render([user("a")])
        text = template.render([user("a"), message, result("functions.read:0", "read", "b")])
    except Refused:
        return None
    same = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
    if same < len(
        before
    ):  # within what the prompt writes of the turn: the turn begins behind its last whole line or token
        same = max(text.rfind(mark, 0, same) for mark in ("\n", ">")) + 1
    turn = text[same:]
    spelling = vocabulary.spelling
    stops = [place for id in ends if id in spelling and (place := turn.find(spelling[id])) >= 0]
    turn = turn[: min(stops, default=len(turn))]
    for name in CALLS:
        calls = [part for part in load_calls(name).parts(turn) if part.kind == "call"]
        if [(call.name, call.arguments, call.error) for call in calls] == [("read", arguments, None)]:
            return name
    return None


def _chatml(
    template: ChatTemplate, vocabulary: Vocabulary, ends: Any, proof: Proof, calls: str | None
) -> dict[str, Any] | None:
    """Return the card of a ChatML template that writes Hermes' calls or no calls; None: the template is another one. A template
    that does not write tools gets Qwen's form in the system message."""
    if BEGIN not in vocabulary.control or END not in vocabulary.control or calls not in ("hermes", None):
        return None
    if "results" in proof.drops:
        return None
    alone = template.render([user("a")])
    first = re.match(rf"{re.escape(BEGIN)}system\n(.*?){re.escape(END)}\n", alone, re.DOTALL)
    prompt = alone.rpartition(f"{BEGIN}assistant\n")[2]
    thinks = any("<think>" in source for source in template.sources.values())
    thinking = {PROMPTS["open"]: "open", PROMPTS["closed"]: "closed", "": "model" if thinks else "none"}.get(prompt)
    if thinking is None or (calls is None and template.calls_as is not None):
        return None
    fields: dict[str, Any] = {
        "format": "chatml",
        "calls": "hermes",
        "system": first.group(1) if first else "",
        "thinking": thinking,
        "drops_thinking": thinks and "user" in proof.drops,
    }
    for results in ("user", "tool"):
        renderer = ChatML(vocabulary, Card(**{**fields, "context": 1 << 20, "results": results}), ends)
        if _equal(renderer, template, proof, ends):
            if not proof.tools:
                results = "user"  # no one taught it results: they come as Hermes' do
            return {**fields, "tools": "qwen", "results": results}
    return None


def _equal(renderer: ChatML, template: ChatTemplate, proof: Proof, ends: Any) -> bool:
    """Return whether openings and answers are the template's, id for id."""
    vocabulary = renderer.vocabulary
    for tools in ((), (_TOOL,)) if proof.tools else ((),):
        for system in ((), (Message("system", "Be good.\n"),)):
            brief = Brief((*system, Message("user", "\nFix a.py  ")), tools)
            messages = [{"role": message.role, "content": message.content} for message in brief.messages]
            try:
                theirs = template.render(messages, [schema_of(tool) for tool in tools])
            except Refused:
                return False
            if renderer.opening(brief) != vocabulary.ids(theirs):
                return False
    spelling = vocabulary.spelling
    bridge = Bridge(template, [spelling[id] for id in ends if id in spelling], {}, proof.anchor)
    tail = Tail([], [vocabulary.control[END]], Brief((), ()))
    for n in (1, 2):
        ids = [(f"call{i}", "read") for i in range(n)]
        results = [Result(call=id, tool=name, text=f" r{id}\n") for id, name in ids]
        following = [result(id, name, f" r{id}\n") for id, name in ids]
        message = bridge.said(MARKS[0], ids[:1] if proof.single else ids)
        _, theirs = bridge.behind([user("a")], message, following, MARKS[0])
        if renderer.answers(tail, results) != vocabulary.ids(theirs):
            return False
    return True


def _context(directory: Path) -> int | None:
    """Return how many tokens the checkpoint's files allow a context; None: they do not say."""
    named = [
        read_json(directory / "config.json").get("max_position_embeddings"),
        read_json(directory / "tokenizer_config.json").get("model_max_length"),
    ]
    sound = [n for n in named if isinstance(n, int) and not isinstance(n, bool) and 0 < n < 1 << 30]
    return min(sound, default=None)


def _way_out(vocabulary: Vocabulary) -> str:
    name = next((name for token, name in _PACKAGED.items() if token in vocabulary.control), None)
    return f"{WAY_OUT} (here: `--format renderers:{name}`)" if name else WAY_OUT
