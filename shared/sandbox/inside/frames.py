"""Frames on the channel between an adapter and the loop inside a sandbox.

A frame is a header (`HEAD`: bytes of the payload, kind, number) and its payload. The payload of REQUEST and ANSWER begins with
the length of a JSON object; behind the object comes a blob of raw bytes. The payload of OUTPUT is raw bytes.

`number`: of REQUEST and ANSWER, the request's; of OUTPUT and ENDED, the process's, which the adapter chose, or that of a
connection, which OPENED tells (connections.py).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

HEAD = struct.Struct(">IBI")
_LENGTH = struct.Struct(">I")
REQUEST, ANSWER, OUTPUT, ENDED, OPENED = 1, 2, 3, 4, 5
MAX_PAYLOAD = 80 << 20
# Bytes of the output of a process or a connection that may be on their way before the adapter took the first.
WINDOW = 1 << 18
CHUNK = 1 << 16


class BrokenChannel(Exception):
    """The stream of frames cannot be read any further."""


def message(kind: int, number: int, head: dict[str, Any], blob: bytes = b"") -> bytes:
    """Return a frame of kind REQUEST, ANSWER, ENDED or OPENED. Raises ValueError where it is too long."""
    text = json.dumps(head).encode()
    length = _LENGTH.size + len(text) + len(blob)
    if length > MAX_PAYLOAD:
        raise ValueError(f"sandbox: found a message of {length} bytes, allowed at most {MAX_PAYLOAD}")
    return HEAD.pack(length, kind, number) + _LENGTH.pack(len(text)) + text + blob


def output(number: int, data: bytes) -> bytes:
    return HEAD.pack(len(data), OUTPUT, number) + data


def parse(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the object and the blob of a message. Raises BrokenChannel."""
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(payload)[0]
        head = json.loads(payload[_LENGTH.size : end])
    except (struct.error, ValueError, RecursionError) as error:
        raise BrokenChannel(f"message: {error}") from None
    if not isinstance(head, dict) or end > len(payload):
        raise BrokenChannel("message: not an object, or cut")
    return head, payload[end:]


class Splitter:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[int, int, bytes]]:
        """Yield (kind, number, payload) of each frame that is now whole. Raises BrokenChannel."""
        self._held += data
        at = 0
        try:
            while len(self._held) - at >= HEAD.size:
                length, kind, number = HEAD.unpack_from(self._held, at)
                if length > MAX_PAYLOAD or kind not in (REQUEST, ANSWER, OUTPUT, ENDED, OPENED):
                    raise BrokenChannel(f"frame: found kind {kind} with {length} bytes")
                end = at + HEAD.size + length
                if len(self._held) < end:
                    break
                payload = bytes(self._held[at + HEAD.size : end])
                at = end
                yield kind, number, payload
        finally:
            del self._held[:at]
