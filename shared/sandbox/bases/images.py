"""Reads a root file system from an image: `docker save`, `docker export`, or an OCI layout as a folder or a tar.

The blobs of an OCI layout are compared with their sha256. An image of several machine types gives this machine's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from shared.archives import ArchiveError, Member
from shared.sandbox.bases import layers, store
from shared.sandbox.bases.rootfs import Folder
from shared.sandbox.bases.store import BaseRefused

ALLOWED = "a tar of `docker save` or `docker export`, or an OCI layout (a folder or a tar)"
_JSON_BYTES = 4 << 20
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Image:
    root: Folder = field(default_factory=Folder)
    left_out: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


class _Files:
    """The files of an image, in a folder or a tar. Names are those that the image itself uses."""

    def __init__(self, folder: Path | None, tar: tarfile.TarFile | None) -> None:
        self._folder, self._tar = folder, tar
        members = tar.getmembers() if tar else []
        self._members = {member.name.removeprefix("./"): member for member in members}

    def has(self, name: str) -> bool:
        return (self._folder / name).is_file() if self._folder else name in self._members

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[IO[bytes]]:
        file: IO[bytes] | None = None
        if ".." in name.split("/") or name.startswith("/"):
            raise BaseRefused(f"the image names a file {name!r:.200}; allowed: files of its own")
        try:
            if self._folder:
                file = (self._folder / name).open("rb")
            elif self._tar and name in self._members:
                file = self._tar.extractfile(self._members[name])  # a link leads to another member
        except (OSError, KeyError):
            file = None
        if file is None:
            raise BaseRefused(f"the image is not whole: it names {name!r:.200} and does not hold it")
        with file:
            yield file

    def json(self, name: str) -> Any:
        with self.opened(name) as file:
            data = file.read(_JSON_BYTES + 1)
        try:
            if len(data) > _JSON_BYTES:
                raise ValueError(f"more than {_JSON_BYTES} bytes")
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BaseRefused(f"the image's {name!r:.200} is damaged: {error}") from None


def read(image: Path, scratch: Path, progress: Progress = lambda what, done, of: None) -> Image:
    """Read an image. `scratch`: an empty folder for its layers, kept until the base is packed. Raises BaseRefused, OSError."""
    try:
        return _read(image, scratch, progress)
    except BaseRefused as error:
        raise BaseRefused(f"{image}: {error}") from None
    except (ArchiveError, tarfile.TarError, OverflowError, EOFError, RecursionError) as error:
        raise BaseRefused(f"{image}: no tar, or damaged: {error}; allowed: {ALLOWED}") from None
    except (AttributeError, IndexError, KeyError, TypeError) as error:  # JSON of another shape
        raise BaseRefused(
            f"{image}: no image that is known ({type(error).__name__}: {error}); allowed: {ALLOWED}"
        ) from None


def _read(image: Path, scratch: Path, progress: Progress) -> Image:
    if image.is_dir():
        files = _Files(image, None)
        if not files.has("index.json"):
            raise BaseRefused(
                f"a folder without index.json, so no OCI layout; allowed: {ALLOWED}; a root file system: --from-folder"
            )
        return _oci(files, scratch, progress)
    outer = scratch / "image.tar"
    with image.open("rb") as source:
        size = image.stat().st_size
        layers.uncompressed(source, outer, lambda done: progress("reading the image", min(done, size), size))
    with tarfile.open(outer, "r:", tarinfo=Member) as tar:
        files = _Files(None, tar)
        if files.has("manifest.json"):
            return _saved(files, scratch, progress)
        if files.has("index.json") and files.has("oci-layout"):
            return _oci(files, scratch, progress)
    found = Image()
    layers.apply(found.root, outer, found.left_out)
    return found


def _saved(files: _Files, scratch: Path, progress: Progress) -> Image:
    """Read what `docker save` wrote."""
    images = files.json("manifest.json")
    if len(images) != 1:
        tags = [tag for image in images for tag in image.get("RepoTags") or ()]
        raise BaseRefused(f"holds {len(images)} images ({', '.join(tags)[:200]}); allowed: one; save it alone")
    config = files.json(images[0]["Config"]) if images[0].get("Config") else {}
    return _layered(files, [(name, None) for name in images[0]["Layers"]], config, scratch, progress)


def _oci(files: _Files, scratch: Path, progress: Progress) -> Image:
    described = _chosen(files, files.json("index.json"))
    manifest = _blob_json(files, described)
    names = [(_blob(layer["digest"]), str(layer["digest"])) for layer in manifest["layers"]]
    return _layered(files, names, _blob_json(files, manifest["config"]), scratch, progress)


def _chosen(files: _Files, index: Any, depth: int = 0) -> Any:
    """Return the descriptor of this machine's image. Raises BaseRefused."""
    found = [one for one in index["manifests"] if _fits(one)]
    if len(found) != 1 or depth > 4:
        types = [str((one.get("platform") or {}).get("architecture", "any")) for one in index["manifests"]]
        raise BaseRefused(
            f"holds {len(found)} images for {store.machine()} (of {', '.join(types)[:200]}); allowed: one"
        )
    if "index" in str(found[0].get("mediaType")) or "manifest.list" in str(found[0].get("mediaType")):
        return _chosen(files, _blob_json(files, found[0]), depth + 1)
    return found[0]


def _fits(descriptor: Any) -> bool:
    platform = descriptor.get("platform") or {}
    architecture = store.as_machine(str(platform.get("architecture", store.machine())))
    attestation = "vnd.docker.reference.type" in (descriptor.get("annotations") or {})  # BuildKit's papers of an image
    return architecture == store.machine() and platform.get("os", "linux") == "linux" and not attestation


def _blob(digest: object) -> str:
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", str(digest)):
        raise BaseRefused(f"the image names a blob by {digest!r:.80}; allowed: sha256 and 64 hex digits")
    return f"blobs/{str(digest).replace(':', '/')}"


def _blob_json(files: _Files, descriptor: Any) -> Any:
    name = _blob(descriptor["digest"])
    _verify(files, name, descriptor["digest"])
    return files.json(name)


def _verify(files: _Files, name: str, digest: str) -> None:
    with files.opened(name) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    if f"sha256:{found}" != digest:
        raise BaseRefused(f"the image's {name} is damaged: its sha256 is {found}; copy the image again")


def _layered(
    files: _Files, names: Sequence[tuple[str, str | None]], config: Any, scratch: Path, progress: Progress
) -> Image:
    """Lay the layers over each other. `names`: each with its digest; None: the image gives none."""
    if (made_for := config.get("architecture")) and store.as_machine(str(made_for)) != store.machine():
        raise BaseRefused(
            f"its programs are for {made_for}, this machine is {store.machine()}; take the image for this type"
        )
    found = Image(environment=_environment(config))
    size, entries = (
        layers.MOST,
        layers.MAX_FILES,
    )  # of all layers together: an image may name one layer a thousand times
    for number, (name, digest) in enumerate(names):
        progress("laying layers over each other", number, len(names))
        if digest:
            _verify(files, name, digest)
        layer = scratch / f"layer-{number}.tar"
        with files.opened(name) as source:
            size -= layers.uncompressed(source, layer, most=size)
        entries -= layers.apply(found.root, layer, found.left_out, most=entries)
    progress("laying layers over each other", len(names), len(names))
    return found


def _environment(config: Any) -> dict[str, str]:
    pairs = [str(line).partition("=") for line in (config.get("config") or {}).get("Env") or ()]
    return {name: value for name, _, value in pairs if _VARIABLE.match(name) and "\0" not in value}
