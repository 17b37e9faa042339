"""The places of a container in which its sandbox may write: overlays whose layers lie in a volume that no cell sees.

In the volume, for place N: `base/N` is what the place begins with, `upper/K/N` and `work/K/N` are the layers of the K-th mounting,
and `kept/NAME/N` is a snapshot of the upper layer.

Invariants:
- A kept layer is never written to. A layer that is mounted is written to by cells alone.
- Another mounting begins with new folders, when no cell is alive: nothing of before can disturb it.
- Only the loop and its errands work here. They have the rights of the sandbox's user, also over files that it closed to itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import stat
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from shared.sandbox import folders
from shared.sandbox.inside import confine, transfer

VOLUME = "/.etude-layer"
MARK = b"etude: the layer is whole\n"
_OPAQUE = "user.overlay.opaque"  # of a folder that hides that of the base
_XATTR = "SCHILY.xattr."
_DETACH, _MOVE = 2, 8192
_COVER = confine._MS_RDONLY | confine._MS_NOSUID | confine._MS_NODEV | 8  # MS_NOEXEC
# Python before 3.11.4, as an image may have it, knows no filters, and trusts every archive.
_TRUSTED: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
_OPEN = 0o1777  # a place that the image leaves open to everybody, such as /tmp


class Layers:
    """`places`: absolute paths, the work directory first. `inner`: mounts of the engine that may lie in places. `mounts`: folders
    that the worker fills before the first mounting, and that nothing inside can write to; the N-th lies in `mounts/N`."""

    def __init__(self, places: list[str], inner: list[str], volume: str = VOLUME, mounts: Sequence[str] = ()) -> None:
        self.places, self.number = places, 0
        self._mounts = list(mounts)
        self._inner = {
            path: os.open(path, os.O_PATH | os.O_CLOEXEC)
            for path in sorted(inner)
            if any(path.startswith(f"{place}/") for place in places)
        }
        self._fd = os.open(volume, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def top(self) -> str:
        """The volume, also when something else is mounted over it."""
        return f"/proc/self/fd/{self._fd}"

    def free(self) -> int:
        """Return the free bytes of the volume's disk, which others use as well."""
        found = os.fstatvfs(self._fd)
        return found.f_bfree * found.f_frsize

    def begin(self, volume: str = VOLUME) -> None:
        """Copy what the image has in the places, and hide the volume. Raises OSError, confine.Unconfinable."""
        for at, place in enumerate(self.places):
            base = Path(self.top, "base", str(at))
            base.mkdir(parents=True)
            if os.path.isdir(place):
                folders.copy(Path(place), base, None)
        if volume:
            cover = confine._libc.mount(b"tmpfs", os.fsencode(volume), b"tmpfs", _COVER, b"size=4k,mode=000")
            confine._check(cover, f"mount over {volume}")

    def serve(self, order: dict[str, Any]) -> int:
        """Do an errand over standard input and output. Raises OSError, ValueError, confine.Unconfinable."""
        source, out = io.BufferedReader(io.FileIO(0, "r")), io.BufferedWriter(io.FileIO(1, "w"), 1 << 18)
        sys.setrecursionlimit(10_000)
        what = order["do"]
        if what == "fill":
            unpack(source, self._filled(order))
        elif what == "mount":
            out.write(json.dumps(self._mount(order, source)).encode())
        elif what == "keep":
            out.write(json.dumps(self._keep(order)).encode())
        elif what == "give":
            pack(f"{self.top}/kept/{int(order['kept'])}", out, int(order["size"]))
        elif what == "used":
            out.write(json.dumps(folders.used(Path(self.top, "upper", str(order["number"])))).encode())
        elif what == "lines":
            for line in transfer.lines(Path(self.top, "base", "0"), int(order["size"])):
                out.write(json.dumps(line).encode() + b"\n")
        else:
            raise ValueError(f"layer: found {what!r:.40}; allowed: fill, mount, keep, give, used, lines")
        out.write(MARK)
        out.flush()
        if what == "mount" and order["number"] > 1:
            self._forget(int(order["number"]) - 1)
        return 0

    def _filled(self, order: dict[str, Any]) -> str:
        if "mount" not in order:
            return f"{self.top}/base/0"
        folder = f"{self.top}/mounts/{int(order['mount'])}"
        os.makedirs(folder)
        return folder

    def _forget(self, number: int) -> None:
        """Remove the layers of a mounting that is over, while the sandbox goes on."""
        if os.fork():
            return
        try:
            for fd in range(3, 256):
                if fd != self._fd:
                    with contextlib.suppress(OSError):
                        os.close(fd)
            null = os.open("/dev/null", os.O_RDWR)
            for fd in range(3):
                os.dup2(null, fd)
            for at in range(len(self.places)):
                confine._libc.umount2(f"{self.top}/old/{number}/{at}".encode(), _DETACH)
            for kind in ("upper", "work", "old"):
                folders.remove(Path(self.top, kind, str(number)))
        finally:
            os._exit(0)

    def _keep(self, order: dict[str, Any]) -> int:
        target = Path(self.top, "kept", str(int(order["kept"])))
        target.mkdir(parents=True)
        try:
            return folders.copy(Path(self.top, "upper", str(order["number"])), target, None)
        except BaseException:  # a full disk
            folders.remove(target)
            raise

    def _mount(self, order: dict[str, Any], source: IO[bytes]) -> int:
        """Return the bytes on the disk of the layer that is mounted."""
        number = int(order["number"])
        upper, work = f"{self.top}/upper/{number}", f"{self.top}/work/{number}"
        os.makedirs(upper)
        if order["from"] == "stream":
            unpack(source, upper)
        elif order["from"] == "kept":
            folders.copy(Path(self.top, "kept", str(int(order["kept"]))), Path(upper), None)
        if number > 1:
            self._set_aside(number - 1)
        for at, place in sorted(enumerate(self.places), key=lambda one: one[1]):
            os.makedirs(f"{upper}/{at}", exist_ok=True)
            os.makedirs(f"{work}/{at}")
            if order["from"] == "":
                open_to_all = os.path.isdir(place) and os.stat(place).st_mode & 0o002
                os.chmod(f"{upper}/{at}", _OPEN if open_to_all else 0o755)
            os.makedirs(place, exist_ok=True)  # in another place, or there already
            layers = f"lowerdir={self.top}/base/{at},upperdir={upper}/{at},workdir={work}/{at},userxattr"
            flags = confine._MS_NOSUID | confine._MS_NODEV
            done = confine._libc.mount(b"overlay", os.fsencode(place), b"overlay", flags, layers.encode())
            confine._check(done, f"mount overlay on {place}")
        self._bind_inner()
        self._bind_mounts(again=number > 1)
        if number > 1:
            forget_shared()
        return folders.used(Path(upper)) if order["from"] else 0

    def _bind_inner(self) -> None:
        for path, fd in self._inner.items():
            os.makedirs(path, exist_ok=True)
            done = confine._libc.mount(f"/proc/self/fd/{fd}".encode(), path.encode(), None, confine._MS_BIND, None)
            confine._check(done, f"mount {path}")

    def _bind_mounts(self, *, again: bool) -> None:
        """`again`: those outside of the places are still mounted."""
        for at, path in enumerate(self._mounts):
            if again and not any(path.startswith(f"{place}/") for place in self.places):
                continue
            try:
                os.makedirs(path, exist_ok=True)
            except OSError as error:
                raise ValueError(
                    f"mounts: {path}: {error.strerror}; allowed: a folder that the image has, or one in a place that can be written"
                ) from None
            source, target = f"{self.top}/mounts/{at}".encode(), os.fsencode(path)
            confine._check(confine._libc.mount(source, target, None, confine._MS_BIND, None), f"mount {path}")
            flags = (
                confine._MS_BIND | 32 | confine._MS_RDONLY | confine._MS_NOSUID | confine._MS_NODEV
            )  # 32: MS_REMOUNT
            confine._check(confine._libc.mount(None, target, None, flags, None), f"protect {path}")

    def _set_aside(self, number: int) -> None:
        """Move the overlays of a mounting out of the way. To unmount them takes longer: `_forget` does it."""
        for at, place in sorted(enumerate(self.places), key=lambda one: one[1], reverse=True):
            aside = f"{self.top}/old/{number}/{at}"
            os.makedirs(aside)
            done = confine._libc.mount(os.fsencode(place), aside.encode(), None, _MOVE, None)
            confine._check(done, f"move {place}")


