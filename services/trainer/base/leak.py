"""The leak report: no function of the RL, dev and held-out splits is in any training stream.

Two tests per function of those splits: the exact key (alpha-renamed syntax tree) and near-duplicates by MinHash
(shared.problems.signatures). Solutions are compared, and so are the broken files as a whole.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from services.trainer.base import pack as packs
from shared.problems.signatures import Signatures, fingerprint

SPLITS = ("rl", "dev", "held_out")


@dataclass(frozen=True, slots=True)
class SplitReport:
    functions: int
    exact: int
    near: int  # exact ones included
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeakReport:
    """`streams`: distinct functions used by any pretraining or SFT stream."""

    streams: int
    splits: dict[str, SplitReport]

    @property
    def clean(self) -> bool:
        return all(split.near == 0 for split in self.splits.values())

    def to_json(self) -> str:
        return json.dumps({"clean": self.clean, **asdict(self)}, indent=2)


def report(pack: Path, streams: Path) -> LeakReport:
    """`streams`: the directory that streams.make filled."""
    used, keys = Signatures(), set()
    sources = json.loads((streams / "sources.json").read_text())
    for source in sources:
        key, minima = fingerprint(source)
        used.add(key, minima)
        keys.add(key)
    return LeakReport(len(sources), {split: _split(pack, split, used, keys) for split in SPLITS})


def _split(pack: Path, split: str, used: Signatures, keys: set[str]) -> SplitReport:
    originals = {packs.solution(hidden).rstrip("\n"): problem for problem, hidden in packs.problems(pack, split)}
    exact = near = 0
    examples = []
    for source, problem in sorted(originals.items()):
        key, minima = fingerprint(source)
        if used.has_near(key, minima):
            near += 1
            exact += key in keys
            examples.append(f"{problem.id} {problem.origin}")
    return SplitReport(len(originals), exact, near, tuple(examples[:5]))
