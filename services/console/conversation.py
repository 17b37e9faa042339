"""A segment as a conversation: what the agent was told, then turn by turn what it thought, said and called, and the results.

Knows no chat format, no tool and no kind of problem by name. The renderer reads a turn; where results stand in what was
answered is found by letting the renderer write results that are known. What cannot be taken apart is shown as it is. Pure.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from services.console.arguments import Argument, arguments
from services.console.excerpts import Excerpt, Room
from shared import environments
from shared.contracts.trajectory import Segment, Span
from shared.environments import Brief, Result
from shared.renderers import Reading, Renderer, Tail

_MARK = "qz0result{}0zq"  # a result that no tool gives; letters and digits, which every tokenizer gives back
_REST = 80  # characters behind the task that are more than the end of a message
_NOBODY = Brief((), ())


@dataclass(frozen=True, slots=True)
class Passage:
    """A text with what it is. `open`: shown at once; else behind its label. `prose`: for people; else as a program wrote or
    reads it. `closable`: the reader may fold it away."""

    label: str
    text: Excerpt
    open: bool = True
    prose: bool = False
    closable: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a call, or to a turn. `start`, `end`: the tokens that hold it, together with the answers to other calls."""

    text: Excerpt
    ok: bool
    passed: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call. `ok`: False where it was not executed as written; `broken`: it could not be read, and `error` says why, unless
    its answer does. `anchor`: token offset used as link target; -1: links go to the turn. `answer`: None if the call has no
    result, or the results of the turn could not be told apart."""

    tool: str
    arguments: tuple[Argument, ...]
    ok: bool
    broken: bool
    error: str
    anchor: int
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens [start, end) of a segment. `anchors`: further places within it that links point to. `versions`: those that
    sampled it; empty: the block is context. `answer`: of the turn as a whole; None: there is none, or each call has its own.
    `faults`: what the turn did wrong. `broken`: at least one of its calls was not executed as written."""

    title: str
    turn: int
    start: int
    end: int
    anchors: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    passages: tuple[Passage, ...] = ()
    calls: tuple[Call, ...] = ()
    answer: Answer | None = None
    faults: tuple[str, ...] = ()
    broken: bool = False

    @property
    def sampled(self) -> bool:
        return bool(self.versions)


def conversation(segments: Sequence[Segment], chat: Renderer | None, brief: Brief | None) -> list[list[Block]]:
    """Return the blocks of each segment. `chat`: None: the renderer is not known here. `brief`: the environment's task for the
    problem; None: it cannot be had."""
    room, told = Room(), ""
    found = []
    for segment in segments:
        reader = _Reader(segment, chat, brief or _NOBODY, room, told)
        found.append(list(reader.blocks()))
        told = told or reader.task
    return found


