"""Starts nurseries in bubblewrap: which files, namespaces and ids the sandbox has. docs/sandboxes.md: what each layer stops.

Two ways to an unprivileged owner of the candidate's processes:
- Started by an ordinary user, bubblewrap makes a user namespace; the processes belong to that user, confined.
- Started by root (containers, this machine's administrator), bubblewrap works without a user namespace; the nursery then
  enters one whose only id is mapped to a high, otherwise unused uid of the host, one per sandbox. Without that the
  candidate would count as root and no limit on processes would hold.
"""

from __future__ import annotations

import compileall
import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from shared import namespaces
from shared.problems import values
from shared.sandbox import SandboxUnavailable, inside, meter
from shared.sandbox.inside import confine, nursery
from shared.sandbox.slot import START_S, Nursery

# Above every range that distributions and container engines hand out, below the sign bit.
FIRST_UID = 0x70000000
_HOME = "/etude"  # the harness inside the sandbox; its tree mirrors the project's
INSIDE = f"{_HOME}/shared/sandbox/inside"
# Parts of the standard library that carry other people's code (pip's wheels) or serve nobody here.
_LEFT_OUT = ("site-packages", "dist-packages", "ensurepip", "test", "idlelib", "turtledemo", "lib2to3", "tkinter")
WAY_OUT = (
    "install bubblewrap (Debian, Ubuntu: apt install bubblewrap; Fedora: dnf install bubblewrap) and allow user namespaces "
    "(sysctl kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu); in a container see docs/sandboxes.md, In containers "
    "(seccomp=infra/docker/seccomp-worker.json, apparmor=unconfined, systempaths=unconfined); on Windows use WSL2. "
    "For code that you trust only: ETUDE_SANDBOX=process"
)


def refused(what: str, said: str) -> SandboxUnavailable:
    """Return the error for a sandbox that did not start. `said`: by bubblewrap or the loop; it often shows what is missing."""
    found = namespaces.hint(said)
    return SandboxUnavailable(f"{what}: {said}; {f'{found}; ' if found else ''}{WAY_OUT}")


def require_linux() -> None:
    if sys.platform != "linux" or confine.MACHINE not in ("x86_64", "aarch64"):
        raise SandboxUnavailable(
            f"sandboxes need Linux on x86_64 or aarch64, this is {sys.platform} on {confine.MACHINE}; "
            "use Docker, or WSL2 on Windows"
        )


@functools.cache
def program() -> str:
    require_linux()
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxUnavailable(f"bwrap is not on the PATH; {WAY_OUT}")
    return path


def interpreter() -> Path:
    """The real interpreter behind a virtual environment."""
    return Path(os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable))


