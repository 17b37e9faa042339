"""A deliberately naive implementation of shared.sandbox.contract: the positive control of the attacks.

A shell in a temporary folder, as the same user, with the worker's environment and descriptors. An attack that fails here as well
proves nothing about the other adapters.

It does the usual mistakes on purpose: it reads the end of a command from a fixed mark in the output, ends commands by a SIGTERM to
their process group, unpacks archives unchecked and follows links. Limits are ignored. It must not harm the machine that tests run
on: each shell has mounts of its own where root starts it, and with `throwaway` also processes of its own, for `kill -9 -1`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shlex
import shutil
import signal
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.sandbox import SandboxUnavailable
from shared.sandbox.contract import (
    NO_NETWORK,
    Base,
    Capability,
    Caps,
    Cause,
    Changes,
    CommandResult,
    Limits,
    Network,
    Snapshot,
)

MARK = "__COMMAND_ENDED__"
_NEW_MOUNTS = ["unshare", "--mount", "--propagation", "private", "--"]
_NEW_MACHINE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]


class NaiveSession:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._dead = process, False

    async def run(
        self,
        script: str,
        *,
        time_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
    ) -> CommandResult:
        if self._dead or self._process.returncode is not None:
            raise SandboxUnavailable("the naive shell is gone")
        assert self._process.stdin is not None
        before = "".join(f"export {name}={shlex.quote(value)}; " for name, value in (env or {}).items())
        before += f"cd {shlex.quote(cwd)}; " if cwd else ""
        command = f"{before}eval {shlex.quote(script)}\nprintf '\\n{MARK} %s\\n' $?\nprintf '\\n{MARK}\\n' >&2\n"
        started, out, err = time.monotonic(), bytearray(), bytearray()
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(command.encode())
            await self._process.stdin.drain()
        code: int | None = None
        cause = Cause.time_limit
        try:
            async with asyncio.timeout(time_s):
                code = await self._code(out)
                await _until(self._process.stderr, f"\n{MARK}\n".encode(), err)
                cause = Cause.session_ended if code is None else Cause.exited
        except TimeoutError:
            self._signal(signal.SIGTERM)
        self._dead = code is None
        return CommandResult(code, cause, bytes(out), bytes(err), time.monotonic() - started)

    async def _code(self, out: bytearray) -> int | None:
        """Return what follows the mark, and leave what precedes it in `out`. None: the shell has ended."""
        rest = await _until(self._process.stdout, f"\n{MARK} ".encode(), out)
        while rest is not None and b"\n" not in rest:
            assert self._process.stdout is not None
            rest += await self._process.stdout.read(1 << 16)
        return None if rest is None else int(rest.split(b"\n")[0])

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def close(self) -> None:
        self._signal(signal.SIGTERM)

    async def end(self) -> None:
        """End the process group for certain, when the test is over."""
        self._signal(signal.SIGKILL)
        self._process._transport.close()  # type: ignore[attr-defined]  # a daemon may hold the pipes
        await self._process.wait()


class NaiveProgram:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        await self._process.stdin.drain()

    async def receive(self, most: int) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.read(most)

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


class NaiveSandbox:
    decisions = ()

    def __init__(self, folder: Path, base: Base, throwaway: bool) -> None:
        self.folder, self._throwaway = folder, throwaway
        self._environment = {**os.environ, **base.environment}
        self._sessions: list[NaiveSession] = []
        self._programs: list[NaiveProgram] = []
        self._closed = False

    async def session(self) -> NaiveSession:
        self._sessions.append(NaiveSession(await self._start(["bash"])))
        return self._sessions[-1]

    async def spawn(self, argv: Sequence[str]) -> NaiveProgram:
        self._programs.append(NaiveProgram(await self._start(argv)))
        return self._programs[-1]

    async def put(self, archive: bytes, at: str = "") -> None:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(self.folder / at, filter="fully_trusted")

    async def get(self, paths: Sequence[str], caps: Caps = Caps()) -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", dereference=True) as tar:
            for path in paths:
                tar.add(self.folder / path, path)
        return packed.getvalue()

    async def changes(self, caps: Caps = Caps()) -> Changes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(self.folder, ".")
        return Changes(packed.getvalue(), (), {})

    async def snapshot(self) -> Snapshot:
        raise ValueError("the naive sandbox has no snapshots")

    async def restore(self, snapshot: Snapshot) -> None:
        raise ValueError("the naive sandbox has no snapshots")

    async def close(self) -> None:
        """Also end the shells for certain: a control leaves nothing on the machine that tests run on."""
        if not self._closed:
            self._closed = True
            for session in self._sessions:
                await session.end()
            for program in self._programs:
                await program.kill()
            await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    async def _start(self, argv: Sequence[str]) -> asyncio.subprocess.Process:
        alone = os.geteuid() == 0
        prefix = [*_NEW_MACHINE, *([] if alone else ["--user", "--map-root-user"]), "--", "sh", "-c", '"$@"; :', "sh"]
        return await asyncio.create_subprocess_exec(
            *(prefix if self._throwaway else _NEW_MOUNTS if alone else []),
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.folder,
            env=self._environment,
            start_new_session=True,
            close_fds=False,
        )


class NaiveSandboxes:
    name = "naive"
    capabilities = frozenset({Capability.sessions})

    def __init__(self, throwaway: bool = False) -> None:
        self._throwaway = throwaway
        self._open: list[NaiveSandbox] = []

    async def open(
        self, base: Base, limits: Limits, network: Network = NO_NETWORK, *, snapshot: Snapshot | None = None
    ) -> NaiveSandbox:
        folder = Path(tempfile.mkdtemp(prefix="naive-"))
        if base.tree is not None:
            shutil.copytree(base.tree, folder, symlinks=True, dirs_exist_ok=True)
        self._open.append(NaiveSandbox(folder, base, self._throwaway))
        return self._open[-1]

    async def reap(self) -> int:
        return 0

    async def close(self) -> None:
        for sandbox in self._open:
            await sandbox.close()


async def _until(stream: asyncio.StreamReader | None, mark: bytes, kept: bytearray) -> bytes | None:
    """Read into `kept` up to the mark. Return what follows it; None: the stream ended before."""
    assert stream is not None
    at = -1
    while at < 0:
        chunk = await stream.read(1 << 16)
        if not chunk:
            return None
        begin = max(0, len(kept) - len(mark))
        kept += chunk
        at = kept.find(mark, begin)
    rest = bytes(kept[at + len(mark) :])
    del kept[at:]
    return rest
