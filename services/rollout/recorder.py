"""The exact token recorder: what one attempt's contexts held and what the engine said about them. Token ids, never text.

A small state machine: `begin` opens a segment, then `sampled` and `observed` append in the order of events; `begin` again
(after a self-summary) closes it and opens the next. Invariants:

- `context` is, id for id, what the next request sends; nothing is ever tokenised again.
- Sampled tokens have mask 1, a log-probability and a version; all others mask 0, 0.0 and -1.
- Routing rows are write-once: a request asks for rows from `rows` on, so what the pass that first computed a position
  said stays. A segment of T tokens ends with T - 1 rows.
- A finished segment ends with its last sampled token: an observation that was never sent is nothing a model saw.
- `journal` has every call that changed the recorder, in order. `replayed` makes the same recorder of them, so that another worker
  can continue an attempt (see checkpoint).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from services.rollout.generation import Generation
from shared.contracts.trajectory import Segment, Span
from shared.environments import Result
from shared.renderers import Exchange


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens [start, end) of one generation and what they are (roles: see shared.contracts.trajectory.Span)."""

    start: int
    end: int
    role: str
    tool: str = ""
    ok: bool = True


class Began(msgspec.Struct, frozen=True, tag=True):
    """A call of `Recorder.begin`."""

    prompt: list[int]
    summary: list[int]
    keep: bool


class Sampled(msgspec.Struct, frozen=True, tag=True):
    """A call of `Recorder.sampled`."""

    generation: Generation
    parts: list[Part]
    turn: int
    fault: str
    trained: bool = True


class Observed(msgspec.Struct, frozen=True, tag=True):
    """A call of `Recorder.observed`."""

    tokens: list[int]
    turn: int
    role: str
    tool: str
    ok: bool
    passed: bool


class Answered(msgspec.Struct, frozen=True, tag=True):
    """A call of `Recorder.answered`."""

    results: list[Result]


Entry = Began | Sampled | Observed | Answered