@functools.cache
def shared_libraries(files: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths of every shared library that the files load, as the loader will look for them."""
    out = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    found: dict[str, None] = {}
    for line in out.splitlines():
        words = line.split()
        if "=>" in words and len(words) > words.index("=>") + 1:
            words = words[words.index("=>") + 1 :]
        if words and words[0].startswith("/") and not words[0].endswith(":"):
            found[words[0]] = None
    return tuple(found)


@functools.cache
def runtime() -> tuple[str, ...]:
    """bubblewrap arguments that mount the interpreter, its standard library and their shared libraries, nothing else."""
    binary, stdlib = interpreter(), Path(sysconfig.get_path("stdlib"))
    dynload = sorted(str(path) for path in (stdlib / "lib-dynload").glob("*.so"))
    binds = [(path, path) for path in (str(stdlib), str(binary), *shared_libraries((str(binary), *dynload)))]
    binds += [(str(Path(values.__file__)), f"{_HOME}/shared/problems/values.py")]
    binds += [(str(Path(inside.__file__).parent), INSIDE)]
    parents = {parent for _, target in binds for parent in Path(target).parents} | {Path("/dev")}
    arguments = []
    for parent in sorted(parents - {Path("/")}):  # left to itself, bubblewrap makes some of them for root only
        arguments += ["--perms", "0755", "--dir", str(parent)]
    for source, target in binds:
        arguments += ["--ro-bind", source, target]
    for name in _LEFT_OUT:
        if (stdlib / name).is_dir():
            arguments += ["--tmpfs", str(stdlib / name), "--remount-ro", str(stdlib / name)]
    for device in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
        arguments += ["--dev-bind", device, device]
    return tuple(arguments)


def compiled(folder: Path) -> None:
    """Write our modules of the sandbox and their bytecode into a folder: an installation that keeps no bytecode would have every
    first process compile them. Raises OSError."""
    shutil.copytree(Path(inside.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(str(folder), quiet=2, stripdir=str(folder), prependdir=INSIDE)


ENVIRONMENT = {
    "PYTHONPATH": _HOME,
    "USER": "agent",  # the user has no entry in a list of users there
    "LOGNAME": "agent",
    "HOME": "/",
    "PYTHONHASHSEED": "0",  # the order of sets of strings is the same for every grader
    "PYTHONDONTWRITEBYTECODE": "1",
    "LD_BIND_NOW": "1",  # lazy binding would be repeated by every child
    "LANG": "C.UTF-8",
    "TZ": "UTC",
}
PYTHON_FLAGS = ("-s", "-S", "-P", "-X", "utf8")


def start(number: int) -> Nursery:
    """One nursery in its own sandbox, ready. `number` tells the sandboxes of one process apart (their uids)."""
    as_root = os.geteuid() == 0
    arguments = [program(), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if not as_root:
        arguments += ["--unshare-user", "--uid", str(nursery.UID), "--gid", str(nursery.UID)]
    arguments += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--as-pid-1"]
    arguments += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]  # within the namespace, for the nursery alone
    if as_root:
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    arguments += [*runtime(), "--remount-ro", "/", "--chdir", "/", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    info_read, info_write = os.pipe()
    log = tempfile.TemporaryFile()  # noqa: SIM115 closed by Nursery.kill
    try:
        arguments += ["--info-fd", str(info_write), str(interpreter()), *PYTHON_FLAGS]
        arguments += ["-m", nursery.__name__, "root" if as_root else "user", str(theirs.fileno())]
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(theirs.fileno(), info_write),
            env={},
            close_fds=True,
        )
    finally:
        theirs.close()
        os.close(info_write)
    started = Nursery(process, control, log)
    try:
        with os.fdopen(info_read, "rb") as info:
            text = info.read()
        pid = int(json.loads(text)["child-pid"]) if text else 0
        if pid:
            with contextlib.suppress(OSError):  # the first to go when memory runs out, not the trainer
                Path(f"/proc/{pid}/oom_score_adj").write_text("800")
        control.settimeout(START_S)
        if as_root and started.expect(b"map"):
            uid = FIRST_UID + ((os.getpid() << 6 | number & 63) & 0x0FFFFFFF)
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{pid}/{name}").write_text(f"{nursery.UID} {uid} 1")
            control.send(b"+")
        started.expect(b"ready")
        started.meter = meter.of(pid)
    except (OSError, ValueError, KeyError) as error:
        reason = started.last_words()
        started.kill()
        raise refused("bubblewrap did not start", reason or repr(error)) from None
    return started


@functools.cache
def standard_module_paths(top: str) -> tuple[str, ...]:
    """Files of the standard library that hold a top-level module: mounted over in runs that forbid it."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    if not top.isidentifier() or top not in sys.stdlib_module_names:
        return ()
    paths = [stdlib / top, stdlib / f"{top}.py", *sorted((stdlib / "__pycache__").glob(f"{top}.*"))]
    for name in (top, f"_{top}"):
        paths += sorted((stdlib / "lib-dynload").glob(f"{name}.*"))
    return tuple(str(path) for path in paths if path.exists())
