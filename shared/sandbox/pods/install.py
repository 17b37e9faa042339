"""Writes the interpreter and the loop into a folder, in the init container of a sandbox's pod.

    python -m shared.sandbox.pods.install FOLDER

Pods bring any image; this comes from the worker's. FOLDER/home and FOLDER/code are mounted read-only in the sandbox's container.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from shared.sandbox.containers import bundle, volumes
from shared.sandbox.containers.volumes import Entry
from shared.sandbox.inside.porter import DIGEST


@functools.cache
def digest() -> str:
    """Return what tells this release's loop from another's."""
    return volumes.digest(bundle.code())


def install(folder: Path) -> None:
    """Raises OSError, SandboxUnavailable where this interpreter cannot travel."""
    _write(folder / "home", bundle.bundle())
    name = Entry(f"shared/sandbox/inside/{DIGEST}", 0o644, source=digest().encode())
    _write(folder / "code", (*bundle.code(), name))


def _write(folder: Path, entries: Sequence[Entry]) -> None:
    """Write the entries, parents first. What an earlier try has left is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for entry in entries:
        path = folder / entry.path
        if entry.source is None and not entry.target:
            path.mkdir(exist_ok=True)
        elif entry.target:
            path.symlink_to(entry.target)
        elif isinstance(entry.source, bytes):
            path.write_bytes(entry.source)
        elif entry.source is not None:
            shutil.copyfile(entry.source, path)
        if not entry.target:
            os.chmod(path, entry.mode)


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python -m shared.sandbox.pods.install FOLDER, which exists")
    install(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
