"""Requests that run: what each has sampled so far, and those that sample in every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from services.inference.request import Finish, Request, Result
from services.inference.speculation import Draft


@dataclass(slots=True)
class Record:
    """What a running request has sampled so far, and what is proposed for its next step."""

    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    draft: Draft | None = None
    judged: int = 0  # passes of the trunk that judged drafts
    accepted: int = 0  # drafts


@dataclass(slots=True)
class Decoding:
    """The sessions that sample in every step, as arrays [D]. Rebuilt when one joins or leaves."""

    requests: list[Request] = field(default_factory=list)
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    last: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # position of the last allowed token
    temperatures: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @staticmethod
    def of(requests: list[Request], positions: int) -> Decoding:
        return Decoding(
            requests=requests,
            rows=np.array([r.row for r in requests], np.int64),
            last=np.array([last_position(r, positions) for r in requests], np.int64),
            temperatures=np.array([r.temperature for r in requests]),
        )


def last_position(request: Request, positions: int) -> int:
    """Where the last token that may be sampled stands: the token budget or the end of the context."""
    return min(request.prompt_tokens + request.max_new_tokens - 1, positions)


def nothing(request: Request, serial: int, message: str) -> Result:
    """The result of a request that never got a row."""
    return Result(
        tokens_C=np.zeros(0, np.int32),
        logprobs_C=np.zeros(0, np.float32),
        versions_C=np.zeros(0, np.int32),
        routing=None,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=0,
        finish=Finish("abort", message=message),
        oldest_kv_version=serial,
        weight_version=serial,
    )
