"""Folders that hostile code wrote: removed, measured and copied without following a link.

Every name is opened from its folder's descriptor with O_NOFOLLOW, so that a link that appears meanwhile leads nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import subprocess
import uuid
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OPAQUE = "user.overlay.opaque"  # overlayfs: the folder hides that of the base


def remove(folder: Path) -> None:
    """Also what a command made unreadable, or deeper than a path can say: what a folder holds is moved to the top, until only
    empty ones are left. No process of the sandbox is alive, so nobody swaps a folder for a link. What the disk refuses to
    remove stays, and keeps nobody from closing."""
    with contextlib.suppress(OSError):
        empty(folder)
        os.rmdir(folder)


def empty(folder: Path) -> None:
    """Remove what a folder holds. Raises OSError."""
    os.chmod(folder, 0o700)
    top = os.open(folder, _FOLDER)
    try:
        _empty(top)
    finally:
        os.close(top)


def _empty(top: int) -> None:
    fresh = uuid.uuid4().hex  # no command knew it
    for number in itertools.count():
        names = _entries(top)
        if not names:
            return
        for at, name in enumerate(names):
            inner = os.open(name, _FOLDER, dir_fd=top)
            try:
                for to, child in enumerate(_entries(inner)):
                    os.rename(child, f"{fresh}-{number}-{at}-{to}", src_dir_fd=inner, dst_dir_fd=top)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)


def clear(folder: Path) -> None:
    """Remove what a folder of the system holds, whose own mode stays, such as /dev/shm. Raises OSError."""
    top = os.open(folder, _FOLDER)
    try:
        _empty(top)
    finally:
        os.close(top)


def _entries(folder: int) -> list[str]:
    """Names of the folders in it, which may now be opened and moved; whatever else was there is gone."""
    names = []
    for name in os.listdir(folder):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.chmod(name, 0o700, dir_fd=folder)
            names.append(name)
        else:
            os.unlink(name, dir_fd=folder)
    return names


def fill(tree: Path, folder: Path, uid: int | None) -> None:
    """Copy what a tree of the host holds into a folder that no sandbox uses yet, links as links. `uid`: the new owner; None: this
    user. Raises OSError."""
    command = ["/bin/cp", "-R", "-P", "--preserve=mode,timestamps", "--reflink=auto", "--", f"{tree}/.", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        first = done.stderr.strip().partition("\n")[0]  # the same for every file
        raise OSError(f"cannot copy {tree}: {first[:500]}")
    os.chmod(folder, 0o755)
    if uid is not None:
        own(folder, uid)


def own(folder: Path, uid: int) -> None:
    for where, folders, inner in os.walk(folder):
        for path in (where, *(os.path.join(where, name) for name in (*folders, *inner))):
            os.chown(path, uid, uid, follow_symlinks=False)


def used(folder: Path) -> int:
    """Return the bytes on the disk below a folder. What vanishes meanwhile, or cannot be read, counts nothing."""
    total = 0
    waiting = []
    with contextlib.suppress(OSError):
        waiting.append(os.open(folder, _FOLDER))
    seen: set[int] = set()
    while waiting:
        here = waiting.pop()
        try:
            for name in os.listdir(here):
                with contextlib.suppress(OSError):
                    info = os.stat(name, dir_fd=here, follow_symlinks=False)
                    if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
                        if info.st_ino in seen:
                            continue
                        seen.add(info.st_ino)
                    total += info.st_blocks * 512
                    if stat.S_ISDIR(info.st_mode) and len(waiting) < 500:
                        waiting.append(os.open(name, _FOLDER, dir_fd=here))
        finally:
            os.close(here)
    return total


def copy(source: Path, target: Path, uid: int | None) -> int:
    """Copy what a folder holds into an empty one: files with their holes and hard links, links as links, FIFOs, and what an
    overlay notes. `uid`: the new owner; None: this user. Return the bytes. Raises OSError."""
    here, there = os.open(source, _FOLDER), os.open(target, _FOLDER)
    try:
        return _copy_all(here, there, uid, _Twins(there))
    finally:
        os.close(here)
        os.close(there)


class _Twins:
    """Files with several names that were copied: where the first copy is, below the folder `top`."""

    def __init__(self, top: int) -> None:
        self._top, self._known = top, dict[tuple[int, int], str]()
        self.prefix = ""  # of the folder that is being copied

    def linked(self, name: str, info: os.stat_result, there: int) -> bool:
        """Whether the file is copied already, and now has this name as well."""
        if info.st_nlink < 2 or stat.S_ISDIR(info.st_mode):
            return False
        first = self._known.setdefault((info.st_dev, info.st_ino), self.prefix + name)
        if first == self.prefix + name:
            return False
        try:
            os.link(first, name, src_dir_fd=self._top, dst_dir_fd=there, follow_symlinks=False)
        except OSError:  # deeper than a path can say: a copy of its own
            return False
        return True


def _copy_all(here: int, there: int, uid: int | None, twins: _Twins) -> int:
    total = 0
    for name in os.listdir(here):
        try:
            info = os.stat(name, dir_fd=here, follow_symlinks=False)
            if not stat.S_ISCHR(info.st_mode) and twins.linked(name, info, there):
                continue
            total += _copy_one(name, info, here, there, uid, twins)
        except FileNotFoundError:
            continue
        if uid is not None:
            os.chown(name, uid, uid, dir_fd=there, follow_symlinks=False)
    return total


def _copy_one(name: str, info: os.stat_result, here: int, there: int, uid: int | None, twins: _Twins) -> int:
    mode = info.st_mode
    if stat.S_ISDIR(mode):
        inner = _opened(name, here, _FOLDER)
        try:
            os.mkdir(name, 0o700, dir_fd=there)
            target = os.open(name, _FOLDER, dir_fd=there)
            try:
                with contextlib.suppress(OSError):
                    os.setxattr(target, _OPAQUE, os.getxattr(inner, _OPAQUE))
                before, twins.prefix = twins.prefix, f"{twins.prefix}{name}/"
                size = _copy_all(inner, target, uid, twins)
                twins.prefix = before
                os.fchmod(target, stat.S_IMODE(mode))
                os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
            finally:
                os.close(target)
        finally:
            os.close(inner)
        return size
    if stat.S_ISREG(mode):
        source = _opened(name, here, _FILE)
        try:
            return _copy_file(source, name, there)
        finally:
            os.close(source)
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(name, dir_fd=here), name, dir_fd=there)
    elif stat.S_ISFIFO(mode):
        os.mkfifo(name, stat.S_IMODE(mode), dir_fd=there)
    elif stat.S_ISCHR(mode) and info.st_rdev == 0:  # overlayfs: the base's entry is deleted
        os.mknod(name, stat.S_IFCHR, 0, dir_fd=there)
    else:
        return 0  # a socket means nothing without its process
    return 0


def _opened(name: str, folder: int, flags: int) -> int:
    """Open what its owner made unreadable, too."""
    try:
        return os.open(name, flags, dir_fd=folder)
    except PermissionError:
        held = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            mode = stat.S_IMODE(os.fstat(held).st_mode)
            os.chmod(f"/proc/self/fd/{held}", mode | 0o700)
            try:
                return os.open(name, flags, dir_fd=folder)
            finally:
                os.chmod(f"/proc/self/fd/{held}", mode)
        finally:
            os.close(held)


def _copy_file(source: int, name: str, there: int) -> int:
    info = os.fstat(source)
    if not stat.S_ISREG(info.st_mode):
        return 0
    target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=there)
    total = 0
    try:
        os.truncate(target, info.st_size)
        at = 0
        while at < info.st_size:
            try:
                at = os.lseek(source, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    break
                raise
            end = min(os.lseek(source, at, os.SEEK_HOLE), info.st_size)
            while at < end:
                done = _copy_part(source, target, at, end - at)
                if not done:
                    return total
                at += done
                total += done
        os.fchmod(target, stat.S_IMODE(info.st_mode) & 0o777)
        os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
    finally:
        os.close(target)
    return total


def _copy_part(source: int, target: int, at: int, size: int) -> int:
    """Copy some of the bytes; return how many. The kernel does it alone where both files are of one file system."""
    try:
        return os.copy_file_range(source, target, min(size, 1 << 24), at, at)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
    return os.pwrite(target, os.pread(source, min(size, 1 << 20), at), at)
