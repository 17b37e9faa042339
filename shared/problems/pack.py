"""Packs: many problems as two objects, public and hidden, zstd-compressed JSON lines joined by id.

`read_problems` and `read_hidden` read all of it; `Lines` decompresses once and finds a problem by its id without parsing
the rest, because the first field of every line is its id. Equal problems give equal bytes (same zstandard version).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import msgspec
import zstandard

from shared.problems.schema import Hidden, Problem

MAX_PACK_BYTES = 1 << 30  # decompressed
_LEVEL = 12
_HEAD = b'{"id":"'

T = TypeVar("T", Problem, Hidden)


class PackError(ValueError):
    """The bytes are no pack; the text says what was found."""


def write(items: Iterable[msgspec.Struct]) -> bytes:
    """One part of a pack, public or hidden: one line each, in the order given."""
    lines = b"".join(msgspec.json.encode(item) + b"\n" for item in items)
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(lines)


def decompress(data: bytes) -> bytes:
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_PACK_BYTES:
            raise PackError(f"pack of {size} bytes decompressed; allowed: 0 to {MAX_PACK_BYTES}")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise PackError(f"no zstd data: {error}") from None


class Lines(Generic[T]):
    """A read pack of one kind, `Problem` or `Hidden`."""

    def __init__(self, data: bytes, kind: type[T]) -> None:
        self._text = decompress(data)
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._places: dict[str, tuple[int, int]] = {}
        start = 0
        while start < len(self._text):
            end = self._text.find(b"\n", start)
            end = len(self._text) if end < 0 else end
            quote = self._text.find(b'"', start + len(_HEAD), end)
            if not self._text.startswith(_HEAD, start) or quote < 0:
                raise PackError(f"line {len(self._places) + 1} does not begin with its id")
            self._places[self._text[start + len(_HEAD) : quote].decode()] = (start, end)
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
        start, end = self._places[problem]
        try:
            return self._decoder.decode(memoryview(self._text)[start:end])
        except msgspec.DecodeError as error:
            raise PackError(f"problem {problem!r}: {error}") from None

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
