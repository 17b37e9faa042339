"""Attacks on sandboxes as data, the world they are made in, and what can be seen of a sandbox from outside.

An attack is a script and a predicate of what came of it. It first has to succeed in the naive sandbox. Its text names its targets
as `@target@`, because shell, Python and format strings all use braces: see `World.targets`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shared.sandbox import SandboxUnavailable, open_sandboxes
from shared.sandbox.contract import Base, CommandResult, Limits, Sandbox, Sandboxes, Session
from tests.contract.sandboxes import AGENTS, NO_BWRAP, OfAgents
from tests.integration.naive_sandbox import NaiveSandboxes
from tests.patience import until

HOLE = b"HOLE"
ROOT = os.geteuid() == 0
LIMITS = Limits(memory_mb=256, disk_mb=64, processes=64, seconds=600.0, output_bytes=1 << 18)
TIME_S = 20.0
GRADER = "/opt/grader"

# System call numbers of x86_64. `call` prints what it gave; `refused` says whether the kernel or a filter forbade it as such: any
# other error means that the arguments were looked at, so that an attack can be tried with harmless ones.
PRELUDE = """
import ctypes, errno, os, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *arguments):
    ctypes.set_errno(0)
    given = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *given)
    return result if result >= 0 else -ctypes.get_errno()
def refused(result):
    return -result in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ESRCH)
def hole(*what):
    print('HOLE', *what, flush=True)
def processes():
    return [int(name) for name in os.listdir('/proc') if name.isdigit() and int(name) != os.getpid()]
def slurp(path, most=1 << 20):
    try:
        with open(path, 'rb') as file:
            return file.read(most)
    except OSError:
        return b''
def descriptors(process):
    try:
        return ['/proc/%d/fd/%s' % (process, name) for name in os.listdir('/proc/%d/fd' % process)]
    except OSError:
        return []
def victim():
    return next((p for p in processes() if b'@victim@' in slurp('/proc/%d/cmdline' % p).split(b'\\0')), 0)
