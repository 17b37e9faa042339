"""What blocks for minutes (a child process, checks in a sandbox) in a thread, beside a loop that hears Ctrl-C and SIGTERM.

A thread cannot be cancelled, and the process does not end before it: so whoever is cancelled here ends the child that the
work waits for, and work that has none looks now and then whether it is still wanted.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from etude.supervisor import leave_by
from shared.process import end_with

T = TypeVar("T")
GRACE_S = 10.0
LOOK_S = 0.2  # between two looks whether work is still wanted
INTERRUPTED = 130  # the exit code of a command that says so itself


class _Work:
    def __init__(self) -> None:
        self._guard = threading.Lock()
        self.unwanted = False
        self._child: subprocess.Popen[bytes] | None = None

    def waits_for(self, child: subprocess.Popen[bytes] | None) -> None:
        with self._guard:
            self._child = child
            if child and self.unwanted:
                _end(child)

    def stop(self) -> None:
        with self._guard:
            self.unwanted = True
            if self._child:
                _end(self._child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, so that it leaves nothing behind, not even a terminal without a cursor; by force where it does not hear."""
    child.send_signal(signal.SIGINT)
    later = threading.Timer(GRACE_S, child.terminate)
    later.daemon = True
    later.start()


_here: contextvars.ContextVar[_Work | None] = contextvars.ContextVar("work", default=None)


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """`function(*arguments)` in a thread; cancelled, it is told to end."""
    work, context = _Work(), contextvars.copy_context()
    context.run(_here.set, work)
    try:
        return await asyncio.get_running_loop().run_in_executor(None, partial(context.run, function, *arguments))
    except asyncio.CancelledError:
        work.stop()
        raise


def ended_by_signals() -> None:
    """From here on the running task is cancelled by whatever ends a command in order."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task
    for number in leave_by():
        loop.add_signal_handler(number, task.cancel)


def require_wanted() -> None:
    """Raises KeyboardInterrupt where whoever waited for this work has been cancelled."""
    work = _here.get()
    if work and work.unwanted:
        raise KeyboardInterrupt


async def wanted(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` in an event loop of such a thread, and return its result. Raises KeyboardInterrupt if the thread's caller was
    cancelled; `work` is cancelled first and has cleared up."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            require_wanted()
            await asyncio.wait([task], timeout=LOOK_S)
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def call(module: str, *arguments: str) -> int:
    """Runs it, and returns its exit code. It ends with this process, however that ends, and hears of Ctrl-C from us alone: two
    signals would cut its clearing up. Raises KeyboardInterrupt where that ended it."""
    require_wanted()
    work = _here.get() or _Work()
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, preexec_fn=end_with(os.getpid()), process_group=0) as child:
        work.waits_for(child)
        try:
            code = child.wait()
        except KeyboardInterrupt:
            _end(child)
            raise
        finally:
            work.waits_for(None)
    require_wanted()
    if code in (-signal.SIGINT, INTERRUPTED):
        raise KeyboardInterrupt
    return code
