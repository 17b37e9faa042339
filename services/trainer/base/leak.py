"""The leak report: no function of the RL, dev and held-out splits is in any training stream.

Two tests per function of those splits: the exact key (alpha-renamed syntax tree) and near-duplicates by MinHash
(shared.problems.signatures). Solutions are compared, and so are the broken files as a whole.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from services.trainer.base import pack as packs
from shared.problems.signatures import Known, Signatures, fingerprint, read_signatures

SPLITS = ("rl", "dev", "held_out")
SOURCES = "sources.json"  # in the streams' directory

Used = Signatures | Known


@dataclass(frozen=True, slots=True)
class SplitReport:
    functions: int
    exact: int
    near: int  # exact ones included
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeakReport:
    """`streams`: distinct functions used by any pretraining or SFT stream. `source`: where they were read."""

    streams: int
    splits: dict[str, SplitReport]
    source: str = ""

    @property
    def clean(self) -> bool:
        return all(split.near == 0 for split in self.splits.values())

    def to_json(self) -> str:
        return json.dumps({"clean": self.clean, **asdict(self)}, indent=2)


def of_streams(pack: Path, streams: Path) -> LeakReport:
    """`streams`: the directory that streams.make filled."""
    used = Signatures()
    sources = json.loads((streams / SOURCES).read_text())
    for source in sources:
        used.add(*fingerprint(source))
    return _report(pack, used, len(sources), streams / SOURCES)


def of_signatures(pack: Path, signatures: Path) -> LeakReport:
    """From what a checkpoint ships instead: of each function its key and its minima, so both tests are the same. Raises
    ValueError."""
    known = read_signatures(signatures)
    return _report(pack, known, len(known), signatures)


def _report(pack: Path, used: Used, functions: int, source: Path) -> LeakReport:
    return LeakReport(functions, {split: _split(pack, split, used) for split in SPLITS}, str(source))


def _split(pack: Path, split: str, used: Used) -> SplitReport:
    originals = {packs.solution(hidden).rstrip("\n"): problem for problem, hidden in packs.problems(pack, split)}
    exact = near = 0
    examples = []
    for source, problem in sorted(originals.items()):
        key, minima = fingerprint(source)
        if used.has_near(key, minima):
            near += 1
            exact += used.has(key)
            examples.append(f"{problem.id} {problem.origin}")
    return SplitReport(len(originals), exact, near, tuple(examples[:5]))
