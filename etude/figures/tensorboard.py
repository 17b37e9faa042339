"""TensorBoard: event files below DIR/RUN, one event a row, what the run learns with as hyper-parameters.

TensorBoard's two readers differ. The quick one drops, of a name, what has the same or a later step as a point that comes after;
the other keeps all but what a session's start drops. So steps of a name are only ever added in ascending order; where one
comes late or steps have died, all that is still good is written anew into one file, behind a session's start that drops
the rest, also from a TensorBoard that is looking. Of several points of a name at one step (two evaluations of a version, a pause
and its end) the quick reader shows the last. Values are float32, as TensorBoard's are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from etude.figures.points import Kind, Point, Row
from etude.figures.sink import Parameters, alone, told
from shared.contracts.life import RunState

KINDS = frozenset(map(str, Kind))
OURS = ".etude"  # how our event files end; others below the same directory are left alone


class TensorBoard:
    """See sink.Sink."""

    def __init__(self, directory: Path, run: str, parameters: Parameters) -> None:
        self._folder, self._parameters = directory / run, parameters
        with told(str(self._folder), OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = alone(self._folder / ".lock")
            self._writer: EventFileWriter | None = None  # of this call's file, once there is something to write
            self._last = _last_steps(self._read())

    def held(self) -> list[Point]:
        with told(str(self._folder), OSError):
            return self._read()

    def write(self, rows: Sequence[Row]) -> None:
        with told(str(self._folder), OSError):
            points = [point for row in rows for point in row.points]
            if any(row.step < self._last.get(row.kind, 0) for row in rows):
                self._again([*self._read(), *points])
            else:
                self._add(self._writer or self._begin(fresh=not self._last), points)

    def discard(self, after: int) -> None:
        with told(str(self._folder), OSError):
            self._again([point for point in self._read() if point.step <= after])

    def close(self, state: RunState) -> None:
        with told(str(self._folder), OSError):
            if self._writer is not None:
                self._writer.close()
            self._lock.close()

    def _read(self) -> list[Point]:
        """Everything of ours that TensorBoard would find."""
        found = EventAccumulator(str(self._folder), size_guidance={SCALARS: 0}).Reload()
        names = [name for name in found.Tags()[SCALARS] if name.partition("/")[0] in KINDS]
        return [Point(name, one.step, one.value, one.wall_time) for name in names for one in found.Scalars(name)]

    def _begin(self, *, fresh: bool) -> EventFileWriter:
        """`fresh`: nothing of the run stands in another file."""
        self._writer = EventFileWriter(str(self._folder), filename_suffix=OURS)
        if fresh:
            self._writer.add_event(Event(wall_time=time.time(), session_log=SessionLog(status=SessionLog.START)))
            if self._parameters:
                self._writer.add_event(Event(wall_time=time.time(), summary=hparams_pb(dict(self._parameters))))
        return self._writer

    def _add(self, writer: EventFileWriter, points: Iterable[Point]) -> None:
        """In the order given; neighbours of one step and time are one event, and with it there whole or not at all."""
        for (step, at), together in groupby(points, key=lambda point: (point.step, point.at)):
            values = [Summary.Value(tag=name, simple_value=value) for name, _, value, _ in together]
            writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
            self._last |= _last_steps(Point(value.tag, step, 0.0, at) for value in values)
        writer.flush()

    def _again(self, points: Iterable[Point]) -> None:
        if self._writer is not None:
            self._writer.close()
        old = list(self._folder.glob(f"events.out.tfevents.*{OURS}"))
        self._last = {}
        self._add(self._begin(fresh=True), sorted(points, key=lambda point: (point.step, point.at)))
        for path in old:
            path.unlink()


def _last_steps(points: Iterable[Point]) -> dict[str, int]:
    """By the kind of row."""
    last: dict[str, int] = {}
    for name, step, _, _ in points:
        kind = name.partition("/")[0]
        last[kind] = max(step, last.get(kind, 0))
    return last
