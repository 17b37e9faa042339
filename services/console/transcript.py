"""A segment token by token, exactly as the engine saw it. Pure.

Secrets are masked here: they stretch over several tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.contracts.trajectory import Segment
from shared.masking import secrets
from shared.renderers import Renderer

MASK = "•"
HALF, CONTINUES = "\ufffd", "‿"  # what a part of a character reads as; what the later parts show
PARTS = 6  # tokens that one character, or several that overlap, may be cut into
AROUND = 400  # tokens before and after those that are shown: a secret may begin or end there
# Role of a span (shared.contracts.trajectory) -> what its tokens are where nobody sampled them there.
GIVEN = {"prompt": "context", "tool_output": "tool output", "summary": "summary of the context before, put in again"}


@dataclass(frozen=True, slots=True)
class Token:
    """`heat`: 0 (the policy was sure) to 9 (it hardly ever says this); -1 where nothing was sampled. `given`: what it is then,
    which is why it is not trained; empty: it was sampled. `part`: where it holds a part of a character, such as `1 of 2`: the
    first has the text of all, the others CONTINUES."""

    index: int
    id: int
    text: str
    heat: int
    logprob: float
    version: int
    given: str
    begins: str  # the role that begins here, or ""
    part: str = ""


def tokens(segment: Segment, chat: Renderer | None, first: int, count: int) -> list[Token]:
    """Tokens first .. first + count of a segment, one by one, exactly as the engine saw them; -1 where a secret was."""
    begins = {span.start: span.role.replace("_", " ") for span in segment.spans}
    stop = min(first + count, len(segment.tokens))
    texts = _texts(segment, chat, first, stop) if chat else {}
    given = _given(segment, first, count)
    found = []
    for i in range(first, stop):
        token, sampled = int(segment.tokens[i]), bool(segment.loss_mask[i])
        logprob = float(segment.logprobs[i])
        text, part = texts.get(i, (str(token), ""))
        found.append(
            Token(
                index=i,
                id=-1 if text is None else token,
                text=MASK if text is None else text,
                heat=heat(logprob) if sampled else -1,
                logprob=logprob,
                version=int(segment.versions[i]),
                given="" if sampled else given.get(i, "given"),
                begins=begins.get(i, ""),
                part=part,
            )
        )
    return found


def _given(segment: Segment, first: int, count: int) -> dict[int, str]:
    """Index -> what a token is if nobody sampled it."""
    found = {}
    for span in segment.spans:
        if span.role in GIVEN:
            found.update(dict.fromkeys(range(max(span.start, first), min(span.end, first + count)), GIVEN[span.role]))
    return found


def _texts(segment: Segment, chat: Renderer, first: int, stop: int) -> dict[int, tuple[str | None, str]]:
    """Index -> its text and which part of a character it is. None: it holds a part of a secret."""
    start, end = max(0, first - AROUND), min(len(segment.tokens), stop + AROUND)
    ids: list[int] = segment.tokens[start:end].tolist()
    alone = [chat.text([token]) for token in ids]
    hidden = _secret(alone)
    found: dict[int, tuple[str | None, str]] = {}
    at = max(0, first - start - PARTS)
    while at < min(stop - start, len(ids)):
        size, text = _whole(ids, alone, at, chat)
        secret = any(at + k in hidden for k in range(size))
        for k in range(size):
            part = f"{k + 1} of {size}" if size > 1 else ""
            found[start + at + k] = (None if secret else text if k == 0 else CONTINUES, part)
        at += size
    return found


def _whole(ids: Sequence[int], alone: Sequence[str], at: int, chat: Renderer) -> tuple[int, str]:
    """How many tokens from here on make whole characters together, and their text. Byte-level vocabularies cut characters."""
    if HALF in alone[at]:
        for size in range(2, min(PARTS, len(ids) - at) + 1):
            if HALF not in (text := chat.text(list(ids[at : at + size]))):
                return size, text
    return 1, alone[at]


def _secret(texts: Sequence[str]) -> set[int]:
    """Which of the texts, one behind the other, hold a part of a secret."""
    found = secrets("".join(texts))
    hidden, at = set(), 0
    for i, text in enumerate(texts):
        if any(at < end and begin < at + len(text) for begin, end, _ in found):
            hidden.add(i)
        at += len(text)
    return hidden


def heat(logprob: float) -> int:
    """0 for probability 1, one more for each factor of two, 9 at most."""
    return min(9, max(0, round(-logprob / math.log(2))))


def versions(segment: Segment) -> list[int]:
    """The policy versions that sampled this segment's tokens, rising."""
    return [int(v) for v in np.unique(segment.versions[segment.loss_mask])]
