"""Sandboxes for callers in any event loop of a process: graders run each of their jobs in a loop of its own.

An adapter's machines belong to one event loop, and bubblewrap ends with the thread that started it. So the adapter works in a
loop and a thread of its own, which live from the first call to `close`.

Invariants:
- An adapter's code runs in its own loop alone. Callers wait; they share nothing with it but arguments and results.
- A caller that is cancelled cancels the work, and a sandbox that is opened for nobody is closed.
- After `close` nobody waits: calls in progress and later ones raise SandboxUnavailable. Closing and killing do nothing then.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from shared.sandbox import SandboxUnavailable, contract
from shared.sandbox.contract import NO_NETWORK, Base, Caps, Changes, CommandResult, Limits, Network, Snapshot

T = TypeVar("T")
_CLOSED = "the sandboxes of this process were closed; connect others"


class _Home:
    """The thread and the loop of an adapter. It starts with the first call and ends once."""

    def __init__(self) -> None:
        self._submitting = threading.Lock()  # all that is submitted comes before the end, or is refused
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._working: dict[asyncio.Task[Any], bool] = {}  # of the loop alone; the value: whether the end cancels it

    @property
    def ended(self) -> bool:
        """Whether the adapter is closed, and every sandbox with it."""
        return self._closed

    async def do(
        self,
        work: Callable[[], Awaitable[T]],
        undo: Callable[[T], Awaitable[Any]] | None = None,
        *,
        closes: bool = False,
    ) -> T:
        """Do the work in the loop and return its result. `undo`: called with a result that nobody takes any more. `closes`: the
        end waits for this work; it cancels all other. Raises SandboxUnavailable when the adapter is closed."""
        tasks, given_up = list[asyncio.Task[Any]](), threading.Event()

        async def done() -> T:
            if given_up.is_set():
                raise asyncio.CancelledError
            task = asyncio.current_task()
            assert task is not None
            tasks.append(task)
            self._working[task] = not closes
            try:
                return await work()
            finally:
                del self._working[task]

        loop, future = self._submit(done)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and future.cancelled() and (caller is None or not caller.cancelling()):
                raise SandboxUnavailable(_CLOSED) from None
            given_up.set()
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the work with it
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            if undo is not None:
                future.add_done_callback(lambda found: self._undo(found, undo))
            raise

    def _undo(self, found: Future[T], undo: Callable[[T], Awaitable[Any]]) -> None:
        if not found.cancelled() and found.exception() is None:
            with contextlib.suppress(SandboxUnavailable):  # closed, and what was found with it
                self._submit(lambda: _awaited(undo(found.result())))

    def _submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> tuple[asyncio.AbstractEventLoop, Future[T]]:
        with self._submitting:
            if self._closed:
                raise SandboxUnavailable(_CLOSED)
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name="sandboxes", daemon=True)
                self._thread.start()
            return self._loop, asyncio.run_coroutine_threadsafe(work(), self._loop)

    async def end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel the work in progress, do the last work and end the thread. Repeating it does nothing."""
        with self._submitting:
            if self._closed:
                return
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        try:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._finish(last), loop))
        finally:
            loop.call_soon_threadsafe(loop.stop)
            await asyncio.to_thread(thread.join)

    async def _finish(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        for task, cancels in list(self._working.items()):
            if cancels:
                task.cancel()
        if self._working:  # an adapter that closes knows only what is open, not what is being opened
            await asyncio.wait(set(self._working))
        await last()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped. Then cancel and await the tasks that are left, so that no caller waits for them."""
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _awaited(work: Awaitable[Any]) -> None:
    await work


class AnyLoopSandboxes:
    """See shared.sandbox.contract.Sandboxes. `inner`: the adapter; only this object uses it."""

    def __init__(self, inner: contract.Sandboxes) -> None:
        self._inner, self._home = inner, _Home()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def capabilities(self) -> frozenset[contract.Capability]:
        return self._inner.capabilities

    @property
    def memory_by(self) -> str:
        return self._inner.memory_by

    async def open(
        self, base: Base, limits: Limits, network: Network = NO_NETWORK, *, snapshot: Snapshot | None = None
    ) -> AnyLoopSandbox:
        sandbox = await self._home.do(
            lambda: self._inner.open(base, limits, network, snapshot=snapshot), lambda sandbox: sandbox.close()
        )
        return AnyLoopSandbox(sandbox, self._home)

    async def reap(self) -> int:
        return await self._home.do(self._inner.reap)

    async def close(self) -> None:
        async def last() -> None:
            await self._inner.close()

        await self._home.end(last)


class AnyLoopSandbox:
    """See shared.sandbox.contract.Sandbox."""

    def __init__(self, inner: contract.Sandbox, home: _Home) -> None:
        self._inner, self._home = inner, home

    @property
    def decisions(self) -> Sequence[contract.Decision]:
        return self._inner.decisions

    async def session(self) -> AnyLoopSession:
        session = await self._home.do(self._inner.session, lambda session: session.close())
        return AnyLoopSession(session, self._home)

    async def spawn(self, argv: Sequence[str]) -> AnyLoopProgram:
        program = await self._home.do(lambda: self._inner.spawn(argv), lambda program: program.kill())
        return AnyLoopProgram(program, self._home)

    async def put(self, archive: bytes, at: str = "") -> None:
        await self._home.do(lambda: self._inner.put(archive, at))

    async def get(self, paths: Sequence[str], caps: Caps = Caps()) -> bytes:
        return await self._home.do(lambda: self._inner.get(paths, caps))

    async def changes(self, caps: Caps = Caps()) -> Changes:
        return await self._home.do(lambda: self._inner.changes(caps))

    async def snapshot(self) -> Snapshot:
        return await self._home.do(self._inner.snapshot)

    async def restore(self, snapshot: Snapshot) -> None:
        await self._home.do(lambda: self._inner.restore(snapshot))

    async def close(self) -> None:
        if not self._home.ended:
            await self._home.do(self._inner.close, closes=True)


class AnyLoopSession:
    """See shared.sandbox.contract.Session."""

    def __init__(self, inner: contract.Session, home: _Home) -> None:
        self._inner, self._home = inner, home

    async def run(
        self,
        script: str,
        *,
        time_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
    ) -> CommandResult:
        return await self._home.do(lambda: self._inner.run(script, time_s=time_s, env=env, cwd=cwd, stdin=stdin))

    async def close(self) -> None:
        if not self._home.ended:
            await self._home.do(self._inner.close, closes=True)


class AnyLoopProgram:
    """See shared.sandbox.contract.Program."""

    def __init__(self, inner: contract.Program, home: _Home) -> None:
        self._inner, self._home = inner, home

    @property
    def alive(self) -> bool:
        return self._inner.alive

    async def send(self, data: bytes) -> None:
        await self._home.do(lambda: self._inner.send(data))

    async def receive(self, most: int) -> bytes:
        return await self._home.do(lambda: self._inner.receive(most))

    async def kill(self) -> None:
        if not self._home.ended:
            await self._home.do(self._inner.kill, closes=True)
