"""Packs: many problems as two objects, public and hidden, zstd-compressed JSON lines joined by id.

`read_problems` and `read_hidden` read all of it; `Lines` decompresses once and finds a problem by its id without parsing
the rest. Packs may be joined byte by byte: several zstd frames are one pack. Equal problems give equal bytes (same
zstandard version).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Generic, Literal, TypeVar

import msgspec
import zstandard

from shared.problems.schema import Hidden, Problem, ProblemError
from shared.problems.splits import SPLITS

MAX_PACK_BYTES = 1 << 30  # decompressed
_LEVEL = 12
_PIECE = 1024  # bytes that are decompressed at once, to 32 MB at most: a bomb is noticed before it has unfolded

T = TypeVar("T", Problem, Hidden)
Part = Literal["public", "hidden"]

PARTS: tuple[Part, ...] = ("public", "hidden")
PRETRAIN = "pretrain.jsonl.zst"  # functions of the train split, beside its problems


def file_name(split: str, part: Part) -> str:
    """Of a part of a split in the directory of a pack."""
    return f"{split}.{part}.jsonl.zst"


def splits_in(directory: Path) -> list[str]:
    """Those whose public part the directory of a pack has, the known ones first and in their order."""
    ending = file_name("", "public")
    there = {path.name.removesuffix(ending) for path in directory.glob(f"*{ending}")}
    return [name for name in SPLITS if name in there] + sorted(there - set(SPLITS))


class PackError(ProblemError):
    """The bytes are no pack; the text says what was found."""


class _Head(msgspec.Struct):
    id: str


_HEADS = msgspec.json.Decoder(_Head)


def write(items: Iterable[msgspec.Struct]) -> bytes:
    """One part of a pack, public or hidden: one line each, in the order given."""
    lines = b"".join(msgspec.json.encode(item) + b"\n" for item in items)
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(lines)


def decompress(data: bytes) -> bytes:
    """The text of all frames. Raises PackError for what is damaged, cut short or larger than MAX_PACK_BYTES."""
    parts: list[bytes] = []
    size = at = 0
    while at < len(data) or not parts:
        reader = zstandard.ZstdDecompressor().decompressobj(read_across_frames=False)
        while not reader.eof:
            piece = data[at : at + _PIECE]
            if not piece:
                raise PackError(f"pack: cut short after {len(data)} bytes")
            try:
                part = reader.decompress(piece)
            except zstandard.ZstdError as error:
                raise PackError(f"pack: no zstd data: {error}") from None
            parts.append(part)
            size += len(part)
            if size > MAX_PACK_BYTES:
                raise PackError(f"pack of more than {MAX_PACK_BYTES} bytes decompressed")
            at += len(piece) - len(reader.unused_data)
    return b"".join(parts)


class Lines(Generic[T]):
    """A read part of a pack, of `Problem` or `Hidden`. An iteration has the order of the pack."""

    def __init__(self, data: bytes, kind: type[T]) -> None:
        self._text = decompress(data)
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._places: dict[str, tuple[int, int, int]] = {}  # id → line number, start, end
        start = number = 0
        while start < len(self._text):
            end = self._text.find(b"\n", start)
            end = len(self._text) if end < 0 else end
            number += 1
            try:
                head = _HEADS.decode(memoryview(self._text)[start:end])
            except msgspec.DecodeError as error:
                raise PackError(f"pack: line {number}: {error}") from None
            self._places[head.id] = (number, start, end)
            start = end + 1

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, problem: str) -> bool:
        return problem in self._places

    @property
    def ids(self) -> list[str]:
        return list(self._places)

    def __getitem__(self, problem: str) -> T:
        """KeyError for an id that the pack does not hold; PackError for a line that is no such object."""
        number, start, end = self._places[problem]
        try:
            return self._decoder.decode(memoryview(self._text)[start:end])
        except msgspec.DecodeError as error:
            raise PackError(f"pack: line {number}: {error}") from None

    def __iter__(self) -> Iterator[T]:
        return (self[problem] for problem in self._places)


def read_problems(data: bytes) -> list[Problem]:
    """The public part, whole. Raises PackError."""
    return list(Lines(data, Problem))


def read_hidden(data: bytes) -> list[Hidden]:
    """The hidden part, whole. Raises PackError."""
    return list(Lines(data, Hidden))


def export_line(problem: Problem, hidden: Hidden) -> str:
    """One problem as a line of the documented JSONL, hidden part inside."""
    raw = msgspec.to_builtins(problem)
    raw["hidden"] = msgspec.to_builtins(hidden.cases)
    raw["solution"], raw["bug"] = hidden.solution, hidden.bug
    return msgspec.json.encode(raw).decode()
