"""Compact columns for ten million rows: a column that grows, an index, names without Python objects. Pure.

Invariants:
- A row keeps its handle, 0, 1, 2, …, for as long as the process lives. Handles are not in the ledger.
- A name has one handle. The index finds names by half of their fingerprint; those with the same are told apart by their text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import xxhash

Array = np.ndarray[Any, Any]


class Column:
    """A numpy column that grows by an eighth when it is full. `rows` may be longer than the column."""

    def __init__(self, dtype: Any) -> None:
        self.rows = np.zeros(16, dtype=dtype)
        self.size = 0

    def extend(self, values: Array) -> None:
        needed = self.size + len(values)
        if needed > len(self.rows):
            grown = np.zeros(max(needed, len(self.rows) + len(self.rows) // 8), dtype=self.rows.dtype)
            grown[: self.size] = self.rows[: self.size]
            self.rows = grown
        self.rows[self.size : needed] = values
        self.size = needed

    @property
    def view(self) -> Array:
        """The column itself, valid until it grows."""
        return self.rows[: self.size]


class Coded:
    """A column of few distinct names, four bytes a row."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._codes: dict[str, int] = {}
        self._rows = Column(np.uint32)

    def extend(self, names: Sequence[str]) -> None:
        codes = self._codes
        self._rows.extend(np.fromiter((codes.setdefault(n, len(codes)) for n in names), np.uint32, len(names)))
        self.names += islice(codes, len(self.names), None)

    def __getitem__(self, handle: int) -> str:
        return self.names[self._rows.rows[handle]]

    def code(self, name: str) -> int:
        """Its place in `names`."""
        return self._codes[name]

    def codes(self, handles: Array) -> Array:
        """Places in `names`."""
        found: Array = self._rows.rows[handles]
        return found


class Index:
    """Handles by a key of 32 bits; a key may have several. Its runs are sorted, each more than twice as long as the next: adding
    n keys one by one costs O(n log n) in all, a look-up O(log² n)."""

    def __init__(self) -> None:
        self._runs: list[tuple[Array, Array]] = []

    def add(self, keys: Array, handles: Array) -> None:
        if not len(keys):
            return
        self._runs.append(_sorted(keys.astype(np.uint32), handles.astype(np.uint32)))
        while len(self._runs) > 1 and len(self._runs[-2][0]) <= 2 * len(self._runs[-1][0]):
            (k, h), (other_k, other_h) = self._runs.pop(), self._runs.pop()
            self._runs.append(_sorted(np.concatenate([other_k, k]), np.concatenate([other_h, h])))

    def find(self, key: int) -> Array:
        """The handles of one key; empty: it has none."""
        wanted = np.uint32(key)
        found = []
        for keys, handles in self._runs:
            start = int(keys.searchsorted(wanted))
            if start < len(keys) and keys[start] == wanted:
                found.append(handles[start : int(keys.searchsorted(wanted, side="right"))])
        return np.concatenate(found) if found else np.zeros(0, dtype=np.uint32)

    def any_of(self, wanted: Array) -> Array:
        """One handle per key; -1: it has none."""
        wanted = wanted.astype(np.uint32)
        found = np.full(len(wanted), -1, dtype=np.int64)
        for keys, handles in self._runs:
            at = np.minimum(keys.searchsorted(wanted), len(keys) - 1)
            there = keys[at] == wanted
            found[there] = handles[at[there]]
        return found


def _sorted(keys: Array, handles: Array) -> tuple[Array, Array]:
    order = np.argsort(keys, kind="stable")
    return keys[order], handles[order]


def fingerprints(names: Sequence[str]) -> Array:
    """uint64 per name, the same in every process."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, map(str.encode, names)), dtype=np.uint64, count=len(names))


class Names:
    """Names and their handles, in some 20 bytes a name and its text."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._ends = Column(np.int64)
        self._index = Index()

    def __len__(self) -> int:
        return self._ends.size

    def __getitem__(self, handle: int) -> str:
        if not 0 <= handle < len(self):
            raise IndexError(f"handle {handle}; allowed: 0 to {len(self) - 1}")
        ends = self._ends.rows
        start = int(ends[handle - 1]) if handle else 0
        return self._text[start : int(ends[handle])].decode()

    def __iter__(self) -> Iterator[str]:
        return (self[handle] for handle in range(len(self)))

    def __contains__(self, name: str) -> bool:
        return self.find(name) is not None

    def find(self, name: str) -> int | None:
        """None: it has no handle."""
        candidates = self._index.find(xxhash.xxh3_64_intdigest(name.encode()) >> 32)
        return next((int(handle) for handle in candidates if self[int(handle)] == name), None)

    def extend(self, names: Sequence[str], prints: Array) -> Array:
        """Return the handles of new names. Each must be new, and different from the others. `prints`: their fingerprints."""
        first = len(self)
        encoded = [name.encode() for name in names]
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        self._ends.extend(len(self._text) + np.cumsum(lengths))
        self._text += b"".join(encoded)
        handles = np.arange(first, first + len(names), dtype=np.uint32)
        self._index.add(prints >> np.uint64(32), handles)
        return handles

    def known(self, names: Sequence[str], prints: Array) -> list[int | None]:
        """As `find`, of many at a time."""
        likely = self._index.any_of(prints >> np.uint64(32)).tolist()
        return [
            None if handle < 0 else handle if self[handle] == name else self.find(name)
            for name, handle in zip(names, likely, strict=True)
        ]

    def intern(self, names: Sequence[str]) -> dict[str, int]:
        """Return the handle of each name, new ones too."""
        distinct = list(dict.fromkeys(names))
        prints = fingerprints(distinct)
        found = self.known(distinct, prints)
        new = [at for at, handle in enumerate(found) if handle is None]
        handles = self.extend([distinct[at] for at in new], prints[new])
        for at, handle in zip(new, handles.tolist(), strict=True):
            found[at] = handle
        return dict(zip(distinct, found, strict=True))  # type: ignore[arg-type]
