"""Which split a module belongs to: by a hash of (distribution, module), so the same on every machine.

Only modules of `train` may serve pretraining and SFT. That holds for code that no pack was made of, too: on another
machine, with other versions, a pack may be.

Distributions of corpus.txt serve pretraining alone: all of their modules are `train`, wherever they are installed.

Problems of one's own are practised on or held out, by a hash of their relatives (`own_splits`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib import resources
from typing import TypeVar

import xxhash

from shared.problems.schema import Hidden, Problem

P = TypeVar("P", bound=Problem)
H = TypeVar("H", bound=Hidden)

SPLITS = ("train", "rl", "dev", "held_out")
HELD_OUT = 0.2  # of problems of one's own, unless told otherwise
# Training streams and RL need many functions, the report needs 150 held-out ones.
_SHARES = (("held_out", 0.14), ("dev", 0.06), ("rl", 0.35), ("train", 0.45))


CORPUS = frozenset(
    line.split("==")[0]
    for line in resources.files("shared.problems").joinpath("corpus.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def share(text: str) -> float:
    """A number in [0, 1) that follows from the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def split_of(distribution: str, module: str) -> str:
    """`distribution`: normalised name (lower case, `-`), `python` for the standard library. `module`: dotted."""
    if distribution in CORPUS:
        return "train"
    place = share(f"split {distribution}:{module}")
    for name, size in _SHARES:
        if place < size:
            return name
        place -= size
    return "train"


def own_splits(pairs: Iterable[tuple[P, H]], held_out: float) -> dict[str, list[tuple[P, H]]]:
    """`rl` and `held_out`, relatives together; `held_out` is the expected share, of relatives. By their hash alone, so that a
    problem stays where it is when others come or go; either split may be empty."""
    splits: dict[str, list[tuple[P, H]]] = {"rl": [], "held_out": []}
    for problem, hidden in pairs:
        relatives = problem.cell or problem.id
        held = xxhash.xxh3_64_intdigest(relatives.encode()) % 1000 < held_out * 1000
        splits["held_out" if held else "rl"].append((problem, hidden))
    return splits
