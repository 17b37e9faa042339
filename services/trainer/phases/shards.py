"""A corpus as token ids on disk. A reader maps the files into memory and holds only what it looks at.

    manifest.json   format, tokenizer, counts, checksums; written last
    0000.bin …      uint32 little-endian token ids, document after document; a file ends with a document
    index.bin       int64 little-endian [documents, 2]: the token at which the document ends, and its bytes of text

Every document ends with the end token, which is part of it. Documents are counted over all files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import xxhash

FORMAT = "etude-tokens-1"
MANIFEST, INDEX = "manifest.json", "index.bin"
SHARD_TOKENS = 1 << 28  # tokens of a file: 1 GiB
TOKEN, ENTRY = np.dtype("<u4"), np.dtype("<i8")


class BadShards(ValueError):
    """A folder of tokens that cannot be used. The text names the folder or the file, what was found and what is allowed."""


class File(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tokens: int
    checksum: str  # xxh3-128


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`tokenizer`: xxh3-128 of tokenizer.json. `vocab_size`: one more than the largest id that the tokenizer has. `end`: the text
    of the token that ends every document; `begin`: of the one that begins it, empty if there is none."""

    format: str = FORMAT
    tokenizer: str
    vocab_size: int
    begin: str
    end: str
    documents: int
    tokens: int
    text_bytes: int
    files: list[File]
    index: str  # checksum of index.bin


def checksum(path: Path) -> str:
    """Return the xxh3-128 of a file, 32 hex digits."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            hasher.update(part)
    return hasher.hexdigest()


def write(
    folder: Path,
    documents: Iterable[tuple[np.ndarray, int]],
    *,
    tokenizer: str,
    vocab_size: int,
    begin: str,
    end: str,
    shard_tokens: int = SHARD_TOKENS,
) -> Manifest:
    """Write documents, (token ids, bytes of text) each, into an existing empty folder. Raises BadShards if there is no token."""
    files: list[File] = []
    entries: list[tuple[int, int]] = []
    total = size = 0
    out = None
    try:
        for ids, length in documents:
            if out is None or size >= shard_tokens:
                if out is not None:
                    out.close()
                    files.append(_described(folder, len(files), size))
                out, size = (folder / _name(len(files))).open("wb"), 0
            out.write(np.ascontiguousarray(ids, TOKEN).tobytes())
            size += len(ids)
            total += len(ids)
            entries.append((total, length))
    finally:
        if out is not None:
            out.close()
    if not total:
        raise BadShards("found no token in the corpus; allowed: at least one document with text")
    files.append(_described(folder, len(files), size))
    (folder / INDEX).write_bytes(np.asarray(entries, ENTRY).tobytes())
    manifest = Manifest(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        begin=begin,
        end=end,
        documents=len(entries),
        tokens=total,
        text_bytes=sum(length for _, length in entries),
        files=files,
        index=checksum(folder / INDEX),
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    return manifest


def _name(number: int) -> str:
    return f"{number:04d}.bin"


def _described(folder: Path, number: int, tokens: int) -> File:
    return File(name=_name(number), tokens=tokens, checksum=checksum(folder / _name(number)))


@dataclass(frozen=True)
class Shards:
    """Documents of a folder. `ends_D`: int64 [documents], the token (over all files) at which each document ends."""

    folder: Path
    manifest: Manifest
    ends_D: np.ndarray
    bytes_D: np.ndarray
    _starts: np.ndarray  # first token of each file
    _files: tuple[np.ndarray, ...]

    @classmethod
    def open(cls, folder: Path, *, verify: bool = False) -> Shards:
        """Map a folder. `verify`: also compare every file with its checksum. Raises BadShards."""
        manifest = _manifest(folder)
        index = folder / INDEX
        files = []
        for file in manifest.files:
            path = folder / file.name
            _require_size(path, file.tokens * TOKEN.itemsize)
            if verify and checksum(path) != file.checksum:
                raise BadShards(f"{path}: its checksum is not the manifest's; tokenise the corpus again")
            files.append(np.memmap(path, TOKEN, "r"))
        _require_size(index, manifest.documents * 2 * ENTRY.itemsize)
        entries = np.memmap(index, ENTRY, "r").reshape(-1, 2)
        if checksum(index) != manifest.index or int(entries[-1, 0]) != manifest.tokens:
            raise BadShards(f"{index}: it is not the manifest's; tokenise the corpus again")
        starts = np.concatenate(([0], np.cumsum([file.tokens for file in manifest.files])))
        return cls(folder, manifest, entries[:, 0], entries[:, 1], starts, tuple(files))

    def __len__(self) -> int:
        return len(self.ends_D)

    def start(self, document: int) -> int:
        return int(self.ends_D[document - 1]) if document else 0

    def tokens(self, start: int, end: int) -> np.ndarray:
        """Return token ids [start, end), counted over all files: int64."""
        parts = []
        first = int(np.searchsorted(self._starts, start, "right")) - 1
        for number in range(first, len(self._files)):
            base = int(self._starts[number])
            if base >= end:
                break
            parts.append(self._files[number][max(0, start - base) : end - base])
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def _manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError:
        raise BadShards(f"{folder}: found no {MANIFEST}; allowed: a folder that `etude data tokenize` wrote") from None
    except msgspec.MsgspecError as error:
        raise BadShards(f"{path}: {error}; allowed: a manifest that `etude data tokenize` wrote") from None
    if manifest.format != FORMAT:
        raise BadShards(f"{path}: format: found {manifest.format!r}; allowed: {FORMAT!r}")
    if not manifest.tokens or not manifest.documents:
        raise BadShards(f"{path}: tokens: found {manifest.tokens}; allowed: 1 or more")
    if sum(file.tokens for file in manifest.files) != manifest.tokens:
        raise BadShards(f"{path}: tokens: found {manifest.tokens}; allowed: the sum over its files")
    return manifest


def _require_size(path: Path, size: int) -> None:
    found = path.stat().st_size if path.is_file() else -1
    if found != size:
        is_there = f"{found} bytes" if found >= 0 else "no such file"
        raise BadShards(f"{path}: found {is_there}; allowed: {size} bytes, as the manifest says")
