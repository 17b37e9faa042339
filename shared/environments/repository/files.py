"""The workspace's end of `inside/files.py`: the files of a sandbox, without a new process for each call."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shared.environments import InfrastructureError, SandboxGone
from shared.environments.repository import runtime
from shared.environments.repository.inside.files import MAX_ANSWER
from shared.environments.tools import ToolError
from shared.sandbox import SandboxUnavailable
from shared.sandbox.contract import Program, Sandbox

ANSWER_S = 60.0
_INVALID = "the sandbox's file server gave an invalid answer"  # a program in the sandbox may have written it


# A trajectory takes no half characters, and its notes may name a path or the target of a link.
_Whole = Annotated[str, Meta(pattern=r"\A[^\ud800-\udfff]*\Z")]
_Entry = tuple[Literal["file", "link", "other"], _Whole, bool, Annotated[int, Meta(ge=0)]]
ANSWERS: dict[str, Any] = {  # operation -> the fields of its answer
    "read": msgspec.defstruct("Content", [("data", str), ("whole", bool)]),
    "write": msgspec.defstruct("Written", [("existed", bool)]),
    "apply": msgspec.defstruct("Applied", [("refused", str)]),
    "list": msgspec.defstruct("Paths", [("paths", list[str]), ("more", int)]),
    "grep": msgspec.defstruct("Matches", [("matches", list[tuple[str, int, str]]), ("more", int)]),
    "scan": msgspec.defstruct("Scan", [("entries", dict[_Whole, _Entry])]),
}


class FileError(ToolError):
    """The operation cannot be done on these files; the text says why, for the agent to read."""


class _Gone(Exception):
    """The server ended while it was asked."""


class Files:
    """The files of one sandbox. Paths are absolute, as the sandbox sees them. Requests may run at the same time.

    `relieve`: called before the server is started a second time; it ends whatever else of the attempt uses up processes and
    memory. `python`: the interpreter, as the sandbox finds it.
    """

    def __init__(
        self, sandbox: Sandbox, relieve: Callable[[], Awaitable[None]] | None = None, python: str = ""
    ) -> None:
        self._sandbox, self._relieve, self._python = sandbox, relieve, python or runtime.python()
        self._running: Program | None = None
        self._reader: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def read(self, path: str, cap: int) -> tuple[bytes, bool]:
        """Return at most `cap` bytes of a file, and whether that is all of it. Raises FileError, InfrastructureError."""
        found = await self.ask("read", path=path, cap=cap)
        try:
            return base64.b64decode(found["data"], validate=True), found["whole"]
        except ValueError:
            raise FileError(_INVALID) from None

    async def write(self, path: str, data: bytes) -> bool:
        """Write a file, with the folders above it. Return whether it existed. Raises FileError, InfrastructureError."""
        found = await self.ask("write", path=path, data=base64.b64encode(data).decode())
        existed: bool = found["existed"]
        return existed

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have the server do one operation. Operations are idempotent: if the server dies, start another and repeat once. A
        timeout is a FileError and is not repeated. The answer has the fields of ANSWERS. Raises FileError,
        InfrastructureError."""
        try:
            return await self._repeated(do, arguments)
        except SandboxUnavailable as error:
            raise SandboxGone(str(error)) from None

    async def _repeated(self, do: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Ask, and ask once more if the server dies. Raises as `ask`, and SandboxUnavailable."""
        for last in (False, True):
            running = await self._started()
            try:
                async with asyncio.timeout(ANSWER_S):
                    answer = await self._ask(running, {"id": next(self._ids), "do": do, "with": arguments})
            except TimeoutError:
                await self._retire(running)
                raise FileError(f"it took longer than {ANSWER_S:g} s") from None
            except (_Gone, ConnectionError):
                await self._retire(running)
                if last:
                    raise InfrastructureError(f"the sandbox's file server ended twice during {do!r}") from None
                if self._relieve is not None:
                    await self._relieve()
                continue
            if "error" in answer:
                raise FileError(str(answer["error"]).encode("utf-8", "replace").decode())
            try:
                msgspec.convert(answer, ANSWERS[do])
            except msgspec.ValidationError:
                raise FileError(_INVALID) from None
            return answer
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """End the server. The next request starts another."""
        if self._running is not None:
            await self._retire(self._running)

    async def _started(self) -> Program:
        async with self._changing:
            if self._running is None:
                self._running = await self._spawned([self._python, "-I", "-S", "-X", "utf8", runtime.FILES])
                self._reader = asyncio.create_task(self._read(self._running))
            return self._running

    async def _spawned(self, argv: list[str]) -> Program:
        """The agent may have left no room for a program, or closed the folder that it starts in: relieve the sandbox of that, and
        try again. Raises SandboxUnavailable, InfrastructureError."""
        try:
            return await self._sandbox.spawn(argv)
        except (SandboxUnavailable, OSError):
            if self._relieve is None:
                raise
            await self._relieve()
        try:
            return await self._sandbox.spawn(argv)
        except OSError as error:
            raise InfrastructureError(f"the sandbox's file server does not start: {error}") from None

    async def _retire(self, running: Program) -> None:
        """End a server, unless another has taken its place: requests that ran together learn together of its end."""
        async with self._changing:
            if self._running is not running:
                return
            await running.kill()
            if self._reader is not None:
                self._reader.cancel()
                await asyncio.wait({self._reader})  # awaited itself, it would hide that this task was cancelled
            self._running = self._reader = None

    async def _ask(self, running: Program, request: dict[str, Any]) -> dict[str, Any]:
        if self._reader is None or self._reader.done():  # nobody would hand out the answer
            raise _Gone
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[request["id"]] = waiting
        try:
            data = json.dumps(request).encode()
            await running.send(struct.pack(">I", len(data)) + data)
            return await waiting
        finally:
            self._waiting.pop(request["id"], None)

    async def _read(self, running: Program) -> None:
        """Hand out answers until the server ends or writes an invalid answer, as a program in a sandbox may."""
        try:
            while True:
                length = struct.unpack(">I", await _exactly(running, 4))[0]
                if length > MAX_ANSWER:
                    return  # no honest answer is so long
                answer = json.loads(await _exactly(running, length))
                waiting = self._waiting.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (EOFError, ValueError, KeyError, TypeError, RecursionError):
            return
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(_Gone())


async def _exactly(running: Program, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = await running.receive(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
