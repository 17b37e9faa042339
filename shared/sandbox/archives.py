"""Tar archives that cross a sandbox's border, and the difference between two lists of files. Pure."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from typing import NamedTuple

from shared.sandbox.contract import Caps
from shared.sandbox.inside.transfer import DEPTH

_HEADERS = 4 * tarfile.BLOCKSIZE  # of one entry, with a long name


class Line(NamedTuple):
    """One entry of a tree. `kind`: file, folder, link, device or unreadable. `mark`: a file's digest (empty: it is
    too long to have one) or where a link leads."""

    path: str
    kind: str
    mode: int
    size: int
    mark: str


def check(archive: bytes, caps: Caps) -> None:
    """Raises ValueError for an entry that may not cross the border, and for more than the caps."""
    size = count = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as found:
            for member in found:
                count += 1
                size += member.size
                if count > caps.files or size > caps.size:
                    raise ValueError(f"archive: found more than {caps.size} bytes or {caps.files} entries")
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
                    raise ValueError(f"archive: {member.name!r:.200}: a link or a device; allowed: files and folders")
                if member.name.startswith("/") or ".." in member.name.split("/") or "\0" in member.name:
                    raise ValueError(
                        f"archive: {member.name!r:.200}: found an absolute path or '..'; allowed: relative"
                    )
                if (deep := member.name.count("/")) > DEPTH:
                    raise ValueError(
                        f"archive: {member.name!r:.200}: found {deep} folders within folders; allowed: {DEPTH}"
                    )
    except tarfile.TarError as error:
        raise ValueError(f"archive: {error}") from None


def room(caps: Caps) -> int:
    """Return the most bytes that an archive within the caps has."""
    return caps.size + (caps.files + 4) * _HEADERS


def pack(files: dict[str, bytes], mode: int = 0o644) -> bytes:
    """Return a tar archive of files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, data in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(data), mode
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def unpack(archive: bytes) -> dict[str, bytes]:
    """Return the regular files of a tar archive."""
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as found:
        for member in found:
            if member.isreg() and (data := found.extractfile(member)) is not None:
                files[member.name] = data.read()
    return files


def difference(
    base: Iterable[Line], now: Iterable[Line], caps: Caps
) -> tuple[list[str], tuple[str, ...], dict[str, str]]:
    """Return the paths of files that are new or changed, the paths that are gone, and those that may not cross the border with
    the reason."""
    before = {line.path: line for line in base}
    written, refused = [], {}
    present = set()
    for line in now:
        present.add(line.path)
        same = before.get(line.path)
        if same is not None and _same(same, line):
            continue
        if line.kind == "file":
            if line.size > caps.size:
                refused[line.path] = f"{line.size} bytes; allowed: {caps.size}"
            else:
                written.append(line.path)
        elif line.kind != "folder":
            refused[line.path] = "it cannot be read" if line.kind == "unreadable" else f"a {line.kind}"
    return written, tuple(sorted(set(before) - present)), refused


def _same(before: Line, now: Line) -> bool:
    if before.kind != now.kind or before.mark != now.mark or now.kind == "device":
        return False
    return now.kind != "file" or (before.size == now.size and before.mode == now.mode and now.mark != "")
