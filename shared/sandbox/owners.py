"""Who owns which sandbox on this machine: folders with a lock that its owner holds, and uids with a lock each.

A process that dies lets go of its locks, whatever killed it. `dead` finds the folders that it left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shared.sandbox import SandboxUnavailable

# Of sandboxes that live on, apart from the uids of nurseries and commands (bubblewrap.FIRST_UID).
FIRST_UID, UIDS = 0x60000000, 1 << 16
_UIDS_AT = Path("/tmp")  # the same for all processes of the machine, whatever their TMPDIR
_LOCK = "lock"


def default_state() -> Path:
    return Path(tempfile.gettempdir()) / f"etude-sandboxes-{os.geteuid()}"


def private(folder: Path) -> Path:
    """Return the folder, made. Raises SandboxUnavailable where somebody else could have put something into it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise SandboxUnavailable(
            f"{folder}: found a folder of user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}; allowed: our own, which "
            "others cannot write; remove it"
        )
    return folder


def runs_programs(folder: Path) -> None:
    """Raises SandboxUnavailable where nothing that lies in the folder could be executed: the task would be blamed for it."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        raise SandboxUnavailable(
            f"{folder}: found a disk that is mounted noexec; no program that an attempt makes or brings along could run; mount it "
            "with exec (docker: --tmpfs /tmp:exec), or set TMPDIR to a folder on another disk"
        )


class Owner:
    """This process's folder for the files of its sandboxes. Its name is not used again."""

    def __init__(self, state: Path) -> None:
        self.name = f"{os.getpid()}-{secrets.token_hex(6)}"
        self.folder = private(state) / self.name
        draft = state / f".{self.name}"  # under its name it is locked from the beginning
        draft.mkdir(mode=0o700)
        self._lock = os.open(draft / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.rename(self.folder)

    def remove(self) -> None:
        """The sandboxes in it are removed already."""
        with contextlib.suppress(OSError):
            os.unlink(self.folder / _LOCK)
            os.rmdir(self.folder)
        os.close(self._lock)


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Whether nobody holds the lock; it is held meanwhile."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path.exists()
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)


def dead(state: Path) -> Iterator[Path]:
    """Yield the folders of owners that are gone, each while its lock is held, and remove what the caller leaves empty."""
    if not state.is_dir():
        return
    for folder in sorted(state.iterdir()):
        if not folder.is_dir():
            continue
        with _claimed(folder / _LOCK) as ours:
            if ours:
                yield folder
                with contextlib.suppress(OSError):
                    os.unlink(folder / _LOCK)
                    os.rmdir(folder)


def _uids() -> Path:
    return _UIDS_AT / f"etude-uids-{os.geteuid()}"


def forget_uids() -> None:
    """Remove the locks of uids that nobody holds: those of processes that were killed."""
    with contextlib.suppress(OSError):
        for path in _uids().iterdir():
            with _claimed(path) as ours:
                if ours:
                    path.unlink()


class Uid:
    """A uid that no other live sandbox of this machine has."""

    def __init__(self) -> None:
        folder = private(_uids())
        first = secrets.randbelow(UIDS)
        for at in range(UIDS):
            number = (first + at) % UIDS
            fd = os.open(folder / str(number), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            if os.fstat(fd).st_nlink:  # else another let go of it meanwhile, and removed it
                self.number, self._fd, self._path = FIRST_UID + number, fd, folder / str(number)
                return
            os.close(fd)
        raise SandboxUnavailable(f"{folder}: all {UIDS} uids are in use; close sandboxes")

    def release(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(self._fd)
            self._fd = -1
