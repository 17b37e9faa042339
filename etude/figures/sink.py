"""Where figures go: one small Protocol, four adapters, and the few lines that keep any of them up to date."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from etude.figures.points import Mark, Past, Point, Row, mark
from shared.contracts.life import RunState
from shared.settings import Told

Parameters = Mapping[str, str | int | float | bool]
FORMS = ("tensorboard:DIR", "wandb:PROJECT", "wandb:ENTITY/PROJECT", "mlflow:URI", "jsonl:FILE")


class NotWritten(Told, RuntimeError):
    """The target cannot be used, and why. What it took before stays; calling again goes on there."""


class Sink(Protocol):
    """One run's curves in one target. Each method raises NotWritten where the target fails."""

    def held(self) -> list[Point]:
        """What the target holds of the run, from earlier calls too: the markers at least (`points.MARKERS`)."""

    def write(self, rows: Sequence[Row]) -> None:
        """Adds rows that it does not hold; they are the target's when this returns. A row whose marker is held is there
        whole, whatever crashed."""

    def discard(self, after: int) -> None:
        """Steps after this one are dead: nobody who looks at the curve may see them. What cannot forget single steps leaves
        its curve as it is, marked as superseded, begins a fresh one and holds nothing."""

    def close(self, state: RunState) -> None:
        """`state`: of the run, as far as it is known."""


def update(sink: Sink, past: Past, held: set[Mark]) -> int:
    """Brings the target up to date. `held`: the marks of what it holds, kept up to date too. Returns how many points it took."""
    if (last := past.last_good(held)) is not None:
        sink.discard(last)
        held.clear()
        held.update(marks(sink))
    new = [row for row in past.rows if row.mark not in held]
    if new:
        sink.write(new)
    held.update(row.mark for row in new)
    return sum(len(row.figures) for row in new)


def marks(sink: Sink) -> set[Mark]:
    return {found for point in sink.held() if (found := mark(point)) is not None}


def connect(target: str, run: str, parameters: Parameters) -> Sink:
    """`parameters`: what the run learns with, for targets that have a place for it. Raises NotWritten."""
    kind, _, where = target.partition(":")
    if where:
        match kind:
            case "tensorboard":
                require("tensorboard", "tensorboard")
                from etude.figures.tensorboard import TensorBoard

                return TensorBoard(Path(where).expanduser(), run, parameters)
            case "wandb":
                require("wandb", "wandb")
                from etude.figures.wandb import Wandb

                return Wandb(where, run, parameters)
            case "mlflow":
                require("mlflow", "mlflow")
                from etude.figures.mlflow import Mlflow

                return Mlflow(where, run, parameters)
            case "jsonl":
                from etude.figures.jsonl import Lines

                return Lines(Path(where).expanduser(), run)
    raise NotWritten(f"--to: found {target!r}; allowed: {', '.join(FORMS)}")


def require(package: str, extra: str) -> None:
    """Raises NotWritten naming the extra. A folder of that name where one stands is no package: W&B leaves one behind."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise NotWritten(
            f"--to {extra}: the package {package} is not installed here; pip install 'etude[{extra}]' "
            f"(in a checkout: pip install '.[{extra}]'). jsonl:FILE needs none"
        )


@contextlib.contextmanager
def told(where: str, *errors: type[Exception]) -> Iterator[None]:
    """Turns what a client raises into NotWritten."""
    try:
        yield
    except errors as error:
        raise NotWritten(f"{where}: {error}") from error


def alone(path: Path) -> IO[bytes]:
    """Nobody else writes what `path` guards until the file that is returned is closed. Raises NotWritten."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise NotWritten(f"{path.parent}: another `etude figures` writes there; end it first") from None
    return file
