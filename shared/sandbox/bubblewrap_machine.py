"""One running bubblewrap: its namespaces and mounts, its first process, and the channel to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from shared.sandbox import SandboxUnavailable
from shared.sandbox.bubblewrap import ENVIRONMENT, INSIDE, PYTHON_FLAGS, interpreter, program, refused, runtime
from shared.sandbox.channel import Channel
from shared.sandbox.contract import WORKSPACE
from shared.sandbox.inside import box, tree

START_S = 60.0  # a busy machine
_END_S = 10.0
_LAYERS = "/layers"
CODE = "inside"  # our modules of the sandbox: a folder beside that of /etc
# Of the host's configuration: what the loader, `alternatives` and Java need.
_CONFIGURATION = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "java-*", "ssl/certs", "mime.types")
HOME, TMP = "/home/agent", "/tmp"
GATE = "/run/etude-network"  # the folder of the egress proxy's certificates


@dataclass(frozen=True, slots=True)
class Plan:
    """What a machine sees. `lower`: the folder of an image; None: the host's programs. `work`: whether the work directory is a
    folder of its own, not the image's. `mounts`: (path on the host, path inside), read-only. `gate`: whether there is a way to an
    egress proxy."""

    lower: Path | None
    work: bool
    mounts: tuple[tuple[Path, str], ...]
    gate: bool = False

    @property
    def written(self) -> tuple[str, ...]:
        """The folders, below the sandbox's own, that hold all that is written inside."""
        if self.lower is None:
            return ("work", "tmp", "home")
        return ("upper", "work") if self.work else ("upper",)


@dataclass(slots=True)
class Machine:
    """`pid`: the first process, as the host sees it."""

    process: asyncio.subprocess.Process
    pid: int
    channel: Channel
    log: IO[bytes]

    @property
    def alive(self) -> bool:
        return self.process.returncode is None and self.channel.alive

    async def kill(self) -> None:
        """End everything inside. Return when the kernel has ended it. Repeating it does nothing."""
        end(self.process)
        await self.process.wait()
        await self.channel.close()
        await ended(self.pid)
        self.log.close()


def end(process: asyncio.subprocess.Process) -> None:
    """Kill bubblewrap and the first process, which is in its group until both are ready; all others die with the first."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def ended(pid: int) -> None:
    """Wait until a process has ended that is not our child; whoever inherited it may not have waited for it yet."""
    deadline = time.monotonic() + _END_S
    while pid and time.monotonic() < deadline:
        found = tree.look(pid)
        if found is None or found.zombie:
            return
        await asyncio.sleep(0.002)  # the kernel tells nobody but the parent


async def start(plan: Plan, folder: Path, etc: Path, uid: int | None, groups: Sequence[int]) -> Machine:
    """Start a machine over the sandbox's folder. `uid`: of the host, where this process is root. `groups`: descriptors that let the
    loop put cells into cgroups. Raises SandboxUnavailable."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    info_read, info_write = os.pipe()
    log = tempfile.TemporaryFile()  # noqa: SIM115 closed by Machine.kill
    process = None
    channel = None
    try:
        # A new socket has the process's default timeout, and Celery sets that for a while in a thread of its own.
        theirs.setblocking(True)
        ours.setblocking(False)
        arguments = _arguments(plan, folder, etc, uid, theirs.fileno(), groups, info_write)
        process = await _started(arguments, log, (theirs.fileno(), info_write, *groups))
        theirs.close()
        os.close(info_write)
        info_write = -1
        async with asyncio.timeout(START_S):
            pid = await _first_pid(info_read)
            if uid is not None:
                await _map(ours, pid, uid)
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            channel = Channel(reader, writer, lambda: _last_words(log) or "the sandbox has ended")
            await channel.ready
        return Machine(process, pid, channel, log)
    except (OSError, ValueError, KeyError, TimeoutError, SandboxUnavailable) as error:
        why = _last_words(log) or str(error) or repr(error)
        await _give_up(process, channel, ours, log)
        raise refused("bubblewrap did not start", why) from None
    except BaseException:
        await _give_up(process, channel, ours, log)
        raise
    finally:
        theirs.close()
        os.close(info_read)
        if info_write >= 0:
            os.close(info_write)


async def _give_up(
    process: asyncio.subprocess.Process | None, channel: Channel | None, ours: socket.socket, log: IO[bytes]
) -> None:
    if process is not None:
        end(process)
        await process.wait()
    if channel is not None:
        await channel.close()
    ours.close()
    log.close()


async def _started(arguments: list[str], log: IO[bytes], fds: tuple[int, ...]) -> asyncio.subprocess.Process:
    """Start bubblewrap from this thread: it dies with the thread that made it. Raises OSError."""
    null = asyncio.subprocess.DEVNULL
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *arguments, stdin=null, stdout=null, stderr=log, pass_fds=fds, env={}, start_new_session=True
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        end(await starting)
        raise


async def _first_pid(info: int) -> int:
    """Read the first process's pid, which bubblewrap writes before it starts anything."""
    text = b""
    os.set_blocking(info, False)
    while b"}" not in text:
        try:
            part = os.read(info, 4096)
        except BlockingIOError:
            await asyncio.sleep(0.001)
            continue
        if not part:
            raise OSError("bubblewrap ended")
        text += part
    return int(json.loads(text)["child-pid"])


