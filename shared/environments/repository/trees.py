"""Source trees as data: regular files and links, from a folder and back, and as one tar.zst object.

A tree is a mapping from path to `File` or `Link`. Equal trees give equal bytes (same zstandard version): paths are sorted,
times and owners are zero, modes are 644 or 755. As in git, there are no empty folders.

Invariants of every tree that `encode` writes, `decode` returns or `write` takes (`check`):
- A path is relative, in plain parts, and no two paths differ only in case.
- A link stays in the tree, wherever other links lead it.
- There is no repository's history in it: `.git` and its like hold the solution.
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash
import zstandard

from shared import archives
from shared.contracts.run import Ref
from shared.objects import Objects

MAX_FILES = 100_000
MAX_BYTES = 512 << 20  # of all files together; a tree is held in memory while it is packed or unpacked
HISTORY = frozenset({".git", ".hg", ".svn", ".bzr"})  # of any depth; a submodule's `.git` is a file
_MAX_HOPS = 40  # links that one path may lead through, as in Linux
_LEVEL = 9


class TreeError(ValueError):
    """The tree cannot be taken; the text names the path, what was found and what is allowed."""


@dataclass(frozen=True, slots=True)
class File:
    data: bytes
    executable: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link. `target`: relative to the folder of the link."""

    target: str


Tree = Mapping[str, File | Link]


def pack_tree(folder: Path) -> bytes:
    """Return the folder as a tar.zst, without history. Raises TreeError."""
    return encode(from_folder(folder))


def unpack_tree(data: bytes, into: Path) -> None:
    """Write the files of a tar.zst into a folder, which is missing or empty. Raises TreeError before it writes anything."""
    write(decode(data), into)


def read_files(data: bytes, paths: Iterable[str]) -> dict[str, str]:
    """Return the text of those paths that are regular files in UTF-8. Raises TreeError."""
    return texts(decode(data), paths)


def store_tree(objects: Objects, data: bytes) -> Ref:
    """Put a packed tree under the key that its bytes give it, unless it is there. Raises OSError."""
    checksum = xxhash.xxh3_128_hexdigest(data)
    key = f"trees/{checksum}.tar.zst"
    return objects.put_if_absent(key, data) or Ref(key=key, size=len(data), checksum=checksum)


def texts(tree: Tree, paths: Iterable[str]) -> dict[str, str]:
    """Return the text of those paths that are regular files in UTF-8."""
    found: dict[str, str] = {}
    for path in paths:
        entry = tree.get(path)
        if isinstance(entry, File):
            try:
                found[path] = entry.data.decode()
            except UnicodeDecodeError:
                continue
    return found


def check(tree: Tree) -> None:
    """Raise TreeError for the first path that breaks an invariant."""
    if len(tree) > MAX_FILES:
        raise TreeError(f"found {len(tree)} files; allowed: at most {MAX_FILES}")
    size = sum(len(entry.data) for entry in tree.values() if isinstance(entry, File))
    if size > MAX_BYTES:
        raise TreeError(f"found {size} bytes in all files; allowed: at most {MAX_BYTES}")
    known: dict[str, str] = {}  # folded → the path or the folder of one
    for path in tree:
        if wrong := wrong_path(path):
            raise TreeError(f"{path!r:.200}: {wrong}")
        for folder in _folders(path):
            if folder in tree:
                raise TreeError(f"{path!r:.200}: {folder!r:.200} is a file or a link; allowed: a folder")
        for one in (*_folders(path), path):
            other = known.setdefault(unicodedata.normalize("NFC", one).casefold(), one)
            if other != one:
                raise TreeError(f"{one!r:.200}: differs from {other!r:.200} only in case; allowed: one of the two")
    links = {path: entry.target for path, entry in tree.items() if isinstance(entry, Link)}
    for path, target in links.items():
        if wrong := _wrong_link(path, links):
            raise TreeError(
                f"{path!r:.200}: links to {target!r:.200}, {wrong}; allowed: a relative path inside the tree"
            )