def forget_shared() -> None:
    """Remove what outlives processes and lies in no file of a place: /dev/shm, message queues, System V objects."""
    for folder in ("/dev/shm", "/dev/mqueue"):
        with contextlib.suppress(OSError):
            folders.clear(Path(folder))
    for name, call, remove in (("shm", "shmctl", 0), ("msg", "msgctl", 0), ("sem", "semctl", 0)):
        with contextlib.suppress(OSError):
            rows = Path("/proc/sysvipc", name).read_text().splitlines()[1:]
            for row in rows:
                number = ctypes.c_int(int(row.split()[1]))
                function = getattr(confine._libc, call)
                function(number, 0, 0, 0) if call == "semctl" else function(number, remove, None)


def pack(folder: str, out: IO[bytes], most: int) -> None:
    """Write what a folder holds as a tar archive, with what an overlay notes. Raises ValueError over `most` bytes."""
    left = most
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for where, inner, files in os.walk(folder, onerror=_unreadable):
            for name in sorted(inner) + sorted(files):
                path = os.path.join(where, name)
                head = tar.gettarinfo(path, arcname=path[len(folder) + 1 :])
                if head is None:  # a socket
                    continue
                if head.isdir():
                    with contextlib.suppress(OSError):
                        head.pax_headers = {_XATTR + _OPAQUE: os.getxattr(path, _OPAQUE).decode()}
                left -= head.size + 512
                if left < 0:
                    raise ValueError(f"found more than {most} bytes in changed files")
                if head.isreg():
                    with open(path, "rb") as file:
                        tar.addfile(head, file)
                else:
                    tar.addfile(head)


def _unreadable(error: OSError) -> None:
    raise ValueError(f"a folder cannot be read: {error.strerror}; remove it") from error


def unpack(source: IO[bytes], folder: str) -> None:
    """Unpack an archive of `pack`, or of the worker, into a folder that no cell sees. Raises OSError, tarfile.TarError."""
    found = []
    with tarfile.open(fileobj=source, mode="r|") as tar:
        for head in tar:
            path = os.path.join(folder, head.name)
            if head.isdir():
                os.makedirs(path, exist_ok=True)
                found.append((path, head))
                continue
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            if head.ischr():
                os.mknod(path, stat.S_IFCHR, 0)
            else:
                tar.extract(head, folder, set_attrs=not head.issym(), **_TRUSTED)
    while source.read(1 << 16):  # what pads the archive
        pass
    for path, head in reversed(found):  # a closed folder is closed after it is full
        if opaque := head.pax_headers.get(_XATTR + _OPAQUE):
            os.setxattr(path, _OPAQUE, opaque.encode())
        os.chmod(path, stat.S_IMODE(head.mode))
        os.utime(path, (head.mtime, head.mtime))
