"""A file of lines, one point each: {"run", "name", "step", "value", "at"}. Several runs may share a file. Needs no package."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from etude.figures.points import MARKERS, Point, Row, mark
from etude.figures.sink import NotWritten, alone, told
from shared.contracts.life import RunState


class _Line(msgspec.Struct, frozen=True):
    run: str
    name: str
    step: int
    value: float
    at: float


class Lines:
    """See sink.Sink. A row's marker is its last line; what stands behind the last marker was cut off by a crash, and is
    written again."""

    def __init__(self, path: Path, run: str) -> None:
        self._path, self._run = path, run
        with told(str(path), OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = alone(path.with_name(f".{path.name}.lock"))
            path.touch()
            self._file = path.open("rb+")
            self._file.truncate(self._whole())
            self._file.seek(0, os.SEEK_END)

    def _whole(self) -> int:
        """Bytes up to the end of the last whole row."""
        end = place = 0
        with self._path.open("rb") as file:
            for number, text in enumerate(file, 1):
                place += len(text)
                if text.endswith(b"\n") and self._decode(text, number).name in MARKERS.values():
                    end = place
        return end

    def _decode(self, text: bytes, number: int) -> _Line:
        try:
            return msgspec.json.decode(text, type=_Line)
        except msgspec.DecodeError as error:
            raise NotWritten(f"{self._path}, line {number}: {error}; give a file that `etude figures` wrote") from None

    def _lines(self) -> Iterator[_Line]:
        with self._path.open("rb") as file:
            for number, text in enumerate(file, 1):
                yield self._decode(text, number)

    def held(self) -> list[Point]:
        with told(str(self._path), OSError):
            points = [
                Point(line.name, line.step, line.value, line.at) for line in self._lines() if line.run == self._run
            ]
        return [point for point in points if mark(point) is not None]

    def write(self, rows: Sequence[Row]) -> None:
        lines = [_Line(self._run, *point) for row in rows for point in row.points]
        with told(str(self._path), OSError):
            self._file.write(msgspec.json.Encoder().encode_lines(lines))
            self._file.flush()

    def discard(self, after: int) -> None:
        with told(str(self._path), OSError):
            fresh = self._path.with_name(f".{self._path.name}.new")
            kept = (line for line in self._lines() if line.run != self._run or line.step <= after)
            with fresh.open("wb") as file:
                file.write(msgspec.json.Encoder().encode_lines(kept))
            self._file.close()
            fresh.replace(self._path)
            self._file = self._path.open("rb+")
            self._file.seek(0, os.SEEK_END)

    def close(self, state: RunState) -> None:
        with told(str(self._path), OSError):
            self._file.close()
            self._lock.close()
