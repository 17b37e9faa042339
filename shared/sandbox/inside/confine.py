"""What a child of the nursery takes from itself before it runs foreign code: rlimits, capabilities, system calls.

Linux on x86_64 and aarch64, by ctypes: there is no library in the sandbox.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Sequence

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
_NEW_ANYTHING = 0x7E020080  # every CLONE_NEW… flag that clone() takes
_SIGCHLD = 17
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 8, 38, 22
_CAP_SYS_ADMIN = 21

# System calls by architecture; from 403 on all architectures share the numbers.
_CALLS: dict[str, dict[str, int]] = {
    "x86_64": {
        **{"socket": 41, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "ptrace": 101},
        **{"process_vm_readv": 310, "process_vm_writev": 311, "mount": 165, "umount2": 166, "pivot_root": 155},
        **{"chroot": 161, "unshare": 272, "setns": 308, "open_by_handle_at": 304, "add_key": 248, "request_key": 249},
        **{"keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "clone": 56, "fcntl": 72},
    },
    "aarch64": {
        **{"socket": 198, "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "ptrace": 117},
        **{"process_vm_readv": 270, "process_vm_writev": 271, "mount": 40, "umount2": 39, "pivot_root": 41},
        **{"chroot": 51, "unshare": 97, "setns": 268, "open_by_handle_at": 265, "add_key": 217, "request_key": 218},
        **{"keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "clone": 220, "fcntl": 25},
    },
}
_SHARED_CALLS = {
    **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429},
    **{"fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "clone3": 435},
}
_F_SETLEASE = 1024
_OBJECT_CALLS = ("shmget", "semget", "msgget", "mq_open")
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

MACHINE = platform.machine()
_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: keeps the interpreter lock, as a fork must
if sys.platform == "linux":
    _libc.syscall.argtypes = [ctypes.c_long] * 6
    _libc.syscall.restype = ctypes.c_long
    _libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
    _libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


class Unconfinable(RuntimeError):
    """The kernel refused a layer; the text says which."""


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise Unconfinable(f"{what}: {os.strerror(code)} (errno {code})")
    return result


def fork_into_namespaces(flags: int) -> int:
    """fork(), the child in new namespaces: 0 in the child (PID 1 of its own with CLONE_NEWPID), its pid in the parent."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = _libc.syscall(_CALLS[MACHINE]["clone"], flags | _SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return _check(pid, "clone with new namespaces")


def enter_user_namespace() -> None:
    """Leaves the real root: the outside maps the ids afterwards, then `become` takes them."""
    _check(_libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare user and mount namespace")
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "make mounts private")


def become(uid: int) -> None:
    """Takes uid and gid inside the user namespace and keeps only CAP_SYS_ADMIN in it, to start children."""
    _check(_libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "keep capabilities")
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _set_capabilities(1 << _CAP_SYS_ADMIN)


def _set_capabilities(mask: int) -> None:
    header = struct.pack("Ii", 0x20080522, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = struct.pack("6I", low, low, 0, high, high, 0)
    _check(_libc.capset(header, data), "set capabilities")


def hide(paths: Sequence[str]) -> None:
    """Mounts emptiness over files and directories, in this process's own mount namespace."""
    for path in paths:
        name = os.fsencode(path)
        if os.path.isdir(path):
            _check(
                _libc.mount(b"tmpfs", name, b"tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, b"size=4k,mode=555"),
                f"hide {path}",
            )
        elif os.path.exists(path):
            _check(_libc.mount(b"/dev/null", name, None, _MS_BIND, None), f"hide {path}")


def limit(*, memory: int, processes: int, output: int, cpu_s: int) -> None:
    """Per process: address space, file size and processor seconds; per user: processes."""
    for what, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, output),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_NPROC, processes),
    ):
        hard = resource.getrlimit(what)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (least, least))


def give_up_privileges() -> None:
    """No capability is left and none comes back, then the filter. Irrevocable."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    _set_capabilities(0)
    program = ctypes.create_string_buffer(FILTER, len(FILTER))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(FILTER) // 8, ctypes.addressof(program)))
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(head), 0, 0), "seccomp filter")


def filter_program(machine: str, *, families: Sequence[int] = (), shared_objects: bool = False) -> bytes:
    """Classic BPF that lets every system call pass but those of the tables above: namespaces, mounts, tracing, kernel
    interfaces with a history of holes, sockets but for those of `families`, leases (who owns a file of the interpreter on the
    host is its owner in the sandbox, and a lease keeps everybody else from opening it), and, unless `shared_objects` end with
    the sandbox, memory, semaphores and queues that would outlive the run."""
    allow, eperm, enosys, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    load, equal, above, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    calls = {**_CALLS[machine], **_SHARED_CALLS}
    clone, clone3, socket, fcntl = (calls.pop(name) for name in ("clone", "clone3", "socket", "fcntl"))
    denied = sorted(number for name, number in calls.items() if not (shared_objects and name in _OBJECT_CALLS))
    # (code, jump if true, jump if false, operand); jumps count instructions after the next one
    program: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),
        (equal, 1, 0, _AUDIT_ARCH[machine]),
        (give, 0, 0, kill),
    ]
    program += [(load, 0, 0, 0)]
    program += [(above, 0, 1, _X32), (give, 0, 0, eperm)] if machine == "x86_64" else []
    program += [
        (equal, 0, 1, clone3),
        (give, 0, 0, enosys),
    ]  # its flags are in memory; the C library falls back to clone
    program += [(equal, 0, len(families) + 3, socket), (load, 0, 0, 16)]
    program += [(equal, len(families) - at, 0, family) for at, family in enumerate(families)]
    program += [(give, 0, 0, eperm), (give, 0, 0, allow)]
    program += [(equal, 0, 4, fcntl), (load, 0, 0, 24), (equal, 1, 0, _F_SETLEASE)]
    program += [(give, 0, 0, allow), (give, 0, 0, eperm)]
    for at, number in enumerate(denied):
        program += [(equal, len(denied) - at + 3, 0, number)]  # to the last instruction
    program += [(equal, 0, 2, clone), (load, 0, 0, 16), (any_bit, 1, 0, _NEW_ANYTHING)]
    program += [(give, 0, 0, allow), (give, 0, 0, eperm)]
    return b"".join(struct.pack("HBBI", *line) for line in program)


FILTER = filter_program(MACHINE) if MACHINE in _CALLS else b""
# Commands have a network namespace and an IPC namespace of their own: local servers and databases may run. AF_UNIX, AF_INET,
# AF_INET6, AF_NETLINK; others (AF_VSOCK, AF_ALG) know no namespace.
COMMANDS_FAMILIES = (1, 2, 10, 16)
COMMANDS_FILTER = filter_program(MACHINE, families=COMMANDS_FAMILIES, shared_objects=True) if MACHINE in _CALLS else b""
