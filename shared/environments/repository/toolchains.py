"""Toolchains of the host that lie outside the folders that every sandbox sees: Go and Rust."""

from __future__ import annotations

import functools
import os
import stat
import subprocess
from pathlib import Path
from shutil import which

RUST = "/opt/rust"  # inside


def programs(image: str) -> tuple[str, ...]:
    """Return folders of programs, inside, in front of the system's own. `image`: the root file system, where they are in the
    places that official images have them; empty: the host's programs."""
    if image:
        return ("/usr/local/go/bin", "/usr/local/cargo/bin")
    return (
        *(("/usr/local/go/bin",) if os.path.isdir("/usr/local/go/bin") else ()),
        *((f"{RUST}/bin",) if _rust() else ()),
    )


def mounts() -> list[tuple[Path, str]]:
    """Return (path on the host, path inside)."""
    rust = _rust()
    return [(rust, RUST)] if rust else []


@functools.cache
def _rust() -> Path | None:
    """Return the folder of the Rust toolchain. None: there is none, the system's own folders hold it, or
    sandboxes cannot reach it."""
    found = which("rustc") or which("rustc", path=os.path.expanduser("~/.cargo/bin"))
    if found is None:
        return None
    try:
        done = subprocess.run([found, "--print", "sysroot"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    folder = Path(done.stdout.strip())
    usable = done.returncode == 0 and (folder / "bin/cargo").is_file() and not folder.is_relative_to("/usr")
    return folder if usable and _reachable(folder) else None


def _reachable(folder: Path) -> bool:
    """Say whether a sandbox's user can reach the folder. Root's sandboxes run as other users."""
    return os.geteuid() != 0 or all(stat.S_IMODE(one.stat().st_mode) & 0o001 for one in (folder, *folder.parents))
