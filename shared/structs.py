"""The struct types of a process, worked out before its threads begin.

msgspec works out a type's fields when it is first decoded. Two threads that do so for one type at once end the process: one
reads what the other has half built (segmentation fault, seen with msgspec 0.22). So whoever connects to a bus or to a store,
or loads a plug-in, settles all types that are defined by then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import msgspec

_LOCK = threading.Lock()
_settled: set[type] = set()


def settle() -> None:
    """Work out the fields of every struct type that was defined so far. Cheap where that was done before."""
    with _LOCK:
        for kind in _below(msgspec.Struct):
            if kind in _settled:
                continue
            with contextlib.suppress(NameError, TypeError):  # a base whose annotations only type checkers can read
                msgspec.json.Decoder(kind)
            _settled.add(kind)


def _below(base: type) -> Iterator[type]:
    kinds: list[type] = base.__subclasses__()
    for kind in kinds:
        yield kind
        yield from _below(kind)
