"""Bases in the object store: an archive and a manifest by their content, and names that point to them.

    bases/<digest>.tar.zst     the root file system
    bases/<digest>.json        its `Manifest`
    bases/names/<name>.json    {"digest": "<digest>"}; making a base of the same name again replaces this object alone

Invariants:
- The digest is the sha256 of the tar before compression: equal files give an equal digest, whatever packed them.
- A manifest is written after its archive, and a name after its manifest: what a name leads to is whole.
"""

from __future__ import annotations

import difflib
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from shared.contracts.run import Ref
from shared.objects import ObjectMissing, Objects

PREFIX = "base:"
_NAMES = "bases/names/"
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
LIST = "`etude sandbox base list` shows all"
MAKE = "make one with `etude sandbox base make`"


class BaseRefused(ValueError):
    """No sandbox can begin with this base here; the text says why and what to do."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    digest: str  # sha256 of the tar before compression
    name: str  # under which it was made first
    machine: str  # of its programs, as `uname -m` calls it
    size: int  # bytes of its regular files
    files: int  # files, folders and links
    archive: Ref
    made: dict[str, str]  # how: the options that it was made with
    at: str  # when it was made, in UTC
    # Variables of every command that the base asks for, as an image does: {"PATH": "/opt/app/bin:/usr/bin"}.
    environment: dict[str, str] = {}


class _Name(msgspec.Struct, frozen=True, kw_only=True):
    digest: str


def machine() -> str:
    """Return this machine's type: x86_64, aarch64, …"""
    found = platform.machine().lower()
    return _MACHINES.get(found, found)


def key_of(digest: str) -> str:
    return f"bases/{digest}.tar.zst"


def checked_name(name: str) -> str:
    """Return the name. Raises BaseRefused for one that no base may have."""
    if not _NAME.match(name) or _DIGEST.match(name):
        raise BaseRefused(
            f"base {name!r:.80}: no name; allowed: up to 63 small letters, digits, '.', '_' and '-', a letter or digit first"
        )
    return name


def is_digest(text: str) -> bool:
    return bool(_DIGEST.match(text))


def resolve(objects: Objects, wanted: str) -> str:
    """Return the digest of a base. `wanted`: its name or its digest. Raises BaseRefused, OSError."""
    if is_digest(wanted):
        return wanted
    try:
        data = objects.get(objects.head(f"{_NAMES}{checked_name(wanted)}.json"))
        digest = msgspec.json.decode(data, type=_Name).digest
    except ObjectMissing:
        near = difflib.get_close_matches(wanted, names(objects), 1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise BaseRefused(f"base {wanted!r}: there is none of this name; {meant}{LIST}, or {MAKE}") from None
    except ValueError as error:
        raise BaseRefused(f"base {wanted!r}: its name is damaged ({error}); {MAKE} {wanted}") from None
    if not is_digest(digest):
        raise BaseRefused(f"base {wanted!r}: its name is damaged (found digest {digest!r:.80}); {MAKE} {wanted}")
    return digest


def find(objects: Objects, wanted: str) -> Manifest:
    """Return the manifest of a base. `wanted`: its name or its digest. Raises BaseRefused, OSError."""
    digest = resolve(objects, wanted)
    try:
        data = objects.get(objects.head(f"bases/{digest}.json"))
        manifest = msgspec.json.decode(data, type=Manifest)
    except ObjectMissing:
        raise BaseRefused(f"base {wanted!r}: there is none with digest {digest}; {LIST}, or {MAKE}") from None
    except ValueError as error:
        raise BaseRefused(f"base {wanted!r}: its manifest is damaged ({error}); {MAKE}") from None
    if manifest.digest != digest or manifest.archive.key != key_of(digest):
        raise BaseRefused(f"base {wanted!r}: its manifest is of another base, {manifest.digest!r:.80}; {MAKE}")
    return manifest


def names(objects: Objects) -> list[str]:
    """Return the names of all bases. Raises OSError."""
    return [key.removeprefix(_NAMES).removesuffix(".json") for key in objects.list(_NAMES) if key.endswith(".json")]


def every(objects: Objects) -> Iterator[tuple[str, Manifest | BaseRefused]]:
    """Yield every base by its name, sorted, then those without a name under their digest. A damaged one is given as the
    error that tells of it. Raises OSError."""
    named: set[str] = set()
    for name in names(objects):
        try:
            manifest = find(objects, name)
        except BaseRefused as error:
            yield name, error
        else:
            named.add(manifest.digest)
            yield name, manifest
    for key in list(objects.list("bases/")):
        digest = key.removeprefix("bases/").removesuffix(".json")
        if is_digest(digest) and digest not in named:
            try:
                yield digest, find(objects, digest)
            except BaseRefused as error:
                yield digest, error


def add(objects: Objects, manifest: Manifest, archive: Path) -> Manifest:
    """Store a base, unless it is there, and let `manifest.name` point to it. `manifest.archive` is filled in. Return the manifest
    that is stored: the first one of this content. Raises OSError, BaseRefused."""
    checked_name(manifest.name)
    stored = _whole(objects, manifest.digest)
    if stored is None:
        ref = objects.put_file(key_of(manifest.digest), archive)
        stored = msgspec.structs.replace(manifest, archive=ref)
        objects.put(f"bases/{manifest.digest}.json", msgspec.json.encode(stored))
    objects.put(f"{_NAMES}{manifest.name}.json", msgspec.json.encode(_Name(digest=manifest.digest)))
    return stored


def _whole(objects: Objects, digest: str) -> Manifest | None:
    """Return the manifest of a base whose archive is there, or None."""
    try:
        manifest = find(objects, digest)
        return manifest if objects.head(manifest.archive.key) == manifest.archive else None
    except (BaseRefused, ObjectMissing):
        return None


def remove(objects: Objects, wanted: str) -> tuple[str, bool]:
    """Remove a name, and its base unless another name points there; or a base that has no name, by its digest. Return the digest,
    and whether the base itself went. Raises BaseRefused, OSError."""
    digest = resolve(objects, wanted)
    others = [name for name in names(objects) if name != wanted and _leads(objects, name) == digest]
    if is_digest(wanted):
        if others:
            raise BaseRefused(f"base {wanted!r}: is named {', '.join(others)}; remove it by that")
        find(objects, digest)
    else:
        objects.delete(f"{_NAMES}{wanted}.json")
    if not others:
        objects.delete(f"bases/{digest}.json")
        objects.delete(key_of(digest))
    return digest, not others


def _leads(objects: Objects, name: str) -> str | None:
    try:
        return resolve(objects, name)
    except BaseRefused:
        return None


def as_machine(name: str) -> str:
    """Return a machine type as `uname -m` calls it, from what Docker or Debian calls it: amd64 is x86_64."""
    return _MACHINES.get(name, name)


def made(**options: str | None) -> Mapping[str, str]:
    """Return the options that were given, for a manifest."""
    return {name: value for name, value in options.items() if value}
