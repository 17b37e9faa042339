"""Runs side by side: in which fields their configurations differ, and what came of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from services.console.board import RunBoard
from shared.contracts.run import Ref, RunConfig

MOST = 4  # runs: as many as there are colours
NONE = "–"
_OWN = {"run"}  # differs by definition


def differing(configs: Sequence[RunConfig | None]) -> list[tuple[str, list[str]]]:
    """(field, its value in each run) of every field that is not alike in all, by dotted name. A configuration that cannot be
    read is None: it is left out of the judgement, and shown as unknown."""
    flat = [dict(_fields(config)) if config else None for config in configs]
    known = [fields for fields in flat if fields is not None]
    names = sorted({name for fields in known for name in fields} - _OWN)
    rows = []
    for name in names:
        if len({fields.get(name, NONE) for fields in known}) > 1:
            rows.append((name, ["unknown" if fields is None else fields.get(name, NONE) for fields in flat]))
    return rows


def _fields(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Ref):  # where it lies differs from run to run; what it is, the checksum says
        yield name, value.checksum[:12]
    elif isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            yield from _fields(getattr(value, field), f"{name}.{field}" if name else field)
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from _fields(value[key], f"{name}.{key}")
    else:
        yield name, NONE if value is None else str(value)


def outcomes(runs: Sequence[RunBoard]) -> list[tuple[str, list[str]]]:
    """(figure, its value in each run): where each stands, and its last evaluation."""
    lately = [run.lately() for run in runs]
    rows = [
        ("status", [run.state.value for run in runs]),
        ("steps", [f"{run.step:,}" for run in runs]),
        ("version", [str(run.serial) if run.serial >= 0 else NONE for run in runs]),
        ("attempts scored", [f"{run.scored:,}" for run in runs]),
        ("lost to infrastructure", [f"{run.failed:,}" for run in runs]),
        ("solved, last attempts", [f"{100 * t.solved / t.attempts:.1f} %" if t.attempts else NONE for t in lately]),
        ("reward, last attempts", [f"{t.reward / t.attempts:.3f}" if t.attempts else NONE for t in lately]),
        ("greatest age trained", [str(_oldest(run)) for run in runs]),
    ]
    last = [max(run.evals.values(), key=lambda e: (e.serial, e.eval), default=None) for run in runs]
    if any(last):
        rows.append(("last evaluation", [f"{e.eval}, version {e.serial}" if e else NONE for e in last]))
        names = sorted({name for e in last if e for name in e.figures})
        for name in names:
            values = [e.figures.get(name) if e else None for e in last]
            rows.append((f"its {name}", [NONE if value is None else f"{value:.4g}" for value in values]))
    return rows


def _oldest(run: RunBoard) -> int:
    return max((step.age for step in run.steps.values()), default=0)
