"""Which recorded answer a request goes on from. Pure.

A client sends the whole conversation each time. Its messages are compared with what earlier requests said and were answered, by
`Turn.identity`: ids of calls, thinking and the spelling of JSON do not count. The longest known beginning that ends with
an answer of ours is kept, token for token.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from services.rollout.endpoint.tree import Node
from shared.chat import Asked, Turn
from shared.chat.refusing import BadRequest


class Branch(enum.StrEnum):
    """Why a request goes on where it does. Only `rewrites` and `template` write tokens again that were recorded before."""

    first = "first"  # the first request of the attempt
    continues = "continues"  # goes on from the end of a path
    forks = "forks"  # goes on from, or asks again at, a place that has an answer already
    opens = "opens"  # another conversation: a sub-agent, or one that was compacted into a new task
    rewrites = "rewrites"  # the client changed or left out what was said before
    template = "template"  # the chat template would write earlier turns in another way


@dataclass(frozen=True, slots=True)
class Exchange:
    """One assistant's turn of a request, and what came behind it. `known`: the answer of ours that has its ids; None: the client
    invented the turn."""

    turn: Turn
    results: tuple[tuple[int, Turn], ...]  # (index of the call that is answered; -1: a user's message, the message)
    known: Node | None


@dataclass(frozen=True, slots=True)
class Found:
    """`head`: the messages before the first exchange. `matched`: so many exchanges are as they were recorded."""

    head: tuple[Turn, ...]
    exchanges: tuple[Exchange, ...]
    matched: int
    branch: Branch


class History:
    def __init__(self) -> None:
        self._paths: dict[bytes, Node] = {}  # digest of a conversation up to an answer
        self._answers: dict[str, Node] = {}  # the last node with this answer
        self._heads: set[bytes] = set()
        self._tasks: set[str] = set()  # first messages of users

    def find(self, asked: Asked) -> Found:
        """Return where a request goes on. Raises BadRequest, which names the message."""
        head, groups = _split(asked.turns)
        digests = list(_digests(asked, head, groups))
        nodes = [self._paths.get(digest) for digest in digests[1:]]
        matched = max((i + 1 for i, node in enumerate(nodes) if node is not None), default=0)
        exchanges = []
        for i, (turn, results) in enumerate(groups):
            node = nodes[i] if i < matched else self._answers.get(turn.identity)
            exchanges.append(Exchange(turn, results, node))
        return Found(head, tuple(exchanges), matched, self._branch(head, exchanges, digests, matched))

    def add(self, asked: Asked, answer: Turn, node: Node) -> None:
        """Remember what a request was answered."""
        head, groups = _split(asked.turns)
        digests = list(_digests(asked, head, [*groups, (answer, ())]))
        self._paths[digests[-1]] = node
        self._answers[answer.identity] = node
        self._heads.add(digests[0])
        self._tasks.add(_task(head))

    def _branch(
        self, head: Sequence[Turn], exchanges: Sequence[Exchange], digests: Sequence[bytes], matched: int
    ) -> Branch:
        if not self._heads:
            return Branch.first
        if exchanges and matched == len(exchanges):
            last = exchanges[-1].known
            return Branch.forks if last is not None and last.children else Branch.continues
        if not exchanges and digests[0] in self._heads:
            return Branch.forks
        known = matched or _task(head) in self._tasks or any(exchange.known is not None for exchange in exchanges)
        return Branch.rewrites if known else Branch.opens


Group = tuple[Turn, tuple[tuple[int, Turn], ...]]


def _split(turns: Sequence[Turn]) -> tuple[tuple[Turn, ...], list[Group]]:
    """Return the messages before the first of an assistant, and each of those with what follows it."""
    if turns and turns[-1].role == "assistant":
        raise BadRequest(
            f"messages[{len(turns) - 1}].role: found 'assistant' in the last message; allowed: 'user', 'tool'. An answer cannot "
            "be begun for the model"
        )
    starts = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    head = tuple(turns[: starts[0]] if starts else turns)
    if (bad := next((i for i, turn in enumerate(head) if turn.role == "tool"), None)) is not None:
        raise BadRequest(f"messages[{bad}].role: found 'tool' before any call; allowed: 'system', 'user'")
    ends = [*starts[1:], len(turns)] if starts else []
    return head, [(turns[start], tuple(_results(turns, start, end))) for start, end in zip(starts, ends, strict=True)]


def _results(turns: Sequence[Turn], start: int, end: int) -> Iterator[tuple[int, Turn]]:
    ids = [call.id for call in turns[start].calls]
    for i in range(start + 1, end):
        turn = turns[i]
        if turn.role == "system":
            raise BadRequest(f"messages[{i}].role: found 'system'; allowed: as the first message alone")
        if turn.role == "user":
            yield -1, turn
        elif turn.answers in ids:
            yield ids.index(turn.answers), turn
        else:
            raise BadRequest(
                f"messages[{i}]: found the result of call {turn.answers!r:.60}; allowed: of the calls of the assistant's message "
                f"before it ({', '.join(ids)[:200] or 'it has none'})"
            )


def _digests(asked: Asked, head: Sequence[Turn], groups: Sequence[Group]) -> Iterator[bytes]:
    """Yield the digest of tools and head, then that of all up to each assistant's turn."""
    tools = [[tool.name, tool.description, tool.parameters, tool.sent] for tool in asked.tools]
    running = xxhash.xxh3_128(json.dumps(tools, ensure_ascii=False).encode())
    for turn in head:
        running.update(f"\0{turn.identity}".encode())
    yield running.digest()
    for turn, results in groups:
        running.update(f"\0{turn.identity}".encode())
        yield running.digest()
        for index, result in results:
            running.update(f"\0{index}{result.identity}".encode())


def _task(head: Sequence[Turn]) -> str:
    return next((turn.text for turn in head if turn.role == "user"), "")
