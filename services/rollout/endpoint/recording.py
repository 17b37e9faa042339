"""One attempt at the endpoint: its requests, its limits, and everything that was sampled for it."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.rollout import metrics
from services.rollout.agent import Model
from services.rollout.endpoint.history import History
from services.rollout.endpoint.prompting import Prompt, TooLongPrompt, prompt_of
from services.rollout.endpoint.tree import Node, Tree, cut
from services.rollout.generation import Generation
from services.rollout.recorder import Part
from shared.chat import Answered, Asked, Called, Finish
from shared.chat.reader import Reader
from shared.chat.refusing import BadRequest
from shared.contracts.messages import Effort, StopReason
from shared.environments import InfrastructureError, Limits
from shared.renderers import Reading
from shared.renderers.chat import Chat


class Over(Exception):
    """The attempt has ended: nothing more is sampled for it. The text says why."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """An answer as the client gets it. `stop`: the sequence that ended it; None: there was none."""

    generation: Generation
    stop: str | None


@dataclass(slots=True)
class Recording:
    """`limits`: of the whole attempt, over all its branches. `temperature`: the run's. `ended`: why no further request is taken,
    once it is set. `failed`: what broke on our side."""

    renderer: Chat
    model: Model
    limits: Limits
    temperature: float
    run: str = ""
    key: str = field(default_factory=lambda: f"etude-{secrets.token_urlsafe(24)}")
    tree: Tree = field(default_factory=Tree)
    history: History = field(default_factory=History)
    spent: Counter[str] = field(default_factory=Counter)  # fields of Effort
    branches: Counter[str] = field(default_factory=Counter)  # requests by Branch
    rewritten: int = 0  # tokens that were written again in place of recorded ones
    prompted: int = 0  # tokens that were appended or written again, over all requests
    refused: Counter[str] = field(default_factory=Counter)  # requests that were refused, by the field
    observed: int = 0  # sampled and observed, after openings
    ended: StopReason | None = None
    failed: InfrastructureError | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _sampling: set[asyncio.Task[Generation]] = field(default_factory=set)

    @property
    def effort(self) -> Effort:
        return Effort(**self.spent)

    @property
    def notes(self) -> dict[str, str]:
        """Return what people are told of the requests, in the trajectory's notes."""
        share = self.rewritten / self.prompted if self.prompted else 0.0
        told = {
            "requests": dict(self.branches),
            "rewritten_share": round(share, 4),
            **({"refused": dict(self.refused.most_common(8))} if self.refused else {}),
        }
        return {"endpoint": json.dumps(told)}

    def prompt(self, asked: Asked) -> Prompt:
        """Return the prompt of a request. Raises BadRequest, Over."""
        self._require_open()
        try:
            return self._prompt(asked)
        except BadRequest as error:
            self.refused[str(error).partition(":")[0][:60]] += 1
            raise

    def _prompt(self, asked: Asked) -> Prompt:
        if asked.temperature is not None and asked.temperature != self.temperature:
            raise BadRequest(
                f"temperature: found {asked.temperature}; allowed: {self.temperature} (the run's), or left out. Importance "
                "ratios are of one temperature"
            )
        prompt = prompt_of(asked, self.history, self.renderer)
        if (room := self.renderer.context - len(prompt.ids)) < 1:
            raise TooLongPrompt(
                f"messages: This model's maximum context length is {self.renderer.context} tokens; found {len(prompt.ids)}, which "
                f"leaves {room} for the answer"
            )
        return prompt

    async def answer(self, asked: Asked, prompt: Prompt) -> Answered:
        """Sample the answer, record it, and return it. Raises Over, InfrastructureError. A cancelled call records nothing."""
        self._require_open()
        most = self._room(asked, prompt)
        self.spent["turns"] += 1
        parent = prompt.parent
        generation = await self._generate(prompt.ids, most, parent.rows if parent is not None else 0)
        found = self._stopped(generation, asked.stops)
        reading = self.renderer.reading(found.generation.tokens, prompt.ids, asked.tools)
        node = self._record(prompt, found.generation, reading)
        answer = self._answered(asked, prompt, found, reading)
        self.history.add(asked, answer.turn, node)
        return answer

    def end(self, stop: StopReason) -> None:
        """Take no further request, and give up those that are being sampled. The first reason stays."""
        if self.ended is None:
            self.ended = stop
            self.over.set()
        for task in list(self._sampling):
            task.cancel()

    # What a request costs

    def _require_open(self) -> None:
        if self.ended is not None:
            raise Over(f"the attempt has ended ({self.ended})")

    def _room(self, asked: Asked, prompt: Prompt) -> int:
        """Return how many tokens may be sampled. Raises Over where a limit of the attempt is spent, which ends it."""
        limits = self.limits
        appended = len(prompt.appended) if prompt.parent is not None else 0
        left = limits.tokens - self.observed - appended
        if self.spent["turns"] >= limits.turns:
            self.end(StopReason.turn_limit)
        elif left < 1:
            self.end(StopReason.context_full)
        self._require_open()
        return min(left, self.renderer.context - len(prompt.ids), asked.most or left, limits.turn_tokens or left)

    async def _generate(self, ids: list[int], most: int, first_row: int) -> Generation:
        task = asyncio.ensure_future(self.model.generate(ids, max_new_tokens=most, first_row=first_row))
        self._sampling.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self.ended is None or asyncio.current_task().cancelling():  # type: ignore[union-attr]  # a coroutine runs in a task
                task.cancel()
                raise  # the client left
            raise Over(f"the attempt has ended ({self.ended})") from None
        except InfrastructureError as error:
            self.failed = self.failed or error
            self.end(StopReason.infrastructure)
            raise
        finally:
            self._sampling.discard(task)

    # What becomes of an answer

    def _stopped(self, generation: Generation, stops: Sequence[str]) -> _Cut:
        """Cut the answer behind the token that completes a stop sequence."""
        if not stops:
            return _Cut(generation, None)
        hidden = frozenset(self.renderer.stop_tokens)
        reader = Reader(self.renderer.vocabulary.tokenizer, hidden, stops)
        reader.feed(generation.tokens)
        reader.close()
        if not reader.stopped:
            return _Cut(generation, None)
        kept = cut(generation, reader.tokens)
        text = self.renderer.vocabulary.text([id for id in kept.tokens if id not in hidden])
        found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
        return _Cut(kept, min(found)[1] if found else stops[0])

    def _record(self, prompt: Prompt, generation: Generation, reading: Reading) -> Node:
        parts = [Part(call.start, call.end, "tool_call", call.name, call.error is None) for call in reading.calls]
        if reading.final is not None and not parts:
            parts = [Part(*reading.final, "final")]
        fault = "endless" if generation.finish == "length" else ""
        parent, appended, rewritten = prompt.parent, len(prompt.appended), prompt.rewritten
        if rewritten and parent is None:
            rewritten = max(0, rewritten - self.tree.shared(prompt.ids))
        node = self.tree.add(
            parent, prompt.appended, generation, parts, self.spent["turns"], tool=prompt.tool, fault=fault
        )
        self.observed += len(generation.tokens) + (appended if parent is not None else 0)
        self.spent["prompt_tokens" if parent is None else "tool_output_tokens"] += appended
        self.spent["thinking_tokens"] += len(generation.tokens)
        for part in parts:
            self.spent["thinking_tokens"] -= part.end - part.start
            self.spent["final_tokens" if part.role == "final" else "tool_call_tokens"] += part.end - part.start
        self.spent["tool_calls"] += len(reading.calls)
        self.spent["broken_tool_calls"] += sum(call.error is not None for call in reading.calls)
        self.branches[prompt.branch.value] += 1
        self.rewritten += rewritten
        self.prompted += appended
        metrics.ENDPOINT_REQUESTS.labels(self.run, prompt.branch.value).inc()
        metrics.ENDPOINT_TOKENS.labels(self.run, "appended").inc(appended - rewritten)
        metrics.ENDPOINT_TOKENS.labels(self.run, "rewritten").inc(rewritten)
        return node

    def _answered(self, asked: Asked, prompt: Prompt, found: _Cut, reading: Reading) -> Answered:
        generation = found.generation
        calls = tuple(
            Called(call.id, call.name, call.arguments, json.dumps(call.arguments, ensure_ascii=False))
            for call in reading.calls
            if call.error is None
        )
        vocabulary = self.renderer.vocabulary
        return Answered(
            id=secrets.token_hex(12),
            model=asked.model,
            text=self._text(generation, reading, found.stop),
            thinking=reading.thinking,
            calls=calls,
            finish=_finish(generation, found.stop, bool(calls)),
            prompt=prompt.ids,
            tokens=generation.tokens,
            created=int(time.time()),
            logprobs=generation.logprobs_N.tolist() if asked.logprobs else (),
            spellings=[vocabulary.text([id]) for id in generation.tokens] if asked.logprobs else (),
            cached=min(generation.cached_tokens, len(prompt.ids)),
            stop=found.stop,
            ids=asked.ids,
        )

    def _text(self, generation: Generation, reading: Reading, stop: str | None) -> str:
        """Return what the model says to people. A call that cannot be read is shown to the client as it stands."""
        broken = [
            self.renderer.text(generation.tokens[call.start : call.end])
            for call in reading.calls
            if call.error is not None
        ]
        text = "\n".join(filter(None, [reading.text, *broken]))
        return text[: text.find(stop)] if stop is not None and stop in text else text


def _finish(generation: Generation, stop: str | None, calls: bool) -> Finish:
    if generation.finish == "length":  # one cut short may have had more to call
        return "length"
    if calls:
        return "tool_calls"
    return "stop" if stop is None else "stop_sequence"
