"""The prompt of a request: which recorded ids it goes on from, and which are appended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.rollout.endpoint.history import Branch, Exchange, Found, History
from services.rollout.endpoint.tree import Node
from shared.chat import Asked
from shared.chat.refusing import BadRequest
from shared.chat.writing import written
from shared.environments import Brief, Message, Result
from shared.renderers import Exchange as Past
from shared.renderers import Renderer, Tail, TooLong, Unwritable
from shared.renderers.chat import objection_to


class TooLongPrompt(BadRequest):
    """The conversation does not fit the context of the model."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`parent`: the answer that it goes on from; None: it opens a path. `appended`: the ids behind the parent's end, or all.
    `rewritten`: how many of those stand in place of ids that were recorded before. `tool`: whose results end it."""

    parent: Node | None
    appended: list[int]
    ids: list[int]
    brief: Brief
    branch: Branch
    rewritten: int
    tool: str


def prompt_of(asked: Asked, history: History, renderer: Renderer) -> Prompt:
    """Return the prompt of a request. Raises BadRequest, which names the field, and TooLongPrompt."""
    found = history.find(asked)
    messages = tuple(Message(turn.role, turn.text) for turn in found.head)  # type: ignore[arg-type]  # see History.find
    brief = Brief(messages, asked.tools)
    if (why := objection_to(brief)) is not None:
        raise BadRequest(why)
    try:
        return _appended(found, brief, renderer) or _reopened(found, brief, renderer)
    except TooLong as error:
        raise TooLongPrompt(f"messages: {error}") from None
    except Unwritable as error:
        raise BadRequest(f"messages: found an assistant's turn that was not sampled here; {error}") from None


def _appended(found: Found, brief: Brief, renderer: Renderer) -> Prompt | None:
    """Append what is new to what was recorded. None: the template would have to write earlier turns again."""
    parent = found.exchanges[found.matched - 1].known if found.matched else None
    if parent is None:
        start, context = 0, _opening(brief, renderer)
        ids, completion = context, None
    else:
        start, context = parent.length, parent.before
        completion = parent.generation.tokens
        ids = [*context, *completion]
    restated, tool = len(ids), ""
    for number, exchange in enumerate(found.exchanges):
        if number < found.matched - 1:
            continue
        if number >= found.matched or completion is None:
            completion = _said(exchange, renderer)
            context, ids = ids, [*ids, *completion]
        restated = len(ids)
        results = _results(exchange, completion, context, brief, renderer)
        answers = renderer.answers(Tail(context, completion, brief), results)
        if answers is None:
            return None
        ids = [*ids, *answers]
        tool = _last_tool(results)
    rewritten = restated - start if found.branch is Branch.rewrites else 0
    return Prompt(parent, ids[start:], ids, brief, found.branch, rewritten, tool)


def _reopened(found: Found, brief: Brief, renderer: Renderer) -> Prompt:
    """Write the whole conversation again. Sampled turns keep their ids where the format allows it."""
    past, context = [], _opening(brief, renderer)
    tool = ""
    for exchange in found.exchanges:
        completion = _said(exchange, renderer)
        results = _results(exchange, completion, context, brief, renderer)
        past.append(Past(tuple(completion), tuple(results)))
        tool = _last_tool(results)
    ids = renderer.opening(brief, (), tuple(past))
    branch = Branch.first if found.branch is Branch.first else Branch.template
    return Prompt(None, ids, ids, brief, branch, len(ids) if branch is Branch.template else 0, tool)


def _last_tool(results: Sequence[Result]) -> str:
    return next((result.tool for result in reversed(results) if result.tool), "")


def _opening(brief: Brief, renderer: Renderer) -> list[int]:
    try:
        ids = renderer.opening(brief)
    except TooLong:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRequest(f"messages: {error}") from None
    if brief.tools and (why := renderer.objection(brief)) is not None:  # a template may have no word for tools
        raise BadRequest(why)
    return ids


def _said(exchange: Exchange, renderer: Renderer) -> list[int]:
    if exchange.known is not None:
        return exchange.known.generation.tokens
    calls = [(call.name, call.arguments) for call in exchange.turn.calls]
    return written(renderer, exchange.turn.text, calls, thinking=exchange.turn.thinking, shielded=True)


def _results(
    exchange: Exchange, completion: Sequence[int], context: Sequence[int], brief: Brief, renderer: Renderer
) -> list[Result]:
    """Return what stands behind an answer. Calls have the ids under which the renderer reads them."""
    calls = [call for call in renderer.reading(completion, context, brief.tools).calls if call.error is None]
    names = [call.name for call in exchange.turn.calls]
    return [
        Result(calls[index].id if index < len(calls) else f"call_{index}", names[index], turn.text)
        if index >= 0
        else Result(text=turn.text)
        for index, turn in exchange.results
    ]
