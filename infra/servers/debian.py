"""Programs from Debian's packages: the machine's own where it has them, else a private copy.

A private copy needs no root and changes nothing on the machine: apt resolves and downloads into the cache, dpkg-deb
unpacks there, the programs are started from it. (Installing a server's package would start that server as well.)
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from infra.servers import CACHE, Unavailable, alone, require_fetching, say

LOG_LINES = 3
WAITING = ("-o", "DPkg::Lock::Timeout=600")  # seconds; another apt-get may be at work on this machine


def program(name: str, package: str, folders: Sequence[str] = ("/usr/bin", "/usr/sbin")) -> Path:
    """The path of `name`: as `present` finds it, else in a private copy of `package` that is made now. Raises Unavailable."""
    if path := present(name, package, folders):
        return path
    root = CACHE / "debian" / package
    if not root.exists():
        require_fetching(package)
        with alone("debian"):  # one lock for all packages: they share apt's lists
            if not root.exists():
                _unpack(package, root)
    if path := present(name, package, folders):
        return path
    raise Unavailable(f"{name}: not in Debian's {package}; install {package} yourself, then run this again")


def present(name: str, package: str, folders: Sequence[str] = ("/usr/bin", "/usr/sbin")) -> Path | None:
    """The path of `name`: on PATH, in one of `folders` (patterns allowed) of this machine, or in the private copy of `package`
    that was made before."""
    if found := shutil.which(name):
        return Path(found).resolve().parent / name  # PostgreSQL finds its other files from its real place
    return _in(Path("/"), name, folders) or _in(CACHE / "debian" / package, name, folders)


def libraries(path: Path) -> dict[str, str]:
    """The environment in which a program of a private copy finds its libraries; empty for the machine's own."""
    base = CACHE / "debian"
    if not path.is_relative_to(base):
        return {}
    root = base / path.relative_to(base).parts[0]
    folders = [*root.glob("usr/lib/*-linux-gnu"), *root.glob("lib/*-linux-gnu")]
    return {"LD_LIBRARY_PATH": os.pathsep.join(map(str, folders))}


def _in(root: Path, name: str, folders: Sequence[str]) -> Path | None:
    for folder in folders:
        for path in sorted(root.glob(f"{folder.lstrip('/')}/{name}"), reverse=True):  # the newest version first
            if os.access(path, os.X_OK):
                return path
    return None


def _unpack(package: str, root: Path) -> None:
    """`package` and whatever it needs that this machine lacks, below `root`."""
    for tool in ("apt-get", "dpkg-deb"):
        if not shutil.which(tool):
            raise Unavailable(
                f"{package}: not installed, and {tool} is not here to fetch it; install {package} yourself"
            )
    say(f"fetching Debian's {package}")
    work = root.with_name(f".{package}")
    shutil.rmtree(work, ignore_errors=True)
    archives = work / "archives"
    (archives / "partial").mkdir(parents=True)
    options = ["-o", f"Dir::Cache={work}", "-o", "Debug::NoLocking=true", "-o", "APT::Sandbox::User=root", "-qq", "-y"]
    download = ["install", "--download-only", "--no-install-recommends", package]
    first = _apt([*options, *download])
    if first:  # the machine's package lists are absent or old: read them anew, on our side
        lists = CACHE / "debian" / ".lists"
        (lists / "partial").mkdir(parents=True, exist_ok=True)
        options += ["-o", f"Dir::State::Lists={lists}"]
        reason = _apt([*options, "update"]) or _apt([*options, *download])
        if reason:
            raise Unavailable(
                f"{package}: apt-get cannot fetch it ({reason}). Way out: apt-get update && apt-get install {package}"
            )
    tree = work / "tree"
    for archive in sorted(archives.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(archive), str(tree)], check=True)
    tree.rename(root)
    shutil.rmtree(work, ignore_errors=True)


def _apt(arguments: list[str]) -> str:
    """Runs apt-get. Empty, or the end of what it said when it failed."""
    done = subprocess.run(
        ["apt-get", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )
    return (
        "" if done.returncode == 0 else " / ".join(done.stdout.strip().splitlines()[-LOG_LINES:]) or "no reason given"
    )


def installed(tool: str, package: str) -> Path:
    """`tool` from PATH; where it is missing, root installs `package` (it starts nothing). Raises Unavailable."""
    if not shutil.which(tool) and os.geteuid() == 0 and shutil.which("apt-get"):
        require_fetching(package)
        say(f"installing {package} by apt-get")
        install = ["install", "-y", "-qq", "--no-install-recommends", *WAITING, package]
        if _apt(install):
            _apt(["update", "-qq", *WAITING])
            if reason := _apt(install):
                raise Unavailable(f"{tool}: apt-get cannot install {package}: {reason}")
    if found := shutil.which(tool):
        return Path(found)
    raise Unavailable(f"{tool}: not found. Way out: sudo apt-get install {package}, or your system's equal, then again")
