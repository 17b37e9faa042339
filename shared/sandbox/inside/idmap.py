"""Show a folder of the real root as one that another user owns, without changing a file (idmapped mounts, Linux 5.12)."""

from __future__ import annotations

import ctypes
import os
import struct

from shared.sandbox.inside import confine

_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _MOUNT_ATTR_IDMAP = 1, 4, 0x00100000


def owned_by(folder: str, uid: int) -> str:
    """Mount a folder over itself so that root's files are the user's. Return the folder. Raises confine.Unconfinable, OSError."""
    holder, hold = _namespace(uid)
    try:
        namespace = os.open(f"/proc/{holder}/ns/user", os.O_RDONLY)
        call = confine._libc.syscall
        path = ctypes.create_string_buffer(os.fsencode(folder))
        empty = ctypes.create_string_buffer(b"")
        attributes = ctypes.create_string_buffer(struct.pack("QQQQ", _MOUNT_ATTR_IDMAP, 0, 0, namespace), 32)
        tree = confine._check(
            call(428, _AT_FDCWD, ctypes.addressof(path), _OPEN_TREE_CLONE | os.O_CLOEXEC, 0, 0), "open_tree"
        )
        # mount_setattr(fd, "", AT_EMPTY_PATH, attributes, size)
        result = call(442, tree, ctypes.addressof(empty), _AT_EMPTY_PATH, ctypes.addressof(attributes), 32)
        confine._check(result, f"show {folder} as another user's")
        moved = call(429, tree, ctypes.addressof(empty), _AT_FDCWD, ctypes.addressof(path), _MOVE_MOUNT_F_EMPTY_PATH)
        confine._check(moved, f"mount {folder} over itself")
        os.close(tree)
        os.close(namespace)
        return folder
    finally:
        os.close(hold)
        os.waitpid(holder, 0)


def _namespace(uid: int) -> tuple[int, int]:
    """Fork a process in a user namespace that maps the user onto root. Return its pid, and the pipe's end that ends it."""
    ready_read, ready_write = os.pipe()
    hold_read, hold_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(hold_write)
            confine._check(confine._libc.unshare(confine.CLONE_NEWUSER), "unshare user namespace")
            os.write(ready_write, b"+")
            os.read(hold_read, 1)
        finally:
            os._exit(0)
    os.close(ready_write)
    os.close(hold_read)
    try:
        if os.read(ready_read, 1) != b"+":
            raise confine.Unconfinable("no user namespace for the base's files")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(f"0 {uid} 1")
    except BaseException:
        os.close(hold_write)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(ready_read)
    return pid, hold_write
