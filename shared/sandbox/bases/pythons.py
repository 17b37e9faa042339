"""Puts a Python into a base: from a file or folder that the user names, or uv's. It becomes /usr/local, as in Docker's images."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from shared.sandbox.bases import layers
from shared.sandbox.bases.debian import without_ours
from shared.sandbox.bases.rootfs import File, Folder, Link, found, from_folder, located, put
from shared.sandbox.bases.store import BaseRefused

PLACE = "usr/local"
_VERSION = re.compile(r"3\.\d{1,2}\Z")
_INSTALL_S = 900.0
WAYS = (
    "give one with --python-from FILE (a tar of python-build-standalone, or a folder with bin/python3.X), or let "
    "`uv python install` fetch it"
)


def checked(version: str) -> str:
    """Return the version. Raises BaseRefused."""
    if not _VERSION.match(version):
        raise BaseRefused(f"--python: found {version!r:.40}; allowed: 3.X, as 3.12")
    return version


def add(root: Folder, version: str, given: Path | None, scratch: Path) -> str:
    """Put a Python into the root. `given`: a tar or a folder; None: uv's. Return where it came from. Raises BaseRefused,
    OSError."""
    prefix, origin = _from_path(given, version, scratch) if given else (_from_uv(version, scratch), "uv")
    for name, target in (("python3", f"python{version}"), ("python", "python3")):
        bin_ = prefix.children.get("bin")
        assert isinstance(bin_, Folder)
        bin_.children.setdefault(name, Link(target))
    put(root, PLACE, prefix)
    program = found(root, f"{PLACE}/bin/python{version}")
    if not isinstance(program, File):
        raise BaseRefused(f"--python-from {given}: its bin/python{version} is a link that leaves it; {WAYS}")
    return origin


def _from_path(given: Path, version: str, scratch: Path) -> tuple[Folder, str]:
    if given.is_dir():
        top = from_folder(given).root
    else:
        top, tar = Folder(), scratch / "python.tar"
        try:
            with given.open("rb") as source:
                layers.uncompressed(source, tar)
            layers.apply(top, tar, {})
        except BaseRefused as error:
            raise BaseRefused(f"--python-from {given}: {error}") from None
        except OSError as error:
            raise BaseRefused(f"--python-from {given}: cannot be read ({error.strerror})") from None
    for place in ("", "python/install", "python"):
        prefix = found(top, place) if place else top
        there = located(prefix, f"bin/python{version}") if isinstance(prefix, Folder) else None
        if isinstance(prefix, Folder) and there and there[1] in there[0].children:
            if "pyvenv.cfg" in prefix.children:
                raise BaseRefused(f"--python-from {given}: is a virtual environment, and no Python by itself; {WAYS}")
            return prefix, given.name
    raise BaseRefused(f"--python-from {given}: holds no bin/python{version}; {WAYS}")


def _from_uv(version: str, scratch: Path) -> Folder:
    uv = shutil.which("uv")
    if uv is None:
        raise BaseRefused(f"--python {version}: the base has another version, and uv is not installed here; {WAYS}")
    place = scratch / "pythons"
    command = [uv, "python", "install", "--no-config", "--install-dir", str(place), version]
    try:
        done = subprocess.run(
            command,
            env=without_ours(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BaseRefused(f"--python {version}: uv took more than {_INSTALL_S:g} s to install it; {WAYS}") from None
    if done.returncode:
        reason = " ".join(done.stderr.split())[-500:]
        raise BaseRefused(f"--python {version}: uv could not install it: {reason}; {WAYS}")
    # Beside it lie links of its minor version, locks and a cache.
    for folder in sorted(place.glob("cpython-*")):
        if folder.is_dir() and not folder.is_symlink() and (folder / "bin" / f"python{version}").exists():
            return from_folder(folder).root
    raise BaseRefused(f"--python {version}: uv installed no bin/python{version}; {WAYS}")
