"""The adapter's end of the channel to the loop inside a sandbox (inside/loop.py, inside/frames.py).

`Channel` carries requests and answers over any pair of asyncio streams. `Inside` offers sessions, programs and transfers over
it; adapters build their `Sandbox` on that.

Invariants:
- Every request has a deadline. When one passes, the sandbox is broken: the channel closes, and every call raises
  SandboxUnavailable. Time in which this process stood still is not the sandbox's: the answer may lie here unread.
- A caller that is cancelled leaves no script running: its session ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import posixpath
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared import namespaces
from shared.sandbox import SandboxUnavailable, archives
from shared.sandbox.contract import Caps, Cause, CommandResult
from shared.sandbox.inside import frames

ANSWER_S = 20.0  # for what the loop does at once; a busy machine has its share of it
TRANSFER_S = 300.0
PUT_CAPS = Caps(size=1 << 30, files=200_000)
SCAN_FILES = 1_000_000
_PARTS = 20  # of a deadline
_AT_ONCE = 1 << 20  # bytes of an archive that are looked at without a thread
_ENDED = "the sandbox has ended"


class Gone(ConnectionError):
    """The session or program that was asked for has ended."""


@contextlib.asynccontextmanager
async def _within(wait_s: float) -> AsyncIterator[None]:
    """As asyncio.timeout, but this process may stand still meanwhile, because it or its whole machine was stopped: that takes one
    part of the time, however long it was. asyncio itself looks at the clock before it hands on what has come."""
    loop, left = asyncio.get_running_loop(), _PARTS
    timer: asyncio.TimerHandle

    def tick() -> None:
        nonlocal left, timer
        left -= 1
        if left:
            timer = loop.call_later(wait_s / _PARTS, tick)
        else:
            limit.reschedule(loop.time())

    timer = loop.call_later(wait_s / _PARTS, tick)
    try:
        async with asyncio.timeout(None) as limit:
            yield
    finally:
        timer.cancel()


class Channel:
    """Requests to one loop, any number at a time. `obituary`: why the other end is gone, asked when it is."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        obituary: Callable[[], str] = lambda: _ENDED,
    ) -> None:
        self._reader, self._writer, self._obituary = reader, writer, obituary
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._programs: dict[int, ChannelProgram] = {}
        # Gets each connection that is made to 127.0.0.1 inside, after a request `listen` (inside/connections.py).
        self.arrived: Callable[[ChannelProgram], None] | None = None
        self._why = ""
        self.ready: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[0] = self.ready
        self._task = asyncio.create_task(self._read())

    @property
    def alive(self) -> bool:
        return not self._why

    async def ask(
        self, head: dict[str, Any], blob: bytes = b"", *, wait_s: float = ANSWER_S
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request and return its answer. Raises SandboxUnavailable, Gone, and ValueError for a refused request."""
        number = next(self._numbers)
        waiting = asyncio.get_running_loop().create_future()
        try:
            async with _within(wait_s):
                self._waiting[number] = waiting
                await self.send(frames.message(frames.REQUEST, number, head, blob))
                answer, data = await waiting
        except TimeoutError:
            self.fail(f"no answer to {head['do']!r} within {wait_s:g} s")
            raise SandboxUnavailable(self._why) from None
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise {"gone": Gone, "refused": ValueError}.get(answer["kind"], SandboxUnavailable)(str(answer["error"]))
        return answer, data

    async def send(self, frame: bytes) -> None:
        """Raises SandboxUnavailable where the other end is gone."""
        if self._why:
            raise SandboxUnavailable(self._why)
        self._writer.write(frame)
        with contextlib.suppress(ConnectionError):  # `_read` learns of it, too
            await self._writer.drain()

    def open(self, program: ChannelProgram, number: int | None = None) -> int:
        """Return the number of a program or a connection whose frames this channel hands on; None: one of its own."""
        number = next(self._numbers) if number is None else number
        self._programs[number] = program
        return number

    def number(self) -> int:
        return next(self._numbers)

    def fail(self, why: str) -> None:
        """End the channel, and with it everything inside."""
        if not self._why:
            self._why = why
            self._writer.close()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(SandboxUnavailable(why))
                    waiting.exception()  # nobody needs to have asked
            for program in self._programs.values():
                program.ended(None, why)
            self._programs.clear()

    async def close(self) -> None:
        self.fail(_ENDED)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _read(self) -> None:
        splitter = frames.Splitter()
        why = ""
        try:
            while data := await self._reader.read(1 << 18):
                for kind, number, payload in splitter.feed(data):
                    self._hand_on(kind, number, payload)
        except (OSError, frames.BrokenChannel) as error:
            why = f"{error}; "
        self.fail(why + self._obituary())

    def _hand_on(self, kind: int, number: int, payload: bytes) -> None:
        if kind == frames.ANSWER:
            waiting = self._waiting.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result(frames.parse(payload))
        elif kind == frames.OUTPUT and number in self._programs:
            self._programs[number].wrote(payload)
        elif kind == frames.ENDED and number in self._programs:
            head, _ = frames.parse(payload)
            self._programs.pop(number).ended(int(head["code"]), str(head["note"]))
        elif kind == frames.OPENED and self.arrived is not None:
            self.arrived(ChannelProgram(self, number))


class ChannelProgram:
    """Anything inside that exchanges bytes over the channel: a program (shared.sandbox.contract.Program), a transfer of files, or
    a connection that a program inside made to 127.0.0.1.

    `number`: of a connection, which is open already; None: a new program or transfer, which `start` begins. A connection can
    be half closed: `receive` returns nothing more, and the other end still reads what `send` writes.
    `code`: the exit code; None while it runs, and when it was killed or the sandbox ended first.
    `note`: why it could not be started or finished; empty: nothing went wrong.
    """

    def __init__(self, channel: Channel, number: int | None = None) -> None:
        self._channel, self._number = channel, channel.open(self, number)
        self._held: deque[bytes] = deque()
        self._used = 0
        self._news = asyncio.Event()
        self._over = False
        self.code: int | None = None
        self.note = ""

    @property
    def alive(self) -> bool:
        return not self._over

    async def start(self, order: dict[str, Any]) -> None:
        """Raises SandboxUnavailable, FileNotFoundError and OSError where the program cannot be started."""
        await self._channel.ask({"do": "start", "id": self._number, **order}, wait_s=ANSWER_S)

    async def send(self, data: bytes, *, end: bool = False, wait_s: float = TRANSFER_S) -> None:
        """`end`: these are the last bytes. `wait_s`: until the program takes a part of them, at most."""
        view = memoryview(data)
        while view or end:
            part, view = view[: frames.CHUNK * 4], view[frames.CHUNK * 4 :]
            last = end and not view
            if self._over:
                raise Gone("the program has ended")
            request = {"do": "write", "id": self._number, "end": last}
            await self._channel.ask(request, bytes(part), wait_s=wait_s)
            if last:
                return

    async def receive(self, most: int) -> bytes:
        while not self._held and not self._over:
            self._news.clear()
            await self._news.wait()
        if not self._held:
            return b""
        first = self._held.popleft()
        if len(first) > most:
            self._held.appendleft(first[most:])
            first = first[:most]
        self._used += len(first)
        if self._used >= frames.WINDOW // 4 and not self._over:
            used, self._used = self._used, 0
            credit = {"do": "credit", "id": self._number, "bytes": used}
            await self._channel.send(frames.message(frames.REQUEST, 0, credit))
        return first

    async def kill(self) -> None:
        if not self._over:
            with contextlib.suppress(SandboxUnavailable, Gone):
                await self._channel.ask({"do": "kill", "id": self._number}, wait_s=ANSWER_S)
            self.ended(None, "killed")

    def wrote(self, data: bytes) -> None:
        self._held.append(data)
        self._news.set()

    def ended(self, code: int | None, note: str) -> None:
        if not self._over:
            self._over, self.code, self.note = True, code, note
            self._news.set()


@dataclass(frozen=True, slots=True)
class Counts:
    """Events that the kernel has counted for a sandbox: processes killed for memory, forks refused, and `full`: how often its own
    memory limit was met; None: that often or more, nobody knows."""

    memory: int = 0
    forks: int = 0
    full: int | None = None


@dataclass(slots=True)
class Inside:
    """What can be done in a sandbox through its channel. `counts`: reads the sandbox's counters. `ends`: on the monotonic
    clock, when the sandbox's time is over. `environment` and `workdir`: of sessions and programs. `keep`: bytes of each
    output."""

    channel: Channel
    environment: Mapping[str, str]
    workdir: str
    keep: int
    ends: float
    counts: Callable[[], Counts] = Counts
    kills: int = 0  # processes that the loop's watch over memory has killed so far

    async def limit(
        self,
        *,
        processes: int,
        file_bytes: int,
        memory_bytes: int = 0,
        crowd: int = 0,
        shm_bytes: int = 1 << 26,
        clear: bool = False,
    ) -> None:
        """Set limits of what starts later.

        `memory_bytes`: the loop itself watches; 0: something else does. `crowd`: the limit on processes that really holds, by
        which a session is known to be full; 0: as `processes`. `shm_bytes`: of /dev/shm, where the loop can set it; `clear`: it
        is emptied there.
        """
        head = {"do": "set", "processes": processes, "file_bytes": file_bytes, "memory_bytes": memory_bytes}
        head |= {"crowd": crowd or processes, "shm_bytes": shm_bytes, "clear": clear}
        await self.channel.ask(head)

    async def session(self) -> ChannelSession:
        session = ChannelSession(self)
        await session.begin()
        return session

    async def spawn(self, argv: Sequence[str]) -> ChannelProgram:
        program = ChannelProgram(self.channel)
        await program.start({"argv": list(argv), "env": dict(self.environment), "cwd": self.workdir})
        return program

    async def strike(self, cause: Cause) -> None:
        """End every session and program; running scripts end with this cause."""
        await self.channel.ask({"do": "strike", "cause": cause.value})

    async def put(self, archive: bytes, at: str = "") -> None:
        if len(archive) > _AT_ONCE:  # a hundred thousand entries take seconds
            await asyncio.to_thread(archives.check, archive, PUT_CAPS)
        else:
            archives.check(archive, PUT_CAPS)
        order = {"do": "put", "at": self.path(at), "size": PUT_CAPS.size, "files": PUT_CAPS.files}
        await self._transfer(order, archive, 1 << 16)

    async def get(self, paths: Sequence[str], caps: Caps = Caps()) -> bytes:
        order = {"do": "get", "base": self.workdir, "paths": list(paths), "size": caps.size, "files": caps.files}
        return await self._transfer(order, b"", archives.room(caps))

    async def scan(self, paths: Sequence[str], digest_up_to: int) -> list[archives.Line]:
        """Return what stands at and below the paths. Raises FileNotFoundError, ValueError."""
        order = {"do": "scan", "base": self.workdir, "paths": list(paths), "size": digest_up_to, "files": SCAN_FILES}
        text = await self._transfer(order, b"", SCAN_FILES * 400)
        return [archives.Line(*json.loads(line)) for line in text.splitlines()]

    def path(self, path: str) -> str:
        return posixpath.join(self.workdir, path)

    async def _transfer(self, order: dict[str, Any], data: bytes, most: int) -> bytes:
        transfer = ChannelProgram(self.channel)
        found = bytearray()
        try:
            async with asyncio.timeout(TRANSFER_S):
                await transfer.start({"transfer": order})
                with contextlib.suppress(Gone):  # its note says why
                    await transfer.send(data, end=True)
                while part := await transfer.receive(frames.WINDOW):
                    found += part
                    if len(found) > most:
                        raise ValueError(f"{order['do']}: found more than {most} bytes")
        except TimeoutError:
            raise SandboxUnavailable(f"{order['do']}: not done within {TRANSFER_S:g} s") from None
        finally:
            await transfer.kill()
        if transfer.code != 0 or transfer.note:
            raise _error(transfer, order["do"])
        return bytes(found)


def _error(transfer: ChannelProgram, what: str) -> Exception:
    """Return what a transfer's failure is for its caller."""
    kind, _, text = transfer.note.partition(": ")
    if kind == "FileNotFoundError":
        return FileNotFoundError(f"{what}: {text}")
    if kind in (
        "Refused",
        "ReadError",
        "ValueError",
        "PermissionError",
    ):  # what the code inside has closed is its own doing
        return ValueError(f"{what}: {text}")
    if transfer.code is None:
        return SandboxUnavailable(transfer.note)
    return OSError(f"{what}: {transfer.note or f'ended with exit code {transfer.code}'}")


class ChannelSession:
    """See shared.sandbox.contract.Session."""

    def __init__(self, inside: Inside) -> None:
        self._inside, self._channel = inside, inside.channel
        self._number: int | None = None
        self._closed = False

    async def begin(self) -> None:
        number = self._channel.number()
        inside = self._inside
        head = {"do": "session", "id": number, "env": dict(inside.environment), "cwd": inside.workdir}
        try:
            await self._channel.ask(head, wait_s=ANSWER_S)
        except SandboxUnavailable as error:
            hint = namespaces.hint(str(error))
            raise SandboxUnavailable(f"{error}; {hint}") if hint else error from None
        self._number = number

    async def run(
        self,
        script: str,
        *,
        time_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
    ) -> CommandResult:
        if self._closed:
            raise SandboxUnavailable("the session is closed; open another")
        left = self._inside.ends - time.monotonic()
        if left <= 0:
            return CommandResult(None, Cause.time_limit, b"", b"", 0.0, fresh=True)
        text = script.encode("utf-8", "surrogateescape")
        head = {
            "do": "run",
            "time_s": min(time_s, left),
            "keep": self._inside.keep,
            "env": dict(env or {}),
            "cwd": None if cwd is None else self._inside.path(cwd),
            "script": len(text),
        }
        before, killed = self._inside.counts(), self._inside.kills
        try:
            answer, data = await self._ask(head, text + stdin, min(time_s, left) + ANSWER_S)
        except asyncio.CancelledError:
            self._abandon()
            raise
        if answer["fresh"]:
            self._number = None
        self._inside.kills = int(answer["kills"])
        watched = Counts(max(0, self._inside.kills - killed), int(answer.get("crowded", 0)))
        return _result(answer, data, before, self._inside.counts, watched)

    async def _ask(self, head: dict[str, Any], blob: bytes, wait_s: float) -> tuple[dict[str, Any], bytes]:
        """A session that ended since its last script, say by a background process, begins again."""
        for again in (True, False):
            if self._channel is not self._inside.channel:  # the sandbox was set back
                self._channel, self._number = self._inside.channel, None
            if self._number is None:
                await self.begin()
            try:
                return await self._channel.ask({**head, "session": self._number}, blob, wait_s=wait_s)
            except Gone:
                await self._kill(self._number)
                self._number = None
                if not again:
                    raise SandboxUnavailable("a new session ends at once") from None
        raise AssertionError("unreachable")

    def _abandon(self) -> None:
        number, self._number = self._number, None
        if number is not None and self._channel.alive:
            task = asyncio.create_task(self._kill(number))
            _ABANDONED.add(task)
            task.add_done_callback(_ABANDONED.discard)

    async def close(self) -> None:
        self._closed = True
        if self._number is not None:
            number, self._number = self._number, None
            await self._kill(number)

    async def _kill(self, number: int | None) -> None:
        with contextlib.suppress(SandboxUnavailable, Gone):
            await self._channel.ask({"do": "kill", "id": number}, wait_s=ANSWER_S)


_ABANDONED: set[asyncio.Task[None]] = set()


def _result(
    answer: dict[str, Any], data: bytes, before: Counts, counts: Callable[[], Counts], watched: Counts
) -> CommandResult:
    """Read an answer. A script that failed while the kernel or the loop (`watched`) counted an event failed because of that.
    Raises SandboxUnavailable where the host ran out of memory, not the sandbox."""
    cause, code = Cause(answer["cause"]), answer["code"]
    if cause in (Cause.exited, Cause.signalled, Cause.session_ended) and code != 0:
        after = counts()
        if after.memory > before.memory and after.full is not None and after.full == before.full:
            raise SandboxUnavailable(
                "the host ran out of memory and ended a process of the sandbox; free some, then try again"
            )
        if after.memory > before.memory or watched.memory:
            cause = Cause.memory_limit
        elif after.forks > before.forks or watched.forks:
            cause = Cause.process_limit
        elif code == 128 + signal.SIGXFSZ:
            cause = Cause.disk_limit
    out = int(answer["out"])
    return CommandResult(
        code, cause, data[:out], data[out:], float(answer["seconds"]), int(answer["lost"]), bool(answer["fresh"])
    )