def wrong_path(path: str) -> str | None:
    """Return why no tree can have this path, or None if one can."""
    if wrong := wrong_place(path):
        return wrong
    if any(ord(character) < 32 or character == "\x7f" for character in path):
        return "has a control character"
    return None


def wrong_place(path: str) -> str | None:
    """Return why no file below a tree's folder can be written at this path, or None if one can. Control characters are
    allowed here: a program may give its files any name."""
    if wrong := archives.wrong_path(path):
        return wrong
    parts = path.split("/")
    if found := next((part for part in parts if part.casefold() in HISTORY), None):
        return f"is of a repository's history ({found}); allowed: the files alone"
    return None


def from_folder(folder: Path) -> dict[str, File | Link]:
    """Read a folder, without history. Raises TreeError for links that leave it, devices, sockets and what is too large."""
    tree: dict[str, File | Link] = {}
    size = 0
    for path, at in _walk(folder):
        if len(tree) >= MAX_FILES:
            raise TreeError(f"{folder}: more than {MAX_FILES} files; allowed: at most {MAX_FILES}")
        if at.is_symlink():
            tree[path] = Link(os.readlink(at.path))
            continue
        try:
            tree[path] = entry = _read(at.path, MAX_BYTES - size)
        except OSError as error:
            raise TreeError(f"{path!r:.200}: cannot be read ({error.strerror})") from None
        except TreeError as error:
            raise TreeError(f"{path!r:.200}: {error}") from None
        size += len(entry.data)
    check(tree)
    return tree


