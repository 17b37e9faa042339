"""The object store: one small Protocol, two adapters (`directory` for one machine, `s3` for MinIO and any S3).

Promises, the same for both and held by tests/contract/test_objects.py: a put is atomic (a reader sees the whole object
or none) and returns a `Ref`; a get verifies size and checksum (xxh3-128); `head` names the checksum of what was put, so
that a get by it finds damage (a directory needs extended attributes for that); `put_if_absent` is a conditional put, and
a store that cannot do one is ObjectsUnavailable.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from shared.contracts.run import Ref
from shared.settings import Told, path_and_options, without_credentials
from shared.structs import settle


class ObjectMissing(KeyError):
    """No object under this key."""


class ObjectDamaged(ValueError):
    """The bytes do not have the size or checksum that the reference names."""


class ObjectsUnavailable(Told, OSError):
    """The store cannot be reached, does not answer, or does not let us; the text says which setting, what was found and
    what to do. Trying again later may help: nothing is said about any object. Every adapter turns what its client raises
    into this or another OSError, so that no caller takes an outage for a missing or damaged object."""


class Objects(Protocol):
    """Every method raises OSError (`ObjectsUnavailable`, or the disk's own) while the store fails, and may be repeated
    then."""

    def put(self, key: str, data: bytes) -> Ref: ...

    def put_file(self, key: str, path: Path) -> Ref:
        """Streams: a large file never lies in memory as a whole."""

    def put_if_absent(self, key: str, data: bytes) -> Ref | None:
        """None if the key exists already: somebody else was first."""

    def get(self, ref: Ref) -> bytes:
        """Raises ObjectMissing, ObjectDamaged."""

    def get_file(self, ref: Ref, path: Path) -> None:
        """Streams into `path`, atomically."""

    def head(self, key: str) -> Ref:
        """The reference of what lies under `key`. Raises ObjectMissing."""

    def list(self, prefix: str) -> Iterator[str]: ...

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """What `list` gives, each with its bytes, by looking at no object itself."""

    def delete(self, key: str) -> None: ...


def connect(url: str) -> Objects:
    """`file:PATH` (`file:PATH?fsync=1`: an object survives a power loss) or `s3://BUCKET@HOST:PORT` (credentials by
    ETUDE_S3_ACCESS_KEY, ETUDE_S3_SECRET_KEY; `?secure=1`: TLS). Raises ValueError, ObjectsUnavailable."""
    settle()
    scheme = url.split(":", 1)[0]
    if scheme == "file":
        from shared.objects.directory import DirectoryObjects

        path, option = path_and_options(url.removeprefix("file:"))
        if not path or option not in ("", "fsync=0", "fsync=1"):
            raise ValueError(f"objects: found {url!r}; allowed: file:PATH, file:PATH?fsync=1")
        return DirectoryObjects(Path(path), fsync=option == "fsync=1")
    if scheme == "s3":
        from shared.objects.s3 import S3Objects

        return S3Objects.from_url(url)
    raise ValueError(f"objects: found {without_credentials(url)!r}; allowed: file:PATH, s3://BUCKET@HOST:PORT")
