"""Which split a module belongs to: by a hash of (distribution, module), so the same on every machine.

Only modules of `train` may serve pretraining and SFT. That holds for code that no pack was made of, too: on another
machine, with other versions, a pack may be.

Distributions of corpus.txt serve pretraining alone: all of their modules are `train`, wherever they are installed.
"""

from __future__ import annotations

import hashlib
from importlib import resources

SPLITS = ("train", "rl", "dev", "held_out")
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