"""


# As services open them. The contract's tests keep no machine warm; attacks and deaths must leave none of those either.
# What holds an attack in a pod is the cluster's. The pods of tests/cluster.py are none: attacks on them would show nothing.
ADAPTERS = {
    **{name: one for name, one in AGENTS.items() if name != "kubernetes"},
    "bubblewrap": OfAgents(lambda state: open_sandboxes("bubblewrap", state), NO_BWRAP),
}


def adapters() -> list[Any]:
    """As parameters of a fixture."""
    return [
        pytest.param(name, marks=pytest.mark.skipif(bool(one.missing), reason=one.missing))
        for name, one in ADAPTERS.items()
    ]


@dataclass
class World:
    """A host with secrets and listeners, and two sandboxes on it: `mine` is the attacker's.

    `secret` never stands in the text of an attack: where it is in the output, the attacker has read it.
    """

    name: str
    make: Callable[[], Sandboxes]
    folder: Path  # everyone may read it: only the sandbox keeps the attacker out
    runner: asyncio.Runner
    secret: str = field(default_factory=lambda: "secret-" + os.urandom(12).hex())
    token: str = field(default_factory=lambda: str(int.from_bytes(os.urandom(4), "big") % 900_000_000 + 100_000_000))
    targets: dict[str, str] = field(default_factory=dict)
    descriptors: list[int] = field(default_factory=list)
    listeners: list[socket.socket] = field(default_factory=list)
    sandboxes: Sandboxes = field(init=False)
    mine: Sandbox = field(init=False)
    other: Sandbox = field(init=False)

    @property
    def naive(self) -> bool:
        return self.name == "naive"

    @property
    def grader(self) -> Path:
        return self.folder / "grader"

    def set_up(self) -> None:
        self.folder.chmod(0o755)
        (self.folder / "secret").write_text(self.secret)
        self.grader.mkdir()
        (self.grader / "tests.py").write_text("the tests\n")
        self._listen()
        self._leave_descriptors()
        os.environ["ETUDE_S3_SECRET_KEY"] = self.secret
        self.targets |= {
            "token": self.token,
            "victim": f"1{self.token}",
            "mark": f"2{self.token}",
            "worker": str(os.getpid()),
            "folder": str(self.folder),
            "grader": str(self.grader) if self.naive else GRADER,
            "loop": "$$" if self.naive else "1",
            "loop_to_limit": "os.getppid()" if self.naive else "1",
            "loop_pid": str(os.getpid()) if self.naive else "1",
        }
        self.sandboxes = self.make()
        self.runner.run(self._open())

    def _listen(self) -> None:
        for family, address in ((socket.AF_INET, ("0.0.0.0", 0)), (socket.AF_INET6, ("::1", 0))):
            with contextlib.suppress(OSError):
                listener = socket.socket(family)
                self.listeners.append(listener)
                listener.bind(address)
                listener.listen(64)
                self.targets["port" if family == socket.AF_INET else "port6"] = str(listener.getsockname()[1])
        for name in (f"\0etude-{self.token}", str(self.folder / "docker.sock")):
            listener = socket.socket(socket.AF_UNIX)
            self.listeners.append(listener)
            listener.bind(name)
            listener.listen(64)
        (self.folder / "docker.sock").chmod(0o777)

    def _leave_descriptors(self) -> None:
        """What a careless worker hands on to its children: a file, and its terminal."""
        self.descriptors += [os.open(self.folder / "secret", os.O_RDONLY), *pty.openpty()]
        for descriptor in self.descriptors:
            os.set_inheritable(descriptor, True)

    async def _open(self) -> None:
        self.mine, self.other = await self.opened(), await self.opened()

    async def renew(self) -> None:
        """Open another sandbox where an attack has ended the attacker's."""
        with contextlib.suppress(SandboxUnavailable):
            await self.mine.close()
        self.mine = await self.opened()

    async def opened(self) -> Sandbox:
        mounts = () if self.naive else ((self.grader, GRADER),)
        return await self.sandboxes.open(Base(mounts=mounts), LIMITS)

    def text(self, script: str) -> str:
        for name, value in self.targets.items():
            script = script.replace(f"@{name}@", value)
        return script

    def end_left(self) -> None:
        """End what an attack in the naive sandbox has left."""
        end_marked(self.token)

    def tear_down(self) -> None:
        try:
            if hasattr(self, "sandboxes"):
                self.runner.run(self.sandboxes.close())
        finally:
            os.environ.pop("ETUDE_S3_SECRET_KEY", None)
            for descriptor in self.descriptors:
                os.close(descriptor)
            for listener in self.listeners:
                listener.close()
            end_marked(self.token)


@contextlib.contextmanager
def world_of(name: str, make: Callable[[], Sandboxes] | None = None) -> Iterator[World]:
    """`make`: None: the adapter of that name."""
    place = Path(tempfile.mkdtemp(prefix="etude-attacks-"))
    before, tempfile.tempdir = (
        tempfile.tempdir,
        str(place),
    )  # where the naive sandboxes and the adapters put their folders
    with asyncio.Runner() as runner:
        adapter = NaiveSandboxes if name == "naive" else lambda: ADAPTERS[name].make(place / "state")
        world = World(name, make or adapter, place, runner)
        try:
            world.set_up()
            yield world
        finally:
            world.tear_down()
            tempfile.tempdir = before
            shutil.rmtree(place, ignore_errors=True)


def said_hole(world: World, output: bytes) -> bool:
    return any(line.startswith(HOLE) for line in output.splitlines())


def told_secret(world: World, output: bytes) -> bool:
    return world.secret.encode() in output


@dataclass(frozen=True, slots=True)
class Attack:
    """`then`: a script that looks in the other sandbox afterwards. `control`: the script for the naive sandbox; empty: the same.
    `victim`: a program has to be there that must stay as it is, in the sandbox `mine` or `other`. `able`: whether this host can
    show the hole at all."""

    name: str
    script: str
    python: bool = False
    then: str = ""
    control: str = ""
    victim: str = ""
    succeeded: Callable[[World, bytes], bool] = said_hole
    able: bool = True

    def text(self, world: World) -> str:
        script = self.control if world.naive and self.control else self.script
        return world.text(python(script) if self.python else script)


