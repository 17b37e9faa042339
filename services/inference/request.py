"""One generation: what is asked, what came of it. Plain data between the HTTP side and the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a generation ended: stop (a stop token, `matched`), length (max_new_tokens or the context), abort."""

    type: str  # stop | length | abort
    matched: int | None = None
    message: str = ""


@dataclass(slots=True)
class Result:
    """C sampled tokens after P prompt tokens; L MoE layers, K experts per token.

    logprobs_C: float32, under the sampling temperature. versions_C: serial that sampled each. routing: [P + C - 1 - start,
    L, K], a row per token but the last. oldest_kv_version: lowest serial whose keys and values were read. judged, accepted:
    passes that judged drafts, and drafts that became tokens.
    """

    tokens_C: np.ndarray
    logprobs_C: np.ndarray
    versions_C: np.ndarray
    routing: np.ndarray | None
    prompt_tokens: int
    cached_tokens: int
    finish: Finish
    oldest_kv_version: int
    weight_version: int
    judged: int = 0
    accepted: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """`tokens_P` int32. `extra_key`: whose cache entries it may use; None: those of the version that samples when it gets a row.
    `routing_start`: first routing row wanted; -1: none. Callbacks run on the engine's thread and only hand over.
    `progress(token, logprob, serial)` is called for every sampled token, one at a time, for streams."""

    rid: str
    tokens_P: np.ndarray
    max_new_tokens: int
    done: Callable[[Result], None]
    temperature: float = 1.0
    stop_tokens: frozenset[int] = frozenset()
    extra_key: str | None = ""
    seed: int | None = None
    routing_start: int = -1
    progress: Callable[[int, float, int], None] | None = None
    arrived: float = field(default_factory=time.perf_counter)
    # Filled by the engine:
    key: str = ""  # of its cache entries
    row: int = -1
    cached_tokens: int = 0
    computed: int = field(default=0)  # prompt tokens whose keys and values are there
    began: float = 0.0  # when its first token was sampled

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens_P)
