"""A pack: two objects of zstd-compressed JSON lines, the public part (Problem) and the hidden part (Hidden), joined by id.

The public object goes to whoever runs the agent; the hidden one only to graders. Writing is deterministic: the same
entries give the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec
import zstandard

from shared.problems.schema import Hidden, Problem, ProblemError

LEVEL = 10
MAX_UNPACKED = 1 << 30  # a bomb is refused while it is unpacked
_STEP = 1 << 16  # bytes unpacked at a time

Entry = TypeVar("Entry", Problem, Hidden)


def read_problems(data: bytes) -> list[Problem]:
    """The public part. Raises ProblemError naming the line."""
    return list(_read(data, Problem))


def read_hidden(data: bytes) -> list[Hidden]:
    """The hidden part. Raises ProblemError naming the line."""
    return list(_read(data, Hidden))


def write(entries: Iterable[Problem] | Iterable[Hidden]) -> bytes:
    """One part of a pack, in the order given."""
    encode = msgspec.json.Encoder().encode
    return zstandard.ZstdCompressor(level=LEVEL).compress(b"".join(encode(entry) + b"\n" for entry in entries))


def _read(data: bytes, kind: type[Entry]) -> Iterator[Entry]:
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(io.BytesIO(_unpack(data)), 1):
        if line.strip():
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ProblemError(f"line {number}: {error}") from None


def _unpack(data: bytes) -> bytes:
    """In small steps, so that a bomb ends early; frames may follow each other, none may be cut short."""
    out, rest = io.BytesIO(), memoryview(data)
    try:
        while True:
            frame = zstandard.ZstdDecompressor().decompressobj()
            while rest and not frame.eof:
                step, rest = rest[:_STEP], rest[_STEP:]
                out.write(frame.decompress(step))
                if out.tell() > MAX_UNPACKED:
                    raise ProblemError(f"a pack of more than {MAX_UNPACKED} bytes when unpacked")
            if not frame.eof:
                raise ProblemError(
                    f"not a whole pack (zstd-compressed JSON lines): the end of {len(data)} bytes is missing"
                )
            rest = memoryview(frame.unused_data + bytes(rest))
            if not rest:
                return out.getvalue()
    except zstandard.ZstdError as error:
        raise ProblemError(f"not a pack (zstd-compressed JSON lines): {error}") from None
