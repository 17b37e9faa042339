"""Folders for large files on their way. What a killed process leaves in one goes with the next that is made in the same place."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """A new, empty folder `parent/PREFIX…`, removed at the end unless it was renamed. It is locked while it is in use, and
    the kernel lets go of the lock whatever ends the process: so those of the same prefix that nobody holds are removed
    first. Where a file system knows no locks for folders, they stay."""
    parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        with contextlib.ExitStack() as gate:  # one at a time: a new folder is locked before anybody looks at it
            _lock(parent, gate)
            for left in [there for there in parent.iterdir() if there.name.startswith(prefix)]:
                _remove_unless_held(left)
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            held.callback(shutil.rmtree, folder, ignore_errors=True)
            _lock(folder, held)
        yield folder


def _lock(folder: Path, stack: contextlib.ExitStack, how: int = fcntl.LOCK_EX) -> bool:
    """Until the stack ends."""
    opened = os.open(folder, os.O_RDONLY)
    stack.callback(os.close, opened)
    try:
        fcntl.flock(opened, how)
    except OSError:
        return False
    return True


def _remove_unless_held(folder: Path) -> None:
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # gone since it was listed
        if folder.is_dir() and _lock(folder, stack, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(folder, ignore_errors=True)
