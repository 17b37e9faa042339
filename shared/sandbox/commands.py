"""`Sandboxes` by bubblewrap: commands in a machine-like sandbox, for problems of kind `repository`.

Each command is a sandbox of its own over the same work directory: when it ends or is killed at its time limit, the kernel
kills every process that it started, daemons included. Between commands only files remain. The host never opens a path that
the sandbox could have turned into a link: files written and read later go through a command, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import stat
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

from shared.sandbox import CommandResult, Limits, SandboxUnavailable
from shared.sandbox.bubblewrap import FIRST_UID, WAY_OUT, program
from shared.sandbox.inside import confine

WORKSPACE = "/workspace"
_INSIDE_UID = 1000
_FILE_BYTES = 1 << 30  # one file; the work directory as a whole is the disk's business
_TMP_BYTES = 1 << 28  # of each folder in memory that can be written: no limit of a process counts what lies there
_OPEN_FILES = 1024  # a process; what sockets and pipes hold counts for no limit but this
_OWN_PROCESSES = 2  # bubblewrap's, which count as the sandbox's
_CHUNK = 1 << 16
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_numbers = itertools.count()

# Limits from inside: root in a container may not set them on others. `-u` in bash, `-p` in dash and busybox.
_LAUNCHER = (
    'ulimit -c 0 && ulimit -v "$1" && { ulimit -u "$2" 2>/dev/null || ulimit -p "$2"; } && ulimit -f "$3" || exit 125; '
    'ulimit -n "$4" 2>/dev/null; echo 800 2>/dev/null >/proc/self/oom_score_adj; shift 4; exec "$@"'
)

_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "HOME": WORKSPACE,
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "PIP_PROGRESS_BAR": "off",
    "TQDM_DISABLE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def _system() -> list[str]:
    """The host's programs, read-only, and nothing of its configuration but what the loader and `alternatives` need."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    for path in (Path("/etc/ld.so.cache"), Path("/etc/alternatives")):
        if path.exists():
            arguments += ["--ro-bind", str(path), str(path)]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    for folder in ("/tmp", "/dev/shm"):
        arguments += ["--size", str(_TMP_BYTES), "--tmpfs", folder]
    return arguments


class BubblewrapSandbox:
    """See shared.sandbox.Sandbox. Paths are relative to the work directory; commands may run at the same time."""

    def __init__(self, folder: Path, uid: int | None, limits: Limits) -> None:
        self._folder, self._uid, self._limits = folder, uid, limits

    async def exec(self, argv: Sequence[str], *, time_s: float, stdin: bytes = b"") -> CommandResult:
        return await self._exec(argv, time_s, stdin, self._limits.output_bytes)

    async def write(self, path: str, data: bytes) -> None:
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
        result = await self._exec(["/bin/sh", "-c", script, "sh", _inside(path)], 60.0, data, 4096)
        if result.exit_code != 0:
            raise OSError(f"sandbox: cannot write {path!r}: {result.stderr.decode(errors='replace').strip()}")

    async def read(self, path: str, limit: int) -> bytes:
        """At most the first `limit` bytes."""
        result = await self._exec(["/usr/bin/head", "-c", str(limit), "--", _inside(path)], 60.0, b"", limit)
        if result.exit_code != 0:
            raise FileNotFoundError(f"sandbox: cannot read {path!r}: {result.stderr.decode(errors='replace').strip()}")
        return result.stdout

    async def close(self) -> None:
        await asyncio.to_thread(_remove, self._folder)

    async def _exec(self, argv: Sequence[str], time_s: float, stdin: bytes, output_bytes: int) -> CommandResult:
        started = time.monotonic()
        arguments = [program(), "--unshare-all", "--uid", str(_INSIDE_UID), "--gid", str(_INSIDE_UID)]
        arguments += ["--hostname", "sandbox", "--die-with-parent", "--cap-drop", "ALL", *_system()]
        arguments += ["--bind", str(self._folder), WORKSPACE, "--chdir", WORKSPACE, "--remount-ro", "/", "--clearenv"]
        for name, value in _ENVIRONMENT.items():
            arguments += ["--setenv", name, value]
        kilobytes, processes = self._limits.memory_mb << 10, self._limits.processes + _OWN_PROCESSES
        limits = (kilobytes, processes, _FILE_BYTES >> 9, _OPEN_FILES)
        arguments += ["/bin/sh", "-c", _LAUNCHER, "sh", *map(str, limits), *argv]
        identity = {} if self._uid is None else {"user": self._uid, "group": self._uid, "extra_groups": []}
        with _filter() as filter_file:
            try:
                process = await _started(
                    *(arguments[0], "--seccomp", str(filter_file.fileno()), *arguments[1:]),
                    pass_fds=(filter_file.fileno(),),
                    **identity,
                )
            except OSError as error:
                raise SandboxUnavailable(f"bubblewrap did not start: {error}; {WAY_OUT}") from None
        assert process.stdout is not None
        assert process.stderr is not None
        reading = asyncio.gather(_take(process.stdout, output_bytes), _take(process.stderr, output_bytes))
        feeding = asyncio.create_task(_feed(process, stdin))
        timed_out = False
        try:
            async with asyncio.timeout(time_s):
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            _kill(process)
            feeding.cancel()
            await process.wait()
        (stdout, cut_out), (stderr, cut_err) = await reading
        code = None if timed_out else process.returncode
        return CommandResult(code, stdout, stderr, time.monotonic() - started, cut_out or cut_err)