class _Open:
    """The segment that is being recorded."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.spans: list[Span] = []
        # (position of its first token, what the engine returned, whether this segment trains it)
        self.runs: list[tuple[int, Generation, bool]] = []
        self.rows: list[np.ndarray] = []

    def append(self, tokens: Sequence[int], role: str, turn: int, tool: str = "", **more: Any) -> None:
        """`more`: other fields of the span."""
        if tokens:
            start = len(self.tokens)
            self.tokens.extend(tokens)
            self.spans.append(Span(start=start, end=len(self.tokens), role=role, turn=turn, tool=tool, **more))

    def close(self) -> tuple[Segment, np.ndarray | None] | None:
        """None where nothing was sampled: there is nothing to train on and nothing that a model answered to."""
        if not self.runs:
            return None
        start, last, _ = self.runs[-1]
        T = start + len(last.tokens)
        loss_mask_T = np.zeros(T, dtype=bool)
        logprobs_T = np.zeros(T, dtype=np.float32)
        versions_T = np.full(T, -1, dtype=np.int32)
        for start, run, trained in self.runs:
            if not trained:
                continue
            at = slice(start, start + len(run.tokens))
            loss_mask_T[at], logprobs_T[at], versions_T[at] = True, run.logprobs_N, run.versions_N
        segment = Segment(
            tokens=np.array(self.tokens[:T], dtype=np.int32),
            loss_mask=loss_mask_T,
            logprobs=logprobs_T,
            versions=versions_T,
            oldest_kv_version=min(run.oldest_kv_version for _, run, _ in self.runs),
            spans=[span for span in self.spans if span.start < T],
        )
        return segment, np.concatenate(self.rows) if self.rows else None


class Recorder:
    def __init__(self) -> None:
        self._closed: list[tuple[Segment, np.ndarray | None]] = []
        self._open: _Open | None = None
        self.journal: list[Entry] = []
        self.history: list[Exchange] = []  # turns of the open segment that are over
        self.oldest_version = -1  # among all sampled tokens; -1 before the first
        self.oldest_kv_version = -1
        self.newest_version = -1

    @property
    def context(self) -> list[int]:
        """The open segment's tokens: what the next request sends. A copy, for the caller to keep."""
        return list(self._current.tokens)

    @property
    def length(self) -> int:
        return len(self._current.tokens)

    @property
    def rows(self) -> int:
        """Routing rows that the open segment has already; the next request asks from here on."""
        return sum(len(rows) for rows in self._current.rows)

    def begin(self, prompt: Sequence[int], summary: Sequence[int] = (), *, keep: bool = False) -> None:
        """Opens a segment with `prompt`; `summary`: the ids of a self-summary that lie somewhere inside it. `keep`: the prompt
        holds the turns of the segment before, which stay in `history`."""
        if not prompt:
            raise ValueError("recorder.begin: an empty prompt")
        self._finish()
        self.journal.append(Began(list(prompt), list(summary), keep))
        self.history = self.history if keep else []
        self._open = _Open()
        at = _find(prompt, summary)
        self._open.append(prompt[:at], "prompt", turn=0)
        self._open.append(prompt[at : at + len(summary)], "summary", turn=0)
        self._open.append(prompt[at + len(summary) :], "prompt", turn=0)

    def sampled(
        self, generation: Generation, parts: Sequence[Part], turn: int, *, fault: str = "", trained: bool = True
    ) -> None:
        """Appends one generation. What no part claims is thinking. `trained`: False: another segment trains these tokens; here
        they are context, with mask 0. Raises ValueError where arrays or parts do not fit."""
        segment, n = self._current, len(generation.tokens)
        if generation.logprobs_N.shape != (n,) or generation.versions_N.shape != (n,):
            raise ValueError(
                f"recorder.sampled: {n} tokens, log-probabilities {generation.logprobs_N.shape}, versions "
                f"{generation.versions_N.shape}"
            )
        if generation.experts_RLK is not None:
            expected = len(segment.tokens) + n - 1 - self.rows
            if len(generation.experts_RLK) != expected:
                raise ValueError(f"recorder.sampled: {len(generation.experts_RLK)} routing rows, expected {expected}")
        if n == 0:
            return  # rows of the prompt alone come again with the next generation
        self.journal.append(Sampled(generation, list(parts), turn, fault, trained))
        if generation.experts_RLK is not None:
            segment.rows.append(generation.experts_RLK)
        segment.runs.append((len(segment.tokens), generation, trained))
        at = 0
        for part in parts:
            if not at <= part.start <= part.end <= n:
                raise ValueError(f"recorder.sampled: part [{part.start}, {part.end}) outside of [{at}, {n})")
            segment.append(generation.tokens[at : part.start], "thinking", turn, fault=fault)
            segment.append(
                generation.tokens[part.start : part.end], part.role, turn, part.tool, ok=part.ok, fault=fault
            )
            at = part.end
        segment.append(generation.tokens[at:], "thinking", turn, fault=fault)
        oldest, newest = int(generation.versions_N.min()), int(generation.versions_N.max())
        first = self.newest_version < 0
        self.oldest_version = oldest if first else min(self.oldest_version, oldest)
        self.oldest_kv_version = (
            generation.oldest_kv_version if first else min(self.oldest_kv_version, generation.oldest_kv_version)
        )
        self.newest_version = max(self.newest_version, newest)

    def observed(
        self,
        tokens: Sequence[int],
        turn: int,
        role: str = "tool_output",
        tool: str = "",
        ok: bool = True,
        passed: bool = False,
    ) -> None:
        """Appends tokens that nobody sampled: a tool's answer or the request for a summary."""
        self._current.append(tokens, role, turn, tool, ok=ok, passed=passed)
        self.journal.append(Observed(list(tokens), turn, role, tool, ok, passed))

    def answered(self, results: Sequence[Result]) -> None:
        """Add the last generation with its results to `history`. Another worker, which replays the journal, sees no `detail` of
        them."""
        _, generation, _ = self._current.runs[-1]
        self.history.append(Exchange(tuple(generation.tokens), tuple(results)))
        self.journal.append(Answered([replace(result, detail=None) for result in results]))

    def segments(self) -> list[Segment]:
        """All segments, the open one as it stands included."""
        return [segment for segment, _ in self._all()]

    def routing(self) -> list[np.ndarray] | None:
        """Per segment uint8|uint16 [T - 1, L, K]; None for a dense model."""
        rows = [rows for _, rows in self._all()]
        return [r for r in rows if r is not None] if rows and all(r is not None for r in rows) else None

    @property
    def _current(self) -> _Open:
        if self._open is None:
            raise RuntimeError("recorder: no segment is open; begin one first")
        return self._open

    def _all(self) -> list[tuple[Segment, np.ndarray | None]]:
        last = self._open.close() if self._open is not None else None
        return [*self._closed, last] if last is not None else self._closed

    def _finish(self) -> None:
        self._closed = self._all()
        self._open = None


def replayed(journal: Iterable[Entry]) -> Recorder:
    """Return the recorder that these calls make. Raises ValueError, RuntimeError where they do not fit together."""
    recorder = Recorder()
    for entry in journal:
        match entry:
            case Began(prompt, summary, keep):
                recorder.begin(prompt, summary, keep=keep)
            case Sampled(generation, parts, turn, fault, trained):
                recorder.sampled(generation, parts, turn, fault=fault, trained=trained)
            case Observed(tokens, turn, role, tool, ok, passed):
                recorder.observed(tokens, turn, role, tool, ok, passed)
            case Answered(results):
                recorder.answered(results)
    return recorder


def _find(prompt: Sequence[int], summary: Sequence[int]) -> int:
    """Where `summary` lies in `prompt` (its last occurrence). Raises ValueError where it does not."""
    if not summary:
        return len(prompt)
    n, wanted = len(summary), list(summary)
    for at in range(len(prompt) - n, -1, -1):
        if list(prompt[at : at + n]) == wanted:
            return at
    raise ValueError(f"recorder.begin: the prompt does not hold the {n} summary tokens as they are")
