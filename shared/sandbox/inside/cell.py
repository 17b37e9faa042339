"""A cell: a process tree of its own inside the sandbox, for one session, program or transfer.

Its first process, the keeper, belongs to the loop: it starts the program, reaps orphans, and ends when the program ends; then
the kernel ends all others of its PID namespace. Where namespaces are not allowed (a container without CAP_SYS_ADMIN) the
keeper adopts orphans and kills them itself, and the loop kills what outlives a keeper.

Invariants:
- The keeper has closed every descriptor of the loop and is not dumpable: nothing inside reads its memory or its descriptors.
- No foreign code runs before the keeper has no capability, no way to gain one, and the system call filter.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
from collections.abc import Callable, Sequence
from typing import Any

from shared.sandbox.inside import confine, tree

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER = 4, 38, 22, 36
MNT_DETACH = 2
_OPEN_FILES = 4096  # a process
_NOTE = 4000  # bytes


class Rules:
    """How cells are made. `root`: the root that a cell sees; empty: the loop's own. `scratch`: the loop's files, as a cell sees
    them, which a cell may only read. `groups`: descriptors of cgroup.procs files. `processes`, `file_bytes`: limits; 0: none."""

    def __init__(self, namespaces: bool, root: str = "", scratch: str = "", groups: Sequence[int] = ()) -> None:
        self.namespaces, self.root, self.scratch, self.groups = namespaces, root, scratch, groups
        self.processes = self.file_bytes = 0


def hide_self() -> None:
    """Make this process's memory and descriptors unreadable to others of its user."""
    confine._check(confine._libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "hide memory")


def adopt() -> None:
    """Become the parent of orphans below this process."""
    confine._check(confine._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "adopt orphans")


def namespaces_allowed() -> bool:
    """Try to make a PID namespace and a mount namespace."""
    try:
        pid = confine.fork_into_namespaces(confine.CLONE_NEWPID | confine.CLONE_NEWNS)
    except confine.Unconfinable:
        return False
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True


def start(rules: Rules, fds: dict[int, int], note: int, body: Callable[[], Any]) -> int:
    """Fork a cell whose program is `body` (it executes a program, or returns an exit code). Return the keeper's pid. `fds`:
    number inside -> number here; all others are closed. `note`: a pipe's end that gets the reason where the cell cannot be
    made; executing a program closes it."""
    flags = confine.CLONE_NEWPID | confine.CLONE_NEWNS if rules.namespaces else 0
    pid = confine.fork_into_namespaces(flags) if flags else os.fork()
    if pid:
        return pid
    code = 125
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        note = _keep_only(rules, fds, note)
        confine_self(rules)
        code = _keep(rules, fds, note, body)
    except BaseException as error:
        os.write(note, f"{type(error).__name__}: {error}".encode(errors="replace")[:_NOTE])
    finally:
        os._exit(code)


def _keep_only(rules: Rules, fds: dict[int, int], note: int) -> int:
    """Move the wanted descriptors to their numbers, join the cgroups, close all others. Return the note's number."""
    for group in rules.groups:
        os.write(group, b"0")
    top = max(fds, default=2) + 1
    above = max((*fds, *fds.values(), note, top)) + 1
    safe = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, above) for number, fd in fds.items()}
    kept = fcntl.fcntl(note, fcntl.F_DUPFD, above)
    for number, fd in safe.items():
        os.dup2(fd, number)
    os.dup2(kept, top)
    os.closerange(top + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    for number in range(top):
        if number not in fds:
            with contextlib.suppress(OSError):
                os.close(number)
    os.set_inheritable(top, False)
    return top


def confine_self(rules: Rules) -> None:
    """Irrevocable. Raises confine.Unconfinable, OSError."""
    os.setsid()
    os.umask(0o022)
    if rules.namespaces:
        _own_view(rules)
    else:
        adopt()
    limit(rules.processes, rules.file_bytes)
    confine._check(confine._libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    confine._set_capabilities(0)
    _filter()
    if rules.namespaces:  # the files in /proc of a hidden process are root's; no other cell sees this one
        confine._check(confine._libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "show itself")
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, cells go before the loop and the host
    hide_self()


def _own_view(rules: Rules) -> None:
    root = os.fsencode(rules.root)
    private = confine._MS_REC | confine._MS_PRIVATE
    confine._check(confine._libc.mount(None, b"/", None, private, None), "make mounts private")
    flags = confine._MS_NOSUID | confine._MS_NODEV | 8  # MS_NOEXEC
    confine._check(confine._libc.mount(b"proc", root + b"/proc", b"proc", flags, None), "mount /proc")
    if rules.root:
        _move_into(rules.root)
    if rules.scratch:
        flags = (
            confine._MS_BIND | 32 | confine._MS_RDONLY | confine._MS_NOSUID | confine._MS_NODEV | 8
        )  # 32: MS_REMOUNT
        confine._check(confine._libc.mount(None, os.fsencode(rules.scratch), None, flags, None), "protect scratch")
    os.chdir("/")


def _move_into(root: str) -> None:
    """Make a mounted folder the root, and let go of the old one: no path leads back."""
    os.chdir(root)
    here = ctypes.create_string_buffer(b".")
    at = ctypes.addressof(here)
    number = confine._CALLS[confine.MACHINE]["pivot_root"]
    confine._check(confine._libc.syscall(number, at, at, 0, 0, 0), "pivot_root")
    confine._check(confine._libc.umount2(b".", MNT_DETACH), "unmount the old root")
    os.chdir("/")


def limit(processes: int, file_bytes: int, pid: int = 0) -> None:
    """0: no limit of ours, and this process."""
    for what, most in (
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        if most or what in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK):
            hard = resource.prlimit(pid, what)[1]
            least = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.prlimit(pid, what, (least, least))


def _filter() -> None:
    text = confine.COMMANDS_FILTER
    if not text:
        raise confine.Unconfinable(f"no system call filter for {confine.MACHINE}; known: x86_64, aarch64")
    program = ctypes.create_string_buffer(text, len(text))
    head = ctypes.create_string_buffer(confine.struct.pack("HxxxxxxP", len(text) // 8, ctypes.addressof(program)))
    confine._check(confine._libc.prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(head), 0, 0), "seccomp filter")


def _keep(rules: Rules, fds: dict[int, int], note: int, body: Callable[[], Any]) -> int:
    """Run the program and wait for its end. Return its exit code as a shell would give it."""
    pid = os.fork()
    if pid == 0:
        code = 127
        try:
            code = int(body() or 0)
        except BaseException as error:
            os.write(note, f"{type(error).__name__}: {error}".encode(errors="replace")[:_NOTE])
        finally:
            os._exit(code)
    os.closerange(0, note + 1)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            break
    if not rules.namespaces:
        tree.end_all(os.getpid(), _reap)
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