def named(attacks: Sequence[Attack]) -> pytest.MarkDecorator:
    """Return the mark that runs a test once for each attack, under its name."""
    return pytest.mark.parametrize("attack", attacks, ids=[attack.name.replace(" ", "-") for attack in attacks])


def python(script: str) -> str:
    """Return a shell command that runs Python, with the targets still in it."""
    return f"python3 -ISW ignore - <<'END_OF_PYTHON'\n{PRELUDE}\n{script}\nEND_OF_PYTHON\n"


def attempt(world: World, attack: Attack) -> bool:
    """Return whether the attack succeeded. Afterwards the sandboxes work again."""
    return world.runner.run(_attempt(world, attack))


async def _attempt(world: World, attack: Attack) -> bool:
    victim = None
    if attack.victim:
        argv = ["/usr/bin/env", f"VICTIM={world.secret}", "/bin/sleep", world.targets["victim"]]
        victim = await (world.mine if attack.victim == "mine" else world.other).spawn(argv)
        await _until(lambda: bool(marked("/bin/sleep\0" + world.targets["victim"])))  # it is there to be found
    session = await world.mine.session()
    try:
        result = await session.run(attack.text(world), time_s=TIME_S)
        output = result.stdout
        if attack.then:
            output += (await once(world.other, world.text(attack.then))).stdout
        if victim is not None:  # its end is told a moment later
            told = attack.succeeded(world, output)
            await _until(lambda: told or not victim.alive, 10.0 if world.name == "naive" else 0.1)
        return attack.succeeded(world, output) or (victim is not None and not victim.alive)
    finally:
        await session.close()
        if victim is not None:
            await victim.kill()


async def _until(condition: Callable[[], bool], most_s: float = 10.0) -> None:
    """Wait for the condition, `most_s` seconds at most."""
    for _ in range(int(most_s * 50)):
        if condition():
            return
        await asyncio.sleep(0.02)


async def once(sandbox: Sandbox, script: str, time_s: float = TIME_S) -> CommandResult:
    """Run one command in a session of its own."""
    session = await sandbox.session()
    try:
        return await session.run(script, time_s=time_s)
    finally:
        await session.close()


async def works(session: Session) -> bool:
    """Return whether the session runs an honest command rightly."""
    try:
        result = await session.run("printf alive; (exit 7)", time_s=TIME_S)
    except SandboxUnavailable:
        return False
    return (result.stdout, result.exit_code) == (b"alive", 7)


def marked(token: str) -> set[int]:
    """Return the processes of this machine with the token in their arguments, those of sandboxes included."""
    found = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if (
                name.isdigit()
                and int(name) != os.getpid()
                and token.encode() in Path("/proc", name, "cmdline").read_bytes()
            ):
                found.add(int(name))
    return found


def end_marked(token: str) -> None:
    for pid in marked(token):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def of_user(uid: int) -> set[int]:
    """Return the processes of a user of this machine."""
    found = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and Path("/proc", name).stat().st_uid == uid:
                found.add(int(name))
    return found


def user_of(pid: int) -> int:
    """Return the user of a process on this machine, whatever it is called inside."""
    status = Path("/proc", str(pid), "status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1])


def cgroups_of(pid: int) -> set[Path]:
    """Return the folders of the control groups of a process that are not this process's own."""
    theirs, ours = (Path("/proc", who, "cgroup").read_text().splitlines() for who in (str(pid), "self"))
    found = set()
    for line in set(theirs) - set(ours):
        _, kinds, path = line.split(":", 2)
        for root in Path("/sys/fs/cgroup", kinds.split(",")[0]), Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"):
            if (folder := root / path.lstrip("/")).is_dir():
                found.add(folder)
    return found


def mounts_at(place: Path) -> list[str]:
    """Return the mounts of this machine at or below a folder, and those of anything in it."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(place) in line]


def eventually(done: Callable[[], bool], within_s: float = 10.0) -> bool:
    """Return whether it came true in time: the kernel takes a moment to reap."""
    try:
        return until(done, seconds=within_s)
    except TimeoutError:
        return False
