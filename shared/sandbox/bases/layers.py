"""Tars as layers: each is laid over the root file system below it, with its whiteouts, in the tree alone.

A layer is an uncompressed tar on the disk. Its files stay there; `rootfs.pack` reads them in place.
"""

from __future__ import annotations

import gzip
import lzma
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import zstandard

from shared.archives import ArchiveError, Member, wrong_path, wrong_target
from shared.sandbox.bases.rootfs import File, Folder, Link, located
from shared.sandbox.bases.store import BaseRefused
from shared.sandbox.bases.unpack import MAX_BYTES, MAX_FILES

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
MOST = MAX_BYTES + 4096 * MAX_FILES  # bytes of an image's layers, uncompressed
_CHUNK = 1 << 20
_COMPRESSED: dict[bytes, Callable[[IO[bytes]], IO[bytes]]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),  # type: ignore[dict-item,return-value]
    b"\x28\xb5\x2f\xfd": lambda file: zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
        file, read_across_frames=True
    ),
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}


def uncompressed(
    source: IO[bytes], into: Path, progress: Callable[[int], None] = lambda size: None, *, most: int | None = None
) -> int:
    """Copy a tar, decompressed where it is gzip, zstd or xz. Return its bytes. `most`: that may be written; None: MOST. Raises
    BaseRefused, OSError."""
    most = MOST if most is None else most
    head = source.read(6)
    source.seek(0)
    opened = next((open_ for magic, open_ in _COMPRESSED.items() if head.startswith(magic)), lambda file: file)
    size = 0
    try:
        with into.open("xb") as sink:
            file = opened(source)
            while data := file.read(_CHUNK):
                size += len(data)
                if size > most:
                    raise BaseRefused(f"its layers have more than {MOST} bytes; allowed: no more")
                sink.write(data)
                progress(size)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError) as error:
        raise BaseRefused(f"a layer is damaged: {error}") from None
    return size


def apply(root: Folder, layer: Path, left_out: dict[str, str], *, most: int | None = None) -> int:
    """Lay a tar over the root. Return how many entries it has. `left_out` gets the path and the reason of each device, socket and
    pipe. `most`: entries that it may have; None: MAX_FILES. Raises BaseRefused."""
    most = MAX_FILES if most is None else most
    count = 0
    own: set[int] = set()  # nodes of this layer, by identity: its whiteouts hide those of lower layers alone
    kept: list[object] = []  # an identity is given again when its node is gone
    try:
        with tarfile.open(layer, "r:", tarinfo=Member) as tar:
            for member in tar:
                count += 1
                if count > most:
                    raise BaseRefused(f"its layers have more than {MAX_FILES} files; allowed: no more")
                _apply(root, layer, member, own, kept, left_out)
    except (ArchiveError, tarfile.TarError, OverflowError, EOFError, RecursionError) as error:
        raise BaseRefused(f"a layer is no tar, or damaged: {error}") from None
    return count


def _apply(
    root: Folder, layer: Path, member: tarfile.TarInfo, own: set[int], kept: list[object], left_out: dict[str, str]
) -> None:
    path = member.name.removeprefix("./").rstrip("/")
    if path in ("", "."):
        return
    if wrong := wrong_path(path) or (wrong_target(member.linkname) if member.issym() else None):
        if ".." in path.split("/") or path.startswith("/"):
            raise BaseRefused(f"a layer holds {path!r:.200}, which {wrong}")
        left_out[path] = wrong
        return
    *above, name = path.split("/")
    if any(part.startswith(_WHITEOUT) for part in above):
        left_out[path] = "stands below a whiteout"
        return
    if name.startswith(_WHITEOUT):
        _hide(root, path, name, own)
        return
    node = _node(root, layer, member)
    if node is None:
        left_out[path] = "is a device, a socket or a pipe"
        return
    place = located(root, path, make=True)
    assert place is not None
    folder, name = place
    there = folder.children.get(name)
    if isinstance(node, Folder) and isinstance(there, Folder):
        node = there  # a folder in both: what was in it stays
    folder.children[name] = node
    own.add(id(node))
    kept.append(node)


def _node(root: Folder, layer: Path, member: tarfile.TarInfo) -> File | Link | Folder | None:
    if member.isdir():
        return Folder()
    if member.issym():
        return Link(member.linkname)
    if member.islnk():
        place = located(root, member.linkname.removeprefix("./"))
        original = place[0].children.get(place[1]) if place else None
        if not isinstance(original, File | Link):
            raise BaseRefused(
                f"a layer's {member.name!r:.200} is a hard link to {member.linkname!r:.200}, which is no file"
            )
        return replace(original)  # a node of this layer's own, at the place of the first
    if member.isreg() and not member.issparse():
        return File(layer, member.offset_data, member.size, bool(member.mode & 0o111), int(member.mtime))
    return None


def _hide(root: Folder, path: str, name: str, own: set[int]) -> None:
    """Take out what a whiteout names, or, for an opaque folder, all that lower layers have in it."""
    place = located(root, path)
    if place is None:
        return
    folder = place[0]
    if name == _OPAQUE:
        for below, node in list(folder.children.items()):
            _strip(folder, below, node, own)
    elif not name.startswith(_WHITEOUT + _WHITEOUT):  # notes of aufs
        hidden = name.removeprefix(_WHITEOUT)
        if hidden in folder.children:
            _strip(folder, hidden, folder.children[hidden], own)


def _strip(folder: Folder, name: str, node: File | Link | Folder, own: set[int]) -> None:
    """Take out a node, but for what this layer has put into it."""
    if isinstance(node, Folder):
        for below, child in list(node.children.items()):
            _strip(node, below, child, own)
        if node.children or id(node) in own:
            return
    elif id(node) in own:
        return
    del folder.children[name]