def _walk(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield every file and link below the folder, in no order, without following links."""
    waiting = [(str(folder), "")]
    while waiting:
        place, before = waiting.pop()
        try:
            with os.scandir(place) as entries:
                found = list(entries)
        except OSError as error:
            raise TreeError(f"{place!r:.200}: cannot be read ({error.strerror})") from None
        for at in found:
            if at.name.casefold() in HISTORY:
                continue
            if at.is_dir(follow_symlinks=False):
                waiting.append((at.path, f"{before}{at.name}/"))
            else:
                yield before + at.name, at


def _read(path: str, room: int) -> File:
    # Non-blocking, so that a pipe is refused instead of waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise TreeError("is a device, a socket or a pipe; allowed: regular files and links")
        data = file.read(room + 1)
    if len(data) > room:
        raise TreeError(f"the tree is larger than {MAX_BYTES} bytes here; allowed: at most {MAX_BYTES}")
    return File(data, bool(mode & stat.S_IXUSR))


def write(tree: Tree, into: Path) -> None:
    """Write the files into a folder, which is missing or empty. Raises TreeError before it writes anything."""
    check(tree)
    into.mkdir(parents=True, exist_ok=True)
    if any(into.iterdir()):
        raise TreeError(f"{into}: is not empty; allowed: a folder that is missing or empty")
    made: set[str] = set()
    links = []
    for path in sorted(tree):
        for folder in _folders(path):
            if folder not in made:
                (into / folder).mkdir()
                made.add(folder)
        entry = tree[path]
        if isinstance(entry, Link):
            links.append((path, entry.target))
            continue
        mode = 0o755 if entry.executable else 0o644
        descriptor = os.open(into / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(entry.data)
    for path, target in links:  # last: no file is written through one
        os.symlink(target, into / path)


def encode(tree: Tree) -> bytes:
    """Return the tree as a tar.zst. Raises TreeError."""
    check(tree)
    packed = io.BytesIO()
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    with (
        compressor.stream_writer(packed, closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted(tree, key=str.encode):
            entry, info = tree[path], tarfile.TarInfo(path)
            if isinstance(entry, Link):
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.target, 0o777
                tar.addfile(info)
            else:
                info.size, info.mode = len(entry.data), 0o755 if entry.executable else 0o644
                tar.addfile(info, io.BytesIO(entry.data))
    return packed.getvalue()


def decode(data: bytes) -> dict[str, File | Link]:
    """Return the tree of a tar.zst. Raises TreeError for damage, bombs and paths that a tree cannot have."""
    return from_tar(archives.zstd_pieces([data]))


def from_tar(pieces: Iterator[bytes], *, history: bool = False) -> dict[str, File | Link]:
    """Read the bytes of a tar. `history`: leave out what is of a repository's history instead of refusing it. Raises
    TreeError."""
    most = MAX_BYTES + 2048 * MAX_FILES
    stream = archives.Stream(pieces, most, f"the archive unpacks to more than {MAX_BYTES} bytes")
    try:
        with tarfile.open(fileobj=stream, mode="r|", errorlevel=2, tarinfo=archives.Member) as tar:  # type: ignore[call-overload]
            tree = _members(tar, history)
            archives.require_end(tar, stream)
    except TreeError:
        raise
    except archives.ArchiveError as error:
        raise TreeError(str(error)) from None
    except (tarfile.TarError, ValueError, OverflowError, EOFError, OSError, RecursionError) as error:
        raise TreeError(f"no tar archive, or damaged: {error}") from None
    check(tree)
    return tree


def _members(tar: tarfile.TarFile, history: bool) -> dict[str, File | Link]:
    tree: dict[str, File | Link] = {}
    size = 0
    for info in tar:
        path = info.name.removeprefix("./").rstrip("/")
        if info.isdir() or (history and any(part.casefold() in HISTORY for part in path.split("/"))):
            continue
        if wrong := wrong_path(path):
            raise TreeError(f"{path!r:.200}: {wrong}")
        if path in tree:
            raise TreeError(f"{path!r:.200}: stands in the archive twice; allowed: once")
        if len(tree) >= MAX_FILES:
            raise TreeError(f"more than {MAX_FILES} files; allowed: at most {MAX_FILES}")
        if info.issym():
            tree[path] = Link(info.linkname)
            continue
        tree[path] = entry = _content(tar, info, tree, path, MAX_BYTES - size)
        size += len(entry.data)
    return tree


def _content(tar: tarfile.TarFile, info: tarfile.TarInfo, tree: Tree, path: str, room: int) -> File:
    if info.size > room and not info.islnk():
        raise TreeError(f"{path!r:.200}: the files before it and it have more than {MAX_BYTES} bytes")
    executable = bool(info.mode & stat.S_IXUSR)
    if info.islnk():  # a hard link: another name of an earlier file
        original = tree.get(info.linkname.removeprefix("./"))
        if not isinstance(original, File) or len(original.data) > room:
            raise TreeError(
                f"{path!r:.200}: is a hard link to {info.linkname!r:.200}; allowed: to a file earlier in the archive"
            )
        return original
    if not info.isreg() or info.issparse():
        raise TreeError(f"{path!r:.200}: is a device, a pipe or a sparse file; allowed: regular files and links")
    file = tar.extractfile(info)
    data = file.read() if file else b""
    if len(data) != info.size:
        raise TreeError(f"{path!r:.200}: the archive is cut short")
    return File(data, executable)


def _folders(path: str) -> list[str]:
    """Yield every folder above the path, the outermost first."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _is_text(name: str) -> bool:
    return not any(0xD800 <= ord(character) < 0xE000 for character in name)


def _wrong_link(path: str, links: Mapping[str, str]) -> str | None:
    """Return why the link cannot be in the tree, or None if it can. Follows other links, so that none leads out by another."""
    if not links[path] or "\0" in links[path] or not _is_text(links[path]):
        return "which is empty or no UTF-8"
    at: list[str] = path.split("/")[:-1]
    waiting = [links[path]]
    hops = 0
    while waiting:
        target = waiting.pop()
        first, _, rest = target.partition("/")
        if target.startswith("/"):
            return "which is absolute"
        if rest:
            waiting.append(rest.lstrip("/") or ".")
        if first == "..":
            if not at:
                return "which leaves the tree"
            at.pop()
        elif first not in ("", "."):
            at.append(first)
            if (following := links.get("/".join(at))) is not None:
                hops += 1
                if hops > _MAX_HOPS:
                    return "which leads in a circle or through too many links"
                at.pop()
                waiting.append(following)
    return None
