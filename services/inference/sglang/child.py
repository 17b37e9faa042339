"""One process of `sglang.launch_server`: started, its lines logged, ended. Dies with this process, whatever kills it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import socket
from collections import deque
from collections.abc import Sequence

import structlog

TAIL_LINES = 40  # kept, to say why a child ended
LINE_CHARS = 4000
_PREFIX = re.compile(r"^\[(?P<time>[\d\- :.,]+)(?P<rank>( [A-Z]+\d+)*)\] ?")  # [2026-01-01 00:00:00 TP0 EP1] text
_PR_SET_PDEATHSIG = 1
# Looked up here: between fork and exec only the forking thread lives, and a lock that another one held stays held for ever.
_prctl = ctypes.CDLL(None).prctl

log = structlog.get_logger()


def free_port() -> int:
    """A port that nobody listens on now. Somebody may take it before the child does: it is then started again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    # SGLang's own children do the same towards it. SIGKILL: there is nobody left whom draining would serve.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """`ended` is done when the process is over, with its exit code (negative: the signal)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._forwarding = asyncio.create_task(self._forward())
        self.ended = asyncio.create_task(self._wait())

    @staticmethod
    async def start(arguments: Sequence[str], environment: dict[str, str]) -> Child:
        """Raises OSError where the program cannot be started."""
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # a group of its own: signals for us are not for it, and it ends as a whole
            preexec_fn=_die_with_parent,
        )
        log.info("sglang_started", pid=process.pid)
        return Child(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def end(self, grace_s: float) -> None:
        """SIGTERM, so that it drains; SIGKILL to its whole group after the grace period. Returns when it is over."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await asyncio.wait({self.ended}, timeout=grace_s)
        with contextlib.suppress(ProcessLookupError):  # also what it left behind
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.wait({self.ended, self._forwarding}, timeout=10)
        self._forwarding.cancel()

    def why(self) -> str:
        """The last line that says something, for people: an exception where there is one."""
        lines = [line.strip() for line in self.tail if line.strip()]
        told = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
        return (told or lines or ["it said nothing"])[-1][:500]

    async def _wait(self) -> int:
        code = await self._process.wait()
        log.info("sglang_ended", pid=self.pid, code=code)
        return code

    async def _forward(self) -> None:
        """Every line of the child is one event. A progress bar's states are lines, too."""
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(1 << 16):
            *lines, rest = re.split(rb"[\r\n]", rest + chunk)
            for line in lines:
                self._say(line)
            if len(rest) > LINE_CHARS:
                self._say(rest)
                rest = b""
        self._say(rest)

    def _say(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()[:LINE_CHARS]
        if not line:
            return
        found = _PREFIX.match(line)
        facts = {"rank": found["rank"].strip()} if found and found["rank"] else {}
        said = line[found.end() :] if found else line
        self.tail.append(said)
        log.info("sglang", line=said, **facts)
