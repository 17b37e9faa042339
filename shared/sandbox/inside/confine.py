"""What a child of the nursery takes from itself before it runs foreign code: rlimits, capabilities, system calls.

Linux on x86_64 and aarch64, by ctypes: there is no library in the sandbox.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Mapping, Sequence

from shared.sandbox.inside.needed_calls import NEEDED

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
_NEW_ANYTHING = 0x7E020080  # every CLONE_NEW… flag that clone() takes
_SIGCHLD = 17
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 8, 38, 22
_CAP_SYS_ADMIN = 21

# System calls that are refused with EPERM, or looked at, by architecture; from 403 on all architectures share the numbers.
_CALLS: dict[str, dict[str, int]] = {
    "x86_64": {
        **{"socket": 41, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "ptrace": 101},
        **{"process_vm_readv": 310, "process_vm_writev": 311, "mount": 165, "umount2": 166, "pivot_root": 155},
        **{"chroot": 161, "unshare": 272, "setns": 308, "open_by_handle_at": 304, "add_key": 248, "request_key": 249},
        **{"keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "clone": 56, "fcntl": 72},
        **{"socketpair": 53, "syslog": 103, "flock": 73, "inotify_init1": 294, "inotify_init": 253},
    },
    "aarch64": {
        **{"socket": 198, "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "ptrace": 117},
        **{"process_vm_readv": 270, "process_vm_writev": 271, "mount": 40, "umount2": 39, "pivot_root": 41},
        **{"chroot": 51, "unshare": 97, "setns": 268, "open_by_handle_at": 265, "add_key": 217, "request_key": 218},
        **{"keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "clone": 220, "fcntl": 25},
        **{"socketpair": 199, "syslog": 116, "flock": 32, "inotify_init1": 26},
    },
}
_SHARED_CALLS = {
    **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429},
    **{"fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "clone3": 435},
}
# Calls that say which pages of a file the machine holds in memory: all sandboxes of a machine share them, so one could leave a
# mark for the next. They fail with ENOSYS, which the C library takes for a kernel without them: `os.preadv` then uses preadv.
_PAGE_CALLS: dict[
    str, tuple[int, ...]
] = {  # preadv2, pwritev2, io_setup and io_submit (RWF_NOWAIT), mincore, cachestat
    "x86_64": (327, 328, 206, 209, 27, 451),
    "aarch64": (286, 287, 0, 2, 232, 451),
}
_F_SETLEASE = 1024
_LOCKS = (5, 6, 7, 36, 37, 38)  # F_GETLK, F_SETLK, F_SETLKW, and F_OFD_… of the three
_AF_UNIX, _NO_STREAM = 1, 0xE  # bits of a socket's type, none of which SOCK_STREAM (1) has
_OBJECT_CALLS = ("shmget", "semget", "msgget", "mq_open")
# What two sandboxes can signal to each other by: the interpreter's files are the same for all.
_SIGNAL_CALLS = ("flock", "inotify_init", "inotify_init1")
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

MACHINE = os.uname().machine
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


_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _GIVE = 0x20, 0x15, 0x35, 0x45, 0x06
Line = tuple[
    int, int, int, int
]  # code, jump if true, jump if false, operand; jumps count instructions after the next one


def filter_program(machine: str, *, families: Sequence[int] = (), shared_objects: bool = False) -> bytes:
    """Classic BPF. A function run has the calls of needed_calls.py alone. Commands (`shared_objects`) have every call but those of
    the tables above: namespaces, mounts, tracing, kernel interfaces with a history of holes, the kernel's log.

    Both have sockets of `families` alone, pairs of sockets of AF_UNIX alone, and no leases: the host's owner of the interpreter's
    files owns them in the sandbox, too, and a lease keeps everybody else from opening a file. In a function run pairs are streams,
    because others send to anybody by name, and files cannot be locked. Memory, semaphores and queues that would outlive the run
    are for commands, where they end with the sandbox."""
    calls = {**_CALLS[machine], **_SHARED_CALLS}
    clone, clone3, socket, fcntl, pair = (
        calls.pop(name) for name in ("clone", "clone3", "socket", "fcntl", "socketpair")
    )
    commands = (_F_SETLEASE,) if shared_objects else (_F_SETLEASE, *_LOCKS)
    spared = (*_OBJECT_CALLS, *_SIGNAL_CALLS) if shared_objects else ()
    denied = sorted(number for name, number in calls.items() if name not in spared)
    program: list[Line] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _AUDIT_ARCH[machine]), (_GIVE, 0, 0, _KILL)]
    program += [(_LOAD, 0, 0, 0)]
    program += [(_ABOVE, 0, 1, _X32), (_GIVE, 0, 0, _EPERM)] if machine == "x86_64" else []
    # The flags of clone3 are in memory; the C library falls back to clone.
    program += [(_EQUAL, 0, 1, clone3), (_GIVE, 0, 0, _ENOSYS)]
    program += [(_EQUAL, 0, len(families) + 3, socket), (_LOAD, 0, 0, 16)]
    program += [(_EQUAL, len(families) - at, 0, family) for at, family in enumerate(families)]
    program += [(_GIVE, 0, 0, _EPERM), (_GIVE, 0, 0, _ALLOW)]
    program += [(_EQUAL, 0, len(commands) + 3, fcntl), (_LOAD, 0, 0, 24)]
    program += [(_EQUAL, len(commands) - at, 0, command) for at, command in enumerate(commands)]
    program += [(_GIVE, 0, 0, _ALLOW), (_GIVE, 0, 0, _EPERM)]
    streams = [] if shared_objects else [(_LOAD, 0, 0, 24), (_ANY_BIT, 0, 1, _NO_STREAM), (_GIVE, 0, 0, _EPERM)]
    program += [(_EQUAL, 0, len(streams) + 4, pair), (_LOAD, 0, 0, 16), (_EQUAL, 1, 0, _AF_UNIX), (_GIVE, 0, 0, _EPERM)]
    program += [*streams, (_GIVE, 0, 0, _ALLOW)]
    program += [(_EQUAL, 0, 4, clone), (_LOAD, 0, 0, 16), (_ANY_BIT, 1, 0, _NEW_ANYTHING)]
    program += [(_GIVE, 0, 0, _ALLOW), (_GIVE, 0, 0, _EPERM)]
    answers = dict.fromkeys(denied, _EPERM)
    if not shared_objects:
        answers |= dict.fromkeys(NEEDED[machine].values(), _ALLOW)
    answers |= dict.fromkeys(_PAGE_CALLS[machine], _ENOSYS)
    program += _decided(_intervals(answers, _ALLOW if shared_objects else _ENOSYS))
    return b"".join(struct.pack("HBBI", *line) for line in program)


def _intervals(answers: Mapping[int, int], other: int) -> list[tuple[int, int]]:
    """Return (first number, answer) for each stretch of system calls with one answer, ascending from 0."""
    found = [(0, answers.get(0, other))]
    for number in sorted({*answers, *(number + 1 for number in answers)}):
        answer = answers.get(number, other)
        if answer != found[-1][1]:
            found.append((number, answer))
    return found


def _decided(intervals: Sequence[tuple[int, int]]) -> list[Line]:
    """Search the number in halves: a line of comparisons would cost each system call as many steps as it is long."""
    if len(intervals) == 1:
        return [(_GIVE, 0, 0, intervals[0][1])]
    middle = len(intervals) // 2
    below, above = _decided(intervals[:middle]), _decided(intervals[middle:])
    return [(_ABOVE, len(below), 0, intervals[middle][0]), *below, *above]


FILTER = filter_program(MACHINE) if MACHINE in _CALLS else b""
# Commands have a network namespace and an IPC namespace of their own: local servers and databases may run. AF_UNIX, AF_INET,
# AF_INET6, AF_NETLINK; others (AF_VSOCK, AF_ALG) know no namespace.
COMMANDS_FAMILIES = (1, 2, 10, 16)
COMMANDS_FILTER = filter_program(MACHINE, families=COMMANDS_FAMILIES, shared_objects=True) if MACHINE in _CALLS else b""
