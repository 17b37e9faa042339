"""Random conversations of an agent with a stand-in for the engine, recorded as the rollout records them.

Hypothesis draws what is said; a seed that it draws too decides how several conversations are put together of it. A drawing costs
as much as a conversation."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.rollout.generation import Generation
from services.rollout.recorder import Part, Recorder
from shared.environments import Brief, Message, Result, ToolSpec
from shared.renderers import Exchange, Renderer, Tail
from shared.renderers.chat import schema_of
from shared.renderers.template import ChatTemplate, Refused
from shared.renderers.vocabulary import GUARDS, Vocabulary

TOOLS = (
    ToolSpec("read", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),
    ToolSpec(
        "run",
        "Runs a command.",
        {"type": "object", "properties": {"n": {"type": "integer"}, "on": {"type": "boolean"}}},
    ),
)


ODD = [
    "\n",
    " ",
    "\r\n",
    "\t",
    "é",
    "😀",
    "\u0301",
    "</tool_response>",
    "def f():\n    return 1\n",
    *GUARDS[:2],
    "fdd0",
]
VALUES = ('"a.py"', '"é\\n"', '"<think>"')
THINKING = {"no": ("",), "model": ("", "<think>\nhm\n</think>\n\n"), "opened": ("hm\n</think>\n\n",)}


def bodies(vocabulary: Vocabulary, calm: bool) -> st.SearchStrategy[str]:
    """Text of people, files and tools: unicode, nothing, very much, and unless `calm` look-alikes of control tokens, whole and in
    part."""
    control = st.sampled_from(sorted(vocabulary.control))
    odd = st.sampled_from(ODD)
    pieces = st.one_of(
        st.text(max_size=8).filter(lambda text: vocabulary.control_ids.isdisjoint(vocabulary.ids(text))), odd
    )
    if not calm:
        cut = st.tuples(control, st.integers(1, 40))
        begun, ended = cut.map(lambda pair: pair[0][: pair[1]]), cut.map(lambda pair: pair[0][pair[1] :])
        pieces = st.one_of(control, begun, ended, st.text(max_size=8), odd)
    huge = st.tuples(pieces, st.integers(1, 300)).map(lambda pair: pair[0] * pair[1])
    return st.one_of(st.lists(pieces, max_size=5).map("".join), huge, st.just(""))


def completions(renderer: Any, thinks: str, calm: bool) -> st.SearchStrategy[list[int]]:
    """What an engine may sample: thinking, words and calls; unless `calm` broken ones too, any ids at all, and cut anywhere."""
    vocabulary: Vocabulary = renderer.vocabulary
    form = renderer.calls.form
    sound = [form.replace("TOOL", "read").replace("ARGUMENT", "path").replace("VALUE", value) for value in VALUES]
    sound = [text.replace("NUMBER", "0") for text in sound]
    stop = [renderer.stop_tokens[0]]
    begin = st.sampled_from(THINKING[thinks]).map(vocabulary.ids)
    words = st.sampled_from(["", "", "I look.\n"]).map(vocabulary.ids)
    called = st.sampled_from([*sound, sound[0].replace(": ", ":")]).map(vocabulary.ids)
    sober = st.tuples(begin, words, called).map(
        lambda parts: _stopped(renderer, [id for part in parts for id in part]) + stop
    )
    if calm:
        return sober
    broken = [
        form,
        form[: len(form) // 2],
        form[len(form) // 3 :],
        sound[0].replace("{", "["),
        sound[0].replace('"', "", 1),
    ]
    pieces = st.one_of(
        st.sampled_from(sound * 4 + broken).map(vocabulary.ids),
        st.sampled_from(["<think>", "</think>", "I look.", "\n\n", " ", "é😀"]).map(vocabulary.ids),
        st.text(max_size=6).map(vocabulary.plain),
        st.lists(st.integers(0, vocabulary.size - 1), max_size=4),
    )
    said = st.lists(pieces, max_size=5).map(lambda parts: [id for part in parts for id in part])
    thought = st.tuples(begin, said).map(lambda pair: pair[0] + pair[1])
    ends = st.sampled_from([stop] * 3 + [[id] for id in renderer.stop_tokens] + [[]])
    whole = st.tuples(st.one_of(said, thought), ends).map(lambda pair: _stopped(renderer, pair[0]) + pair[1])
    cut = st.tuples(st.one_of(whole, sober), st.integers(1, 40)).map(lambda pair: pair[0][: pair[1]])
    return st.one_of(sober, whole, whole, cut).filter(bool)


def _stopped(renderer: Any, ids: list[int]) -> list[int]:
    """An engine samples nothing behind a stop token."""
    return [id for id in ids if id not in renderer.stop_tokens]


@dataclass
class Seen:
    """What all conversations together showed. `rerendered`: turns of calm conversations, rendered again as a whole."""

    conversations: int = 0
    turns: int = 0
    segments: int = 0
    calls: int = 0
    broken: int = 0
    rerendered: int = 0
    differed: int = 0

    def line(self, name: str) -> str:
        told = (
            f"{name}: {self.conversations} conversations, {self.turns} turns, {self.segments} answered by a new segment, "
            f"{self.calls} calls, {self.broken} of them broken"
        )
        if not self.rerendered:
            return told
        share = f"{self.differed} of {self.rerendered} well-formed turns ({self.differed / self.rerendered:.1%})"
        return f"{told}; a full re-render would have differed in {share}"


@dataclass(frozen=True)
class Said:
    """What a drawing holds: texts of people, files and tools, and completions."""

    calm: bool
    bodies: list[str]
    completions: list[list[int]]
    seed: int


EACH = 8  # conversations of a drawing


@functools.cache
def drawings(renderer: Any, thinks: str) -> st.SearchStrategy[Said]:
    """Return what hypothesis draws for `EACH` conversations."""

    def drawing(calm: bool) -> st.SearchStrategy[Said]:
        body, completion = bodies(renderer.vocabulary, calm), completions(renderer, thinks, calm)
        texts, sampled = (st.lists(one, min_size=EACH, max_size=2 * EACH) for one in (body, completion))
        return st.builds(Said, st.just(calm), texts, sampled, st.integers(0, 1 << 32))

    return st.one_of(drawing(False), drawing(True))


def conversations(
    number: int, renderer: Any, template: ChatTemplate | None, thinks: str, seen: Seen
) -> Callable[[], None]:
    """Return a test that holds at least so many conversations."""

    @settings(max_examples=-(-number // EACH), deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(drawings(renderer, thinks))
    def hold(said: Said) -> None:
        chance = random.Random(said.seed)
        for _ in range(EACH):
            converse(said, chance, renderer, template, seen)

    return hold


def converse(said: Said, chance: random.Random, renderer: Any, template: ChatTemplate | None, seen: Seen) -> None:
    """One conversation; fails where a promise of the renderers or of the recorder is broken."""
    vocabulary: Vocabulary = renderer.vocabulary
    body = functools.partial(chance.choice, said.bodies)
    system = body() if chance.random() < 0.5 else None
    offered = TOOLS if renderer.objection(Brief((Message("user", "a"),), TOOLS)) is None else ()
    tools = tuple(ToolSpec(tool.name, body(), tool.parameters) for tool in offered)
    brief = Brief((*([Message("system", system)] if system is not None else []), Message("user", body())), tools)
    plain = Brief(
        tuple(Message(m.role, "x") for m in brief.messages), tuple(ToolSpec(t.name, "x", t.parameters) for t in tools)
    )
    seen.conversations += 1
    recorder, history, turns = Recorder(), [], []
    segments: list[tuple[list[int], list[bool]]] = []  # what the engine read and wrote last, and which of it it sampled
    saw = renderer.opening(brief)  # what the engine has seen and sampled
    assert _controls(vocabulary, saw) == _controls(vocabulary, renderer.opening(plain))
    recorder.begin(saw)
    sampled = [False] * len(saw)
    for turn in range(chance.randint(1, 4)):
        completion = chance.choice(said.completions)
        assert recorder.context == saw
        reading = renderer.reading(completion, saw, tools)
        _check_reading(reading, completion)
        recorder.sampled(
            _generation(completion), [Part(c.start, c.end, "tool_call", c.name) for c in reading.calls], turn
        )
        sampled += [True] * len(completion)
        said_last = ([*saw, *completion], list(sampled))
        tail = Tail(saw, completion, brief)
        results = [Result(call=c.id, tool=c.name or "unknown", text=body()) for c in reading.calls]
        if not results or chance.random() < 0.05:
            results.append(Result(text=body()))
        seen.turns += 1
        seen.calls += len(reading.calls)
        seen.broken += sum(call.error is not None for call in reading.calls)
        answer = renderer.answers(tail, results)
        turns.append((reading, results, completion))
        history.append(Exchange(tuple(completion), tuple(results)))
        if answer is None:
            seen.segments += 1
            segments.append(said_last)
            saw = renderer.opening(brief, history=history)
            recorder.begin(saw)
            sampled = [False] * len(saw)
            continue
        plainly = [Result(call=r.call, tool=r.tool, text="x") for r in results]
        assert _controls(vocabulary, answer) == _controls(vocabulary, renderer.answers(tail, plainly))
        recorder.observed(answer, turn)
        saw = [*saw, *completion, *answer]
        sampled += [False] * len(answer)
        if said.calm and template is not None:
            _rerender(renderer, template, brief, turns, saw, seen)
    if answer is not None:
        segments.append(said_last)
    assert [(s.tokens.tolist(), s.loss_mask.tolist()) for s in recorder.segments()] == segments


def _check_reading(reading: Any, completion: list[int]) -> None:
    at = 0
    for call in reading.calls:
        assert at <= call.start <= call.end <= len(completion)
        at = call.end
        if call.error is None:
            assert call.name
            json.dumps(dict(call.arguments))
        else:
            assert "valid call" in call.error
    assert len({call.id for call in reading.calls}) == len(reading.calls)
    if reading.final is not None:
        assert 0 <= reading.final[0] < reading.final[1] <= len(completion)


def _controls(vocabulary: Vocabulary, ids: list[int]) -> list[int]:
    return [id for id in ids if id in vocabulary.control_ids]


def _generation(tokens: list[int]) -> Generation:
    n = len(tokens)
    return Generation(tokens, np.zeros(n, dtype=np.float32), np.zeros(n, dtype=np.int32), 0)


def _rerender(
    renderer: Any, template: ChatTemplate, brief: Brief, turns: list[Any], saw: list[int], seen: Seen
) -> None:
    """What a harness gets that reads each answer as text and renders the whole conversation again."""
    messages: list[dict[str, Any]] = [{"role": m.role, "content": m.content} for m in brief.messages]
    objects, _ = template.calls_as or (True, None)
    for reading, results, _ in turns:
        message: dict[str, Any] = {"role": "assistant", "content": reading.text}
        if reading.thinking:
            message["reasoning_content"] = reading.thinking
        calls = [(call.id, call.name, dict(call.arguments)) for call in reading.calls if call.error is None]
        if calls:
            message["tool_calls"] = [
                {
                    "id": id,
                    "type": "function",
                    "function": {"name": name, "arguments": of if objects else json.dumps(of)},
                }
                for id, name, of in calls
            ]
        messages.append(message)
        for r in results:
            about = {"role": "tool", "tool_call_id": r.call, "name": r.tool} if r.call else {"role": "user"}
            messages.append({**about, "content": r.text})
    seen.rerendered += 1
    try:
        text = template.render(messages, [schema_of(tool) for tool in brief.tools] or None)
    except Refused:
        seen.differed += 1
        return
    seen.differed += renderer.vocabulary.ids(text) != saw


__all__ = ["Renderer", "Seen", "conversations"]