async def _map(ours: socket.socket, pid: int, uid: int) -> None:
    """Map the user of cells to the sandbox's uid when the first process has entered its user namespace."""
    loop = asyncio.get_running_loop()
    if await loop.sock_recv(ours, 3) != b"map":
        raise OSError("the first process ended")
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{name}").write_text(f"{box.UID} {uid} 1")
    await loop.sock_sendall(ours, b"+")


def _last_words(log: IO[bytes]) -> str:
    try:
        log.seek(0)
        return log.read()[-2000:].decode(errors="replace").strip().replace("\n", " | ")
    except ValueError:  # closed
        return ""


def _arguments(
    plan: Plan, folder: Path, etc: Path, uid: int | None, channel: int, groups: Sequence[int], info: int
) -> list[str]:
    arguments = [program(), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    capabilities = ["CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_KILL"]
    # To furnish the root, and for the overlay, which acts with the rights that its mounting had. Given up after that.
    capabilities += ["CAP_DAC_OVERRIDE", "CAP_CHOWN", "CAP_FOWNER", "CAP_FSETID", "CAP_MKNOD"]
    if uid is None:
        arguments += ["--unshare-user", "--uid", str(box.UID), "--gid", str(box.UID)]
    else:
        capabilities += ["CAP_SETUID", "CAP_SETGID"]
    arguments += ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
    for name in capabilities:
        arguments += ["--cap-add", name]
    arguments += [*runtime(), "--ro-bind", str(etc.with_name(CODE)), INSIDE, "--perms", "0755", "--dir", "/proc"]
    if uid is None:
        arguments += ["--proc", "/proc"]
    mounts, order = _root(plan, folder, etc)
    order |= {"mode": "user" if uid is None else "root", "uid": uid, "channel": channel, "groups": list(groups)}
    arguments += [*mounts, "--remount-ro", "/", "--chdir", "/", "--clearenv", "--info-fd", str(info)]
    # Cells can read the first process's arguments, not its environment.
    for name, value in {**ENVIRONMENT, box.ORDER: json.dumps(order)}.items():
        arguments += ["--setenv", name, value]
    return [*arguments, str(interpreter()), *PYTHON_FLAGS, "-m", box.__name__]


def _root(plan: Plan, folder: Path, etc: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the mounts that make what cells see, and the rest of the work for the first process."""
    arguments = ["--perms", "0755", "--dir", box.BOX]
    mounts = [*plan.mounts, *([(folder / "gate", GATE)] if plan.gate else [])]
    if plan.lower is None:
        arguments += [*_host(etc), *_mounted(mounts)]
        for name, inside in (("work", WORKSPACE), ("tmp", TMP), ("home", HOME)):
            arguments += ["--bind", str(folder / name), f"{box.BOX}{inside}"]
        return arguments, {"overlay": None, "binds": []}
    arguments += ["--perms", "0755", "--dir", _LAYERS, "--ro-bind", str(plan.lower), f"{_LAYERS}/lower"]
    arguments += ["--bind", str(folder), f"{_LAYERS}/own"]
    binds: list[tuple[str, str, bool]] = [(f"{_LAYERS}/own/work", WORKSPACE, False)] if plan.work else []
    for number, (source, target) in enumerate(mounts):
        arguments += ["--ro-bind", str(source), f"{_LAYERS}/{number}"]
        binds.append((f"{_LAYERS}/{number}", target, True))
    overlay = {"lower": f"{_LAYERS}/lower", "upper": f"{_LAYERS}/own/upper", "work": f"{_LAYERS}/own/over"}
    folders = [path[1:] for path in (WORKSPACE, TMP, HOME)]
    return arguments, {"overlay": {**overlay, "folders": folders}, "binds": binds}


def _host(etc: Path) -> list[str]:
    """The host's programs, read-only."""
    inside = box.BOX
    arguments = ["--ro-bind", "/usr", f"{inside}/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), f"{inside}{path}"]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), f"{inside}{path}"]
    for name in ("etc", "etc/ssl", "proc", "dev", "home", "run", "var", box.SCRATCH[1:]):
        arguments += ["--perms", "0755", "--dir", f"{inside}/{name}"]
    for pattern in _CONFIGURATION:
        for path in sorted(Path("/etc").glob(pattern)):
            arguments += ["--ro-bind", str(path), f"{inside}{path}"]
    for path in sorted(etc.iterdir()):
        arguments += ["--ro-bind", str(path), f"{inside}/etc/{path.name}"]
    return arguments


def _mounted(mounts: Sequence[tuple[Path, str]]) -> list[str]:
    """Left to itself, bubblewrap makes missing folders above a mount for root alone."""
    arguments: list[str] = []
    made: set[PurePosixPath] = set()
    for source, target in mounts:
        for parent in reversed(PurePosixPath(target).parents):
            if parent not in made and str(parent) not in ("/", "/usr") and not str(parent).startswith("/usr/"):
                arguments += ["--perms", "0755", "--dir", f"{box.BOX}{parent}"]
                made.add(parent)
        arguments += ["--ro-bind", str(source), f"{box.BOX}{target}"]
    return arguments