class BubblewrapSandboxes:
    """See shared.sandbox.Sandboxes."""

    async def start(self, files: dict[str, bytes], limits: Limits) -> BubblewrapSandbox:
        uid = None
        if os.geteuid() == 0:  # one unprivileged owner per sandbox: root's own processes would know no limit
            uid = FIRST_UID + ((os.getpid() << 6 | next(_numbers) & 63) & 0x0FFFFFFF)
        folder = await asyncio.to_thread(_make, files, uid)
        sandbox = BubblewrapSandbox(folder, uid, limits)
        try:
            result = await sandbox.exec(["/bin/true"], time_s=60.0)
            if result.exit_code != 0:
                raise SandboxUnavailable(
                    f"a first command failed: {result.stderr.decode(errors='replace').strip()}; {WAY_OUT}"
                )
        except BaseException:
            await sandbox.close()
            raise
        return sandbox


def _inside(path: str) -> str:
    """Raises ValueError for a path that is not relative and below the work directory (links are the sandbox's own risk)."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise ValueError(f"sandbox: found path {path!r}, expected a relative one without '..'")
    return f"{WORKSPACE}/{pure}"


def _make(files: dict[str, bytes], uid: int | None) -> Path:
    """Before any command has run there are no links to fall for: the host may write."""
    names = {path: _inside(path).removeprefix(f"{WORKSPACE}/") for path in files}
    folder = Path(tempfile.mkdtemp(prefix="etude-sandbox-"))
    for path, data in files.items():
        target = folder / names[path]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    if uid is not None:
        for where, _, inner in os.walk(folder):
            for path in (where, *(os.path.join(where, name) for name in inner)):
                os.chown(path, uid, uid, follow_symlinks=False)
    return folder


def _filter() -> IO[bytes]:
    """The system calls that a command may not make, as bubblewrap reads them."""
    file = open(os.memfd_create("filter"), "w+b")  # noqa: SIM115 closed by the caller
    file.write(confine.COMMANDS_FILTER)
    file.seek(0)
    return file


def _remove(folder: Path) -> None:
    """Also what a command made unreadable, or deeper than a path can say: what a folder holds is moved to the top, until only
    empty ones are left. No process of the sandbox is alive, so nobody swaps a folder for a link. What the disk refuses to
    remove stays, and keeps nobody from closing."""
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)
        top = os.open(folder, _FOLDER)
        try:
            _empty(top)
        finally:
            os.close(top)
        os.rmdir(folder)


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


async def _started(*arguments: str, **options: Any) -> asyncio.subprocess.Process:
    """In a process group and a session of its own, without a terminal. Raises OSError."""
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
            start_new_session=True,
            **options,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        _kill(await starting)
        raise


def _kill(process: asyncio.subprocess.Process) -> None:
    """Bubblewrap and PID 1 of the sandbox, and all others with that. Bubblewrap alone is not enough: its PID 1 dies with it only
    when it is almost ready, and before would go on for ever. Nothing but what a command starts leaves the group."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def _take(stream: asyncio.StreamReader, most: int) -> tuple[bytes, bool]:
    """(the first `most` bytes, whether there were more). Reads to the end, so that the writer never blocks."""
    kept, cut = bytearray(), False
    while chunk := await stream.read(_CHUNK):
        room = most - len(kept)
        kept += chunk[:room]
        cut = cut or len(chunk) > room
    return bytes(kept), cut


async def _feed(process: asyncio.subprocess.Process, data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(data)
        await process.stdin.drain()
    with contextlib.suppress(ConnectionError):
        process.stdin.close()