class _Reader:
    """`known`: the first segment's opening, which later ones begin with again; empty: this is the first. `task`: its own."""

    def __init__(self, segment: Segment, chat: Renderer | None, brief: Brief, room: Room, known: str) -> None:
        self.segment, self.chat, self.brief, self.room, self.known = segment, chat, brief, room, known
        self.ids: list[int] = segment.tokens.tolist()
        self.task = ""

    def blocks(self) -> Iterator[Block]:
        spans = self.segment.spans or [Span(start=0, end=len(self.ids), role="tokens")]
        groups = [list(group) for _, group in groupby(spans, key=self._together)]
        at = 0
        while at < len(groups):
            group = groups[at]
            at += 1
            if not self._sampled(group[0]):
                yield self._given(group, opening=at == 1)
                continue
            answer = groups[at] if at < len(groups) and self._answers(group[0], groups[at][0]) else []
            at += bool(answer)
            yield self._turn(group, answer)

    def _together(self, span: Span) -> tuple[int, bool, str]:
        """Return the key by which adjoining spans are grouped: those of one generation, and the prompts and the summary that a
        segment begins with."""
        sampled = self._sampled(span)
        return (
            span.turn,
            sampled,
            "" if sampled or (span.turn == 0 and span.role in ("prompt", "summary")) else span.role,
        )

    def _sampled(self, span: Span) -> bool:
        return bool(self.segment.loss_mask[span.start : span.end].any())

    def _answers(self, turn: Span, span: Span) -> bool:
        return span.role == "tool_output" and span.turn == turn.turn and not self._sampled(span)

    def text(self, start: int, end: int) -> str:
        if self.chat is None:
            return f"{end - start} tokens; the chat format of this run is not at hand"
        written: str = getattr(self.chat, "laid_out", self.chat.text)(self.ids[start:end])
        return written

    # What the agent read

    def _given(self, spans: list[Span], *, opening: bool) -> Block:
        start, end, first = spans[0].start, spans[-1].end, spans[0]
        if opening and first.role == "prompt":
            passages = tuple(self._opening(spans))
            title = "prompt"
        else:
            passages = (Passage("", self.room.excerpt(self.text(start, end))),)
            title = first.role.replace("_", " ") + (f", {first.tool}" if first.tool else "")
        anchors = tuple(span.start for span in spans[1:])
        return Block(title, first.turn, start, end, anchors, passages=passages, broken=not all(s.ok for s in spans))

    def _opening(self, spans: list[Span]) -> Iterator[Passage]:
        whole = "".join(self.text(span.start, span.end) for span in spans)
        head = self.text(spans[0].start, spans[0].end)
        self.task = head
        if head == self.known:
            yield Passage("the task, as in context 1", self.room.excerpt(head), open=False)
        elif (places := _places(head, [message.content for message in self.brief.messages])) is None:
            yield Passage("", self.room.excerpt(head))
        else:
            for message, (start, end) in zip(self.brief.messages, places, strict=True):
                content = self.room.excerpt(head[start:end], head=20, tail=2)
                shown = not self.known and message.role == "user"
                yield Passage(_counted(message.role, head[start:end]), content, open=shown, prose=True, closable=True)
            if len(rest := head[places[-1][1] :]) > _REST:
                yield Passage("what follows it", self.room.excerpt(rest), open=False)
            yield Passage("as the engine read it, with tools", self.room.excerpt(whole), open=False)
        for span in spans[1:]:
            text = self.text(span.start, span.end)
            if span.role == "summary":
                yield Passage(
                    "its own summary of the context before, put in again", self.room.excerpt(text), prose=True
                )
            elif len(text) > _REST:
                yield Passage("what follows it", self.room.excerpt(text), open=False)

    # What the agent said, and what it was answered

    def _turn(self, spans: list[Span], answered: list[Span]) -> Block:
        start, end = spans[0].start, spans[-1].end
        summary = all(span.role == "summary" for span in spans)
        said = Reading(text=self._kept(start, end)) if summary else self._reading(start, end)
        raw = self.text(start, end)
        passages = []
        if said.thinking:
            passages.append(
                Passage(_counted("thinking", said.thinking), self.room.excerpt(said.thinking), open=False, prose=True)
            )
        if said.text:
            passages.append(Passage("", self.room.excerpt(said.text, head=20), prose=True))
        bare = not (said.calls or said.text or said.thinking)
        passages.append(Passage("" if bare else "as sampled", self.room.excerpt(raw), open=bare))
        answers = self._results(said, start, end, answered)
        whole = answers[0] if answers and len(answers) != len(said.calls) else None
        each: Sequence[Answer | None] = [None] * len(said.calls) if whole or not answers else answers
        calls = tuple(self._call(call, spans, start, answer) for call, answer in zip(said.calls, each, strict=True))
        taken = {call.anchor for call in calls} | {start}
        return Block(
            title="summary" if summary else "turn",
            turn=spans[0].turn,
            start=start,
            end=end,
            anchors=tuple(span.start for span in [*spans, *answered] if span.start not in taken),
            versions=tuple(
                int(v) for v in np.unique(self.segment.versions[start:end][self.segment.loss_mask[start:end]])
            ),
            passages=tuple(passages),
            calls=calls,
            answer=whole,
            faults=tuple(sorted({span.fault.replace("_", " ") for span in spans if span.fault})),
            broken=not all(span.ok for span in spans),
        )

    def _reading(self, start: int, end: int) -> Reading:
        try:
            if self.chat is None:
                return Reading()
            return self.chat.reading(self.ids[start:end], self.ids[:start], self.brief.tools)
        except Exception:  # a renderer of somebody else's: the turn is shown as it was sampled
            return Reading()

    def _kept(self, start: int, end: int) -> str:
        """Return the part of a summary that the next segment begins with."""
        try:
            return self.chat.text(self.chat.kept(self.ids[start:end])) if self.chat else ""
        except Exception:  # as in _reading
            return ""

    def _call(self, call: environments.Call, spans: list[Span], start: int, answer: Answer | None) -> Call:
        place = start + call.start
        span = next((s for s in spans if s.start <= place < s.end), spans[-1])
        anchor = span.start if span.start == place else -1
        return Call(
            tool=call.name or "call",
            arguments=arguments(call.arguments, self.room),
            ok=span.ok,
            error="" if answer is not None else call.error or "",  # the answer says it
            broken=call.error is not None,
            anchor=anchor if anchor != start else -1,
            answer=answer,
        )

    def _results(self, said: Reading, start: int, end: int, spans: list[Span]) -> list[Answer]:
        """Return one answer for each call, or one for all if they cannot be told apart. Empty: nothing was answered."""
        if not spans:
            return []
        first, last = spans[0].start, spans[-1].end
        text = self.text(first, last)
        texts = self._split(said, start, end, text) or [text]
        passed, alone = any(span.passed for span in spans), len(texts) == 1
        return [
            Answer(
                text=self.room.excerpt(one, head=10, tail=12),
                ok=all(span.ok for span in spans) if alone else True,
                passed=passed and number == len(texts) - 1,
                start=first,
                end=last,
            )
            for number, one in enumerate(texts)
        ]

    def _split(self, said: Reading, start: int, end: int, text: str) -> list[str] | None:
        """Return the text of each result; None: they cannot be told apart."""
        if self.chat is None:
            return None
        marks = [_MARK.format(number) for number in range(len(said.calls) or 1)]
        ids = [(call.id, call.name) for call in said.calls] or [("", "")]
        results = [Result(id, name, mark) for (id, name), mark in zip(ids, marks, strict=True)]
        try:
            tail = Tail(self.ids[:start], self.ids[start:end], self.brief)
            written = self.chat.answers(tail, results)
            frame = self.chat.text(written) if written is not None else ""
        except Exception:  # a format with answers of its own, such as compact-1: what it wrote is shown as it is
            return None
        return between(text, frame, marks)


