"""Makes a base: reads a root file system, adds a Python, cleans it, packs it, and stores it."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import zstandard

from shared.contracts.run import Ref
from shared.objects import Objects
from shared.sandbox.bases import debian, images, pythons, store
from shared.sandbox.bases.cleaning import clean, is_left_out
from shared.sandbox.bases.rootfs import File, Folder, Link, from_folder, machine_of, pack, put, walk
from shared.sandbox.bases.store import BaseRefused, Manifest
from shared.scratch import scratch

Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much
_LEVEL = 9


@dataclass(frozen=True, slots=True)
class Source:
    """One of `debian`, `image` and `folder`. `python`: a version, as 3.12; empty: the one that is there, if any.
    `python_from`: a tar or a folder; None: Debian's or uv's."""

    debian: str = ""
    packages: tuple[str, ...] = ()
    mirror: str = ""
    image: Path | None = None
    folder: Path | None = None
    python: str = ""
    python_from: Path | None = None

    def made(self) -> dict[str, str]:
        """Return the options, for people."""
        told = {
            "debian": self.debian,
            "packages": ",".join(self.packages),
            "mirror": self.mirror,
            "from-image": self.image.name if self.image else "",
            "from-folder": self.folder.name if self.folder else "",
            "python": self.python,
        }
        return {name: value for name, value in told.items() if value}


@dataclass(frozen=True, slots=True)
class Made:
    """`replaced`: the digest that the name had before; None: it is new. `left_out`: path -> why."""

    manifest: Manifest
    replaced: str | None
    left_out: dict[str, str]


def make(
    objects: Objects, name: str, source: Source, work: Path, progress: Progress = lambda what, done, of: None
) -> Made:
    """Make a base and let the name point to it. `work`: a folder on a disk with room for it twice. Raises BaseRefused, OSError."""
    store.checked_name(name)
    _check(source)
    with scratch(work, "making-base-") as folder:
        image, made = _root(source, folder, progress)
        clean(image.root)
        machine = machine_of(image.root)
        if machine != store.machine():
            raise BaseRefused(
                f"its programs are for {machine}, this machine is {store.machine()}: make it on one of that type"
            )
        archive = folder / "base.tar.zst"
        digest, size, files = _packed(image.root, archive, progress)
        manifest = Manifest(
            digest=digest,
            name=name,
            machine=machine,
            size=size,
            files=files,
            archive=Ref(key="", size=0, checksum=""),
            made=made,
            at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            environment=image.environment,
        )
        before = _before(objects, name)
        progress("storing", 0, 1)
        stored = store.add(objects, manifest, archive)
        progress("storing", 1, 1)
    return Made(stored, before, image.left_out)


def _check(source: Source) -> None:
    """Raise BaseRefused for options that do not go together."""
    chosen = [bool(source.debian), source.image is not None, source.folder is not None]
    if sum(chosen) != 1:
        raise BaseRefused(f"found {sum(chosen)} of --debian, --from-image, --from-folder; allowed: exactly one")
    if (source.packages or source.mirror) and not source.debian:
        raise BaseRefused("--packages and --mirror go with --debian alone; an image or a folder has what it has")
    if source.python_from and not source.python:
        raise BaseRefused("--python-from: needs --python, the version that it holds")
    if source.python:
        pythons.checked(source.python)
    if source.folder and source.folder.resolve() == Path("/"):
        raise BaseRefused(
            "--from-folder /: is this whole machine, with its secrets; give a root file system of its own"
        )


def _root(source: Source, folder: Path, progress: Progress) -> tuple[images.Image, dict[str, str]]:
    made, packages, python = source.made(), list(source.packages), source.python
    own = debian.with_python(source.debian, python, packages) if python and not source.python_from else None
    if own is not None:
        packages, python = own, ""
    if python:  # before the long work: it may not be there
        kept = Folder()
        progress(f"fetching Python {python}", 0, 1)
        made["python-from"] = pythons.add(kept, python, source.python_from, folder)
        progress(f"fetching Python {python}", 1, 1)
    if source.folder:
        if not source.folder.is_dir():
            raise BaseRefused(f"--from-folder {source.folder}: there is no such folder")
        read = from_folder(source.folder, is_left_out)
        image = images.Image(read.root, read.left_out)
    else:
        tar = source.image or folder / "debian.tar"
        if source.debian:
            debian.build(source.debian, packages, source.mirror, tar, progress)
        elif not tar.exists():
            raise BaseRefused(f"--from-image {tar}: there is no such file or folder")
        layers = folder / "layers"
        layers.mkdir()
        image = images.read(tar, layers, progress)
    if python:
        put(image.root, "usr", kept.children["usr"])
    elif own is not None:
        put(image.root, f"{pythons.PLACE}/bin/python", Link("/usr/bin/python3"))
    return image, made


class _Hashed:
    """A file for tarfile that also computes the digest of what goes through it."""

    def __init__(self, sink: IO[bytes]) -> None:
        self._sink, self.digest = sink, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._sink.write(data)


def _packed(root: Folder, archive: Path, progress: Progress) -> tuple[str, int, int]:
    """Write the archive; return its digest, the bytes of its files, and how many files, folders and links it has."""
    nodes = [node for _, node in walk(root)]
    places = {(node.at, node.offset): node.size for node in nodes if isinstance(node, File)}
    size = sum(places.values())
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, threads=2)
    with archive.open("xb") as file, compressor.stream_writer(file, closefd=False) as stream:
        hashed = _Hashed(cast(IO[bytes], stream))
        pack(root, cast(IO[bytes], hashed), lambda done: progress("packing", done, size))
    return hashed.digest.hexdigest(), size, len(nodes)


def _before(objects: Objects, name: str) -> str | None:
    try:
        return store.resolve(objects, name)
    except BaseRefused:
        return None


def listed(packages: str) -> tuple[str, ...]:
    """Return the packages of a list that is joined by commas or spaces."""
    return tuple(dict.fromkeys(packages.replace(",", " ").split()))
