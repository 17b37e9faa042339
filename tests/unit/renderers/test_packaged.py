"""The families of the package `renderers`, behind our Protocol; where it is installed (`make renderers`)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from shared.environments import Brief, Message, Result
from shared.renderers import Exchange, Tail
from shared.renderers.chat import UnfitCheckpoint
from shared.renderers.formats.renderers import Packaged, families
from tests.renderer_checkpoints import CHATML, DEEPSEEK, GLM, KIMI, LLAMA, QWEN, QWEN35, write
from tests.unit.renderers.conversation import Seen, conversations
from tests.unit.renderers.test_chat_openings import TOOLS, briefs, needs_trl, published, theirs

CONVERSATIONS = int(os.environ.get("ETUDE_CONVERSATIONS", "12"))
HERE = importlib.util.find_spec("renderers") is not None
installed = pytest.mark.skipif(not HERE, reason="the package renderers is not installed (make renderers)")
# Name in the package: tokens of the family, how a turn ends, how a text begins, the reader of calls.
SERVED: dict[str, tuple[Any, str, str | None, str]] = {
    "deepseek-v3": (DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "deepseek-fenced"),
    "kimi-k2": (KIMI, "<|im_end|>", None, "kimi"),
    "glm-4.5": (GLM, "<|user|>", None, "glm"),
    "llama-3": (LLAMA, "<|eot_id|>", "<|begin_of_text|>", "llama"),
    "qwen3": (QWEN, "<|im_end|>", None, "hermes"),
    "qwen3.5": (QWEN35, "<|im_end|>", None, "qwen-xml"),
}
PUBLISHED = {"glm-4.5": "glm4moe", "qwen3": "qwen3", "qwen3.5": "qwen3_5_think"}


def packaged(directory: Path, name: str, jinja: str | None = None, **card: Any) -> Packaged:
    family, end, begin, calls = SERVED[name]
    about = {"format": f"renderers:{name}", "context": 1 << 24, **card}
    write(directory, family, jinja, end=end, begin=begin, card=about)
    renderer = Packaged.load(directory)
    assert renderer.calls.name == calls
    return renderer


@installed
@pytest.mark.parametrize("name", list(SERVED))
def test_what_is_recorded_is_what_the_engine_saw(tmp_path: Path, name: str) -> None:
    renderer, seen = packaged(tmp_path, name), Seen()
    thinks = "model" if name in ("qwen3", "qwen3.5", "glm-4.5") else "no"
    conversations(CONVERSATIONS, renderer, None, thinks, seen)()
    if path := os.environ.get("ETUDE_CONVERSATIONS_OUT"):
        with open(path, "a") as file:
            file.write(seen.line(renderer.name) + "\n")


@installed
@needs_trl
@pytest.mark.parametrize("name", list(PUBLISHED))
def test_openings_are_those_of_the_published_template(tmp_path, name):
    renderer = packaged(tmp_path, name, published(PUBLISHED[name]))
    for brief in briefs():
        if brief.messages[-1].content.strip():
            assert renderer.opening(brief) == theirs(tmp_path, brief)


@installed
@pytest.mark.parametrize("name", list(SERVED))
def test_a_summary_stands_in_the_opening_as_it_was_sampled(tmp_path, name):
    renderer = packaged(tmp_path, name)
    summary = renderer.vocabulary.plain("I have read a.py; line 3 is wrong.")
    opening = renderer.opening(briefs()[1], summary)
    at = next(i for i in range(len(opening)) if opening[i : i + len(summary)] == summary)
    assert renderer.text(opening[:at]).endswith("Your own summary of that work:\n")
    assert renderer.text(opening[at + len(summary) :]) in renderer.text(renderer.opening(briefs()[1]))


@installed
def test_results_go_by_the_names_that_the_model_gave_its_calls(tmp_path):
    renderer = packaged(tmp_path, "kimi-k2")
    brief = Brief((Message("user", "a"),), TOOLS)
    form = (
        renderer.calls.form.replace("TOOL", "read").replace("NUMBER", "7").replace('"ARGUMENT": VALUE', '"path": "a"')
    )
    context, completion = renderer.opening(brief), [*renderer.vocabulary.ids(form), renderer.stop_tokens[0]]
    (call,) = renderer.reading(completion, context).calls
    answer = renderer.answers(Tail(context, completion, brief), [Result(call=call.id, tool="read", text="x")])
    assert "functions.read:7" in renderer.text(answer)


@installed
def test_turns_that_are_over_are_written_out(tmp_path):
    renderer = packaged(tmp_path, "qwen3")
    brief = Brief((Message("user", "a"),), TOOLS)
    said = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
    completion = [*renderer.vocabulary.ids(said), renderer.stop_tokens[0]]
    (call,) = renderer.reading(completion, []).calls
    results = (Result(call=call.id, tool="read", text="r1"), Result(text="go on"))
    text = renderer.text(renderer.opening(brief, history=[Exchange(tuple(completion), results)]))
    assert all(word in text for word in ('{"path": "a"}', "r1", "go on"))
    assert "hm" not in text


@installed
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "renderers:gpt-oss"}, ["renderers:gpt-oss", "jinja"]),
        ({"format": "renderers:nothing"}, ["renderers:nothing", "refuses"]),
        ({"calls": "none"}, ["calls", "'none'", "kimi"]),
        ({"template": {"no_such": 1}}, ["refuses", "no_such"]),
        ({"context": "long"}, ["context"]),
        ({"format": "renderers:deepseek-v3"}, ["refuses", "allowed"]),
    ],
)
def test_a_card_that_cannot_be_followed_is_refused_by_field(tmp_path, change, words):
    with pytest.raises(UnfitCheckpoint) as refused:
        packaged(tmp_path, "kimi-k2", **change)
    assert all(word in str(refused.value) for word in words), str(refused.value)


@installed
def test_the_packages_families_are_known_by_name():
    assert {"kimi-k2", "deepseek-v3", "glm-5", "qwen3.5"} <= set(families())


@pytest.mark.skipif(HERE, reason="the package renderers is installed")
def test_without_the_package_the_way_to_it_is_named(tmp_path):
    card = {"format": "renderers:kimi-k2", "context": 1 << 16, "calls": "kimi"}
    write(tmp_path, CHATML, card=card)
    with pytest.raises(UnfitCheckpoint, match=r"etude\[renderers\]"):
        Packaged.load(tmp_path)