def between(text: str, frame: str, marks: Sequence[str]) -> list[str] | None:
    """Return the parts of a text that stand where the marks stand in the frame. The text may end before the frame does. None: the
    two do not fit, or fit in several ways."""
    pieces, at = [], 0
    for mark in marks:
        place = frame.find(mark, at)
        if place < 0:
            return None
        pieces.append(frame[at:place])
        at = place + len(mark)
    last = frame[at:]
    if not text.startswith(pieces[0]):
        return None
    body = text[len(pieces[0]) :]
    known = next((n for n in range(len(last), 0, -1) if body.endswith(last[:n])), 0)
    body = body[: len(body) - known]
    seams = pieces[1:]
    if any(not seam or body.count(seam) != seams.count(seam) for seam in seams):
        return None
    parts = []
    for seam in seams:
        part, _, body = body.partition(seam)
        parts.append(part)
    return [*parts, body]


def _places(text: str, contents: Sequence[str]) -> list[tuple[int, int]] | None:
    """Return the range of each message in the text, in order. Templates may trim a message. None: a message was not found."""
    places, at = [], 0
    for content in contents:
        for form in (content.strip(), unicodedata.normalize("NFC", content.strip())):
            start = text.find(form, at) if form else -1
            if start >= 0:
                break
        if start < 0:
            return None
        at = start + len(form)
        places.append((start, at))
    return places or None


def _counted(what: str, text: str) -> str:
    lines = text.rstrip("\n").count("\n") + 1
    return f"{what}, {lines:,} line{'' if lines == 1 else 's'}"
