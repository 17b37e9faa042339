"""Decoders that `benchmarks.decode` compares: each a process that answers one JSON line with another.

    python -m benchmarks.decoders.embedded CHECKPOINT SETTING…       (ours; the peers are modules beside it)

First it says `Ready`, then answers each `Batch` with a `Took`. A peer may live in an environment of its own: nothing here
and in the peers' modules imports more than the standard library and what that environment holds.

A batch is B prompts of equal length; every one is continued by exactly `new` tokens, sampled at `temperature` (no stop
token, no top-k, no top-p). `seconds` is the whole of it, prompts included; `first_s` the time until every prompt has its
first token (0: not known).
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Ready:
    name: str  # what decodes, its version and its settings


@dataclass(frozen=True)
class Batch:
    prompts: list[list[int]]
    new: int
    temperature: float = 1.0
    drafts: str = "none"  # of an engine that can: none, always, gated (where they pay)


@dataclass(frozen=True)
class Took:
    seconds: float
    first_s: float
    tokens: int  # sampled
    memory_mib: float = 0.0  # the process's greatest so far
    note: str = ""


def memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def serve(name: str, decode: Callable[[Batch], Took]) -> None:
    """Answers on standard output until standard input ends. What the decoder prints itself goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(asdict(Ready(name))), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(asdict(decode(Batch(**json.loads(line))))), file=answers, flush=True)
