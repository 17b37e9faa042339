"""Small root file systems and archives for the tests of bases."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

import zstandard

from shared.contracts.run import Ref
from shared.objects import Objects
from shared.sandbox.bases import Manifest, store
from shared.sandbox.bases.unpack import Tally, unpack

Member = tuple[tarfile.TarInfo, bytes]


def member(
    name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644, mtime: int = 0
) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size, info.mtime = kind, link, mode, len(data), mtime
    return info, data


def folder(name: str) -> Member:
    return member(name, kind=tarfile.DIRTYPE, mode=0o755)


def link(name: str, target: str) -> Member:
    return member(name, kind=tarfile.SYMTYPE, link=target)


def tar_of(*members: Member) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def unpacked_to(into: Path, data: bytes, **bounds: int) -> Tally:
    return unpack(iter([data]), into, **bounds)


def store_base(objects: Objects, name: str, data: bytes, scratch: Path, **changed: object) -> Manifest:
    """Store a tar as a base, with a manifest that says of it what `changed` does not."""
    place = scratch / f"{name}-counting"
    place.mkdir()
    tally = unpacked_to(place, data)
    archive = scratch / f"{name}.tar.zst"
    archive.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(data))
    facts = {
        "digest": tally.digest,
        "name": name,
        "machine": store.machine(),
        "size": tally.size,
        "files": tally.files,
        "archive": Ref(key="", size=0, checksum=""),
        "made": {"from": "a test"},
        "at": "2026-01-01T00:00:00Z",
    }
    return store.add(objects, Manifest(**{**facts, **changed}), archive)  # type: ignore[arg-type]


def host_programs(root: Path, names: Iterable[str] = ("sh",)) -> None:
    """Make a root file system of the host's programs and the libraries that `ldd` names for them."""
    for name in ("bin", "dev", "etc", "proc", "tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in names:
        program = Path(shutil.which(name) or "/bin/sh")
        shutil.copyfile(program.resolve(), root / "bin" / name)
        (root / "bin" / name).chmod(0o755)
        told = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
        for library in (word for word in told.split() if word.startswith("/")):
            there = root / library.lstrip("/")
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(library).resolve(), there)
            there.chmod(0o755)
