"""The first process of a bubblewrap sandbox: it furnishes the root that cells see, gives up its rights, and becomes the loop.

Two roots: the loop's own has an interpreter and the loop's files, nothing else. Cells see BOX alone.

The environment variable ORDER is a JSON object:
  mode     root: bubblewrap made no user namespace, one is entered here; user: it did
  channel  a descriptor; as root, `map` is written to it before the first frame, and one byte comes back when the outside has
           mapped the user that cells run as
  groups   descriptors of cgroup.procs files
  overlay  lower, upper, work, folders to make; null: BOX is mounted already
  binds    [source, target in BOX, read-only]
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from typing import Any

from shared.sandbox.inside import cell, confine, idmap, tree
from shared.sandbox.inside.loop import Loop

BOX, SCRATCH, UID = "/box", "/.etude", 1000
ORDER = "ETUDE_ORDER"
_SCRATCH_BYTES = 128 << 20
_DEVICES = ("null", "zero", "full", "random", "urandom")
_MS_REMOUNT, _MS_NOEXEC = 32, 8
_QUIET = confine._MS_NOSUID | confine._MS_NODEV
# SYS_ADMIN to make cells, KILL to end them, SYS_PTRACE to see what files they hold open.
_CAPABILITIES = 1 << 21 | 1 << 19 | 1 << 5


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Raises confine.Unconfinable, which names the target."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    result = confine._libc.mount(words[0], words[1], words[2], flags, words[3])
    confine._check(result, f"mount {kind or 'bind'} on {target}")


def furnish(order: dict[str, Any]) -> None:
    """Mount what BOX lacks: the overlay, devices, memory file systems, the loop's scratch folder."""
    if order["overlay"]:
        _overlay(order["overlay"])
    else:
        mount(BOX, BOX, None, confine._MS_BIND | confine._MS_REC)  # a cell moves into a mount, not into a folder
    for source, target, read_only in order["binds"]:
        _bind(source, f"{BOX}{target}", read_only)
    mount("tmpfs", f"{BOX}{SCRATCH}", "tmpfs", _QUIET | _MS_NOEXEC, f"size={_SCRATCH_BYTES},mode=755")
    _devices()


def _bind(source: str, target: str, read_only: bool) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, target, None, confine._MS_BIND)
    flags = confine._MS_BIND | _MS_REMOUNT | _QUIET | (confine._MS_RDONLY if read_only else 0)
    mount(None, target, None, flags)


def _overlay(order: dict[str, Any]) -> None:
    layers = f"lowerdir={order['lower']},upperdir={order['upper']},workdir={order['work']}"
    mount("overlay", BOX, "overlay", _QUIET, f"{layers},userxattr")
    for folder in ("proc", "dev", SCRATCH[1:], *order["folders"]):
        os.makedirs(f"{BOX}/{folder}", exist_ok=True)


def _devices() -> None:
    dev = f"{BOX}/dev"
    mount("tmpfs", dev, "tmpfs", confine._MS_NOSUID, "size=64k,mode=755")
    for name in _DEVICES:
        if os.path.exists(f"/dev/{name}"):
            os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
            mount(f"/dev/{name}", f"{dev}/{name}", None, confine._MS_BIND)
    for name, aim in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(aim, f"{dev}/{name}")
    os.mkdir(f"{dev}/shm")
    mount("tmpfs", f"{dev}/shm", "tmpfs", _QUIET, "size=64m,mode=1777")
    os.mkdir(f"{dev}/pts")
    with contextlib.suppress(confine.Unconfinable):  # without it there are no terminals inside
        mount("devpts", f"{dev}/pts", "devpts", confine._MS_NOSUID | _MS_NOEXEC, "newinstance,mode=620,ptmxmode=666")
        os.symlink("pts/ptmx", f"{dev}/ptmx")
    mount(None, dev, None, confine._MS_BIND | _MS_REMOUNT | confine._MS_RDONLY | confine._MS_NOSUID)


def _enter(channel: int) -> None:
    """Leave the real root for a user namespace whose one user the outside maps."""
    confine.enter_user_namespace()
    os.write(channel, b"map")
    if os.read(channel, 1) != b"+":
        raise confine.Unconfinable("the outside did not map the sandbox's user")
    confine._check(confine._libc.prctl(confine._PR_SET_KEEPCAPS, 1, 0, 0, 0), "keep capabilities")
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)


class BoxLoop(Loop):
    """See the module. `set` also takes shm_bytes, the size of /dev/shm, so that it never fills the sandbox's memory alone, and
    clear: whether to begin an empty /dev/shm, while no session and no program is alive."""

    def _do_set(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        shm = f"{BOX}/dev/shm"
        if head["clear"]:
            for one in self.cells.values():  # a prepared shell has the old one
                one.strike("cleared")
            confine._check(confine._libc.umount2(os.fsencode(shm), cell.MNT_DETACH), f"unmount {shm}")
            mount("tmpfs", shm, "tmpfs", _QUIET, "mode=1777")
        mount(None, shm, None, _MS_REMOUNT | _QUIET, f"size={int(head['shm_bytes'])}")
        super()._do_set(number, head, blob)

    def _do_held(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        """Answer the bytes of files on the disk that have no name any more, but are open."""
        self.answer(number, {"bytes": held()})


def held() -> int:
    """Return the bytes of open files without a name, but for those in memory."""
    nameless = os.memfd_create("device")
    memory = {os.fstat(nameless).st_dev, os.stat(f"{BOX}/dev/shm").st_dev, os.stat(f"{BOX}{SCRATCH}").st_dev}
    os.close(nameless)
    found: dict[tuple[int, int], int] = {}
    for pid in tree.read():
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd") if pid > 1 else ():
                with contextlib.suppress(OSError):
                    info = os.stat(f"/proc/{pid}/fd/{name}")
                    if stat.S_ISREG(info.st_mode) and not info.st_nlink and info.st_dev not in memory:
                        found[info.st_dev, info.st_ino] = info.st_blocks * 512
    return sum(found.values())


def main() -> None:
    order = json.loads(os.environ.pop(ORDER))
    channel: int = order["channel"]
    for fd in (channel, *order["groups"]):
        os.set_inheritable(fd, False)
    mount(None, "/", None, confine._MS_REC | confine._MS_PRIVATE)
    if order["mode"] == "root":
        mount("proc", "/proc", "proc", _QUIET | _MS_NOEXEC)
        if order["overlay"]:
            order["overlay"]["lower"] = idmap.owned_by(order["overlay"]["lower"], int(order["uid"]))
        _enter(channel)
    furnish(order)  # in the user namespace, whose mounts may be changed later
    confine._set_capabilities(_CAPABILITIES)
    cell.hide_self()
    rules = cell.Rules(namespaces=True, root=BOX, scratch=SCRATCH, groups=tuple(order["groups"]))
    BoxLoop(channel, channel, rules, f"{BOX}{SCRATCH}").serve()


if __name__ == "__main__":
    main()
