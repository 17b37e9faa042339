"""Signatures of functions: which are the same, and which nearly, without shipping their text.

`fingerprint` gives both. The key hashes the text with local names renamed in order of appearance: equal keys, equal
functions. The signature is a MinHash of 4-grams of the renamed tokens: the share of equal minima estimates the Jaccard
similarity of two functions, vendored and slightly edited copies included.

The base policy ships the signatures of all functions that its training streams used; every pack is filtered against
them, so that nobody is trained or tested by RL on what pretraining has seen. The file is an `.npz` of two arrays:
`keys` uint64 [N], sorted, and `minima` uint64 [N, 12], four 16-bit minima to a word: 104 bytes a function. Hashes are
xxh3 and the permutations are constants of this file, so the numbers are the same on any machine and with any version of
Python or numpy.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from shared import syntax

MINIMA = 48
BYTES = MINIMA * 2
SHINGLE = 4  # tokens
NEAR = 0.6  # estimated Jaccard similarity from which two functions are near-duplicates

U64 = npt.NDArray[np.uint64]
_STREAM = [xxhash.xxh3_64_intdigest(f"etude minhash {index}".encode()) for index in range(2 * MINIMA)]
_FACTOR: U64 = np.array([value | 1 for value in _STREAM[:MINIMA]], dtype=np.uint64)
_OFFSET: U64 = np.array(_STREAM[MINIMA:], dtype=np.uint64)
_TOKEN = re.compile(r"[A-Za-z_0-9.]+|'[^']*'|\"[^\"]*\"|[^\sA-Za-z_0-9]{1,2}")


def fingerprint(source: str) -> tuple[str, bytes]:
    """(key, signature). The key, 16 hex digits, is the same for sources that differ in local names only; the signature
    is 48 minima of 16 bits, little-endian. Raises SyntaxError if the source does not parse."""
    text = renamed(source)
    tokens = _TOKEN.findall(text)
    shingles = {"\0".join(tokens[index : index + SHINGLE]) for index in range(max(1, len(tokens) - SHINGLE + 1))}
    hashes: U64 = np.array([xxhash.xxh3_64_intdigest(shingle.encode()) for shingle in shingles], dtype=np.uint64)
    with np.errstate(over="ignore"):
        permuted = (hashes[:, None] ^ (hashes[:, None] >> np.uint64(31))) * _FACTOR + _OFFSET
    return xxhash.xxh3_64_hexdigest(text.encode()), permuted.min(axis=0).astype("<u2").tobytes()


def renamed(source: str) -> str:
    """The source with bound names v0, v1, … in order of appearance and functions f0, f1, …"""
    tree = syntax.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names.setdefault(node.name, f"f{len(names)}")
    functions = len(names)
    stack: list[ast.AST] = [tree]
    order: list[ast.AST] = []
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(list(ast.iter_child_nodes(node))))
    for node in order:
        for attribute in _BINDS.get(type(node), ()):
            name = getattr(node, attribute)
            if name and (attribute != "id" or isinstance(node.ctx, ast.Store)):  # type: ignore[attr-defined]
                names.setdefault(name, f"v{len(names) - functions}")
    for node in order:
        for attribute in _NAMES.get(type(node), ()):
            name = getattr(node, attribute)
            if name in names:
                setattr(node, attribute, names[name])
    return ast.unparse(tree)


_BINDS: dict[type, tuple[str, ...]] = {ast.arg: ("arg",), ast.Name: ("id",), ast.ExceptHandler: ("name",)}
_NAMES: dict[type, tuple[str, ...]] = {**_BINDS, ast.FunctionDef: ("name",)}


class Signatures:
    """A set of functions known by their signatures alone. Look-ups are by bands of three minima, then by estimate."""

    _ROWS = 3

    def __init__(self, near: float = NEAR) -> None:
        self._near = near
        self._keys: set[int] = set()
        self._minima: list[bytes] = []
        self._bands: list[dict[bytes, list[int]]] = [{} for _ in range(MINIMA // self._ROWS)]

    def __len__(self) -> int:
        return len(self._minima)

    def add(self, key: str, minima: bytes) -> None:
        self._keys.add(int(key, 16))
        index = len(self._minima)
        self._minima.append(minima)
        for band, table in zip(self._split(minima), self._bands, strict=True):
            table.setdefault(band, []).append(index)

    def has(self, key: str) -> bool:
        """Whether the set holds the same function."""
        return int(key, 16) in self._keys

    def has_near(self, key: str, minima: bytes) -> bool:
        """Whether the set holds the same function or a near-duplicate of it."""
        if self.has(key):
            return True
        candidates = {
            index for band, table in zip(self._split(minima), self._bands, strict=True) for index in table.get(band, ())
        }
        if not candidates:
            return False
        own = np.frombuffer(minima, dtype="<u2")
        others = np.frombuffer(b"".join(self._minima[index] for index in candidates), dtype="<u2").reshape(-1, MINIMA)
        return bool(((others == own).mean(axis=1) >= self._near).any())

    def _split(self, minima: bytes) -> list[bytes]:
        width = 2 * self._ROWS
        return [minima[start : start + width] for start in range(0, BYTES, width)]


class Known:
    """A set of functions that grows no more, with the look-ups of `Signatures`. Sorted columns instead of tables: a
    hundred thousand functions are ready in a tenth of a second and 40 MB."""

    def __init__(self, keys_N: U64, minima_NB: npt.NDArray[np.uint16], near: float = NEAR) -> None:
        self._near, self._minima = near, minima_NB
        self._keys = frozenset(keys_N.tolist())
        bands = _bands(minima_NB)
        self._orders = [np.argsort(column, kind="stable") for column in bands.T]
        self._columns = [column[order] for column, order in zip(bands.T, self._orders, strict=True)]

    @classmethod
    def none(cls) -> Known:
        return cls(np.empty(0, np.uint64), np.empty((0, MINIMA), np.uint16))

    def __len__(self) -> int:
        return len(self._minima)

    def has(self, key: str) -> bool:
        """Whether the set holds the same function."""
        return int(key, 16) in self._keys

    def has_near(self, key: str, minima: bytes) -> bool:
        """Whether the set holds the same function or a near-duplicate of it."""
        if self.has(key):
            return True
        own = np.frombuffer(minima, dtype="<u2")
        found = []
        for band, column, order in zip(_bands(own[None])[0], self._columns, self._orders, strict=True):
            start, end = np.searchsorted(column, band, "left"), np.searchsorted(column, band, "right")
            found.append(order[start:end])
        candidates = np.concatenate(found)
        return bool(((self._minima[candidates] == own).mean(axis=1) >= self._near).any())


def _bands(minima_NB: npt.NDArray[np.uint16]) -> U64:
    """[N, 16]: three minima to a word."""
    parts = minima_NB.reshape(len(minima_NB), MINIMA // Signatures._ROWS, Signatures._ROWS).astype(np.uint64)
    shifts = np.arange(Signatures._ROWS, dtype=np.uint64) * np.uint64(16)
    return np.bitwise_or.reduce(parts << shifts, axis=2)


def write_signatures(functions: Iterable[str] | Sequence[tuple[str, bytes]], path: Path) -> int:
    """Writes the signatures of `functions`, sources or ready (key, minima) pairs, to `path`. Returns how many distinct
    ones. Equal functions in any order give equal bytes."""
    pairs: set[tuple[int, bytes]] = set()
    for function in functions:
        if isinstance(function, str):
            key, minima = fingerprint(function)
            pairs.add((int(key, 16), minima))
        else:
            pairs.add((int(function[0], 16), function[1]))
    ordered = sorted(pairs)
    keys = np.array([key for key, _ in ordered], dtype="<u8")
    rows = np.frombuffer(b"".join(minima for _, minima in ordered), dtype="<u8").reshape(-1, BYTES // 8)
    temporary = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("wb") as file:
        np.savez(file, keys=keys, minima=rows)
    os.replace(temporary, path)
    return len(ordered)


def read_signatures(path: Path) -> Known:
    """Raises ValueError for a file that holds something else."""
    try:
        with np.load(path, allow_pickle=False) as data:
            keys, minima = data["keys"], data["minima"]
    except (KeyError, ValueError, OSError, EOFError) as error:
        raise ValueError(
            f"{path}: no file of signatures ({error}); allowed: .npz with arrays keys and minima"
        ) from None
    if keys.ndim != 1 or minima.shape != (len(keys), BYTES // 8):
        raise ValueError(
            f"{path}: found keys {keys.shape} and minima {minima.shape}; expected [N] and [N, {BYTES // 8}]"
        )
    rows = np.ascontiguousarray(minima, dtype="<u8").view("<u2").reshape(len(keys), MINIMA)
    return Known(keys.astype(np.uint64), rows)
