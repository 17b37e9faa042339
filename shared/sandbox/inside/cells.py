"""What the loop knows of each cell, and of a program with pipes. Sessions: sessions.py."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shared.sandbox.inside import cell, frames, tree

if TYPE_CHECKING:
    from shared.sandbox.inside.loop import Loop

HARD_S = 10.0  # for the kernel to end a cell
_NOTE = 4096
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


def some(fd: int, most: int = frames.CHUNK) -> bytes | None:
    """Return what a pipe holds; None: nothing now; empty: its end."""
    try:
        return os.read(fd, most)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class Cell:
    """`pid`: the keeper's, 0 before the start. `deadline`: when `late` is called; None: never."""

    def __init__(self, loop: Loop, number: int, request: int) -> None:
        if number in loop.cells:
            raise ValueError(f"id: found {number} in use")
        self.loop, self.number, self.pid, self.born = loop, number, 0, 0
        self.deadline: float | None = None
        self._starting: int | None = request
        self._note, self._note_fd = b"", -1
        self._killers: list[int] = []
        self.dying = False  # it was killed and is not reaped yet

    @property
    def alive(self) -> bool:
        return True

    def seen(self, threads: int) -> None:
        """Learn how many processes and threads the cell has, where nothing but the loop watches."""

    def late(self) -> None:
        """The kernel has not ended the cell in time."""
        self.deadline = None
        self._answer_killers({"error": "a cell does not end", "kind": "broken"})

    def ended(self, code: int) -> None:
        del self.loop.cells[self.number]
        if self._note_fd >= 0:
            self._read_note(READ, last=True)
        self._started()
        self._answer_killers({})

    def kill(self, request: int) -> None:
        self._killers.append(request)
        self.dying = True
        self.deadline = self.deadline or time.monotonic() + HARD_S
        tree.send([self.pid], signal.SIGKILL)

    def strike(self, cause: str) -> None:
        self.dying = True
        tree.send([self.pid], signal.SIGKILL)

    def _answer_killers(self, head: dict[str, Any]) -> None:
        for request in self._killers:
            self.loop.answer(request, head)
        self._killers = []

    def _start(self, fds: dict[int, int], body: Callable[[], Any]) -> None:
        """Fork, and close the cell's ends of the pipes."""
        self._note_fd, theirs = os.pipe()
        try:
            self.pid = cell.start(self.loop.rules, fds, theirs, body)
        except BaseException:
            os.close(self._note_fd)
            raise
        finally:
            for fd in {*fds.values(), theirs}:
                os.close(fd)
        found = tree.look(self.pid)
        self.born = found.started if found else 0
        self.loop.cells[self.number] = self
        os.set_blocking(self._note_fd, False)
        self.loop.watch(self._note_fd, READ, self._read_note)

    def _read_note(self, events: int, last: bool = False) -> None:
        data = some(self._note_fd)
        if data:
            self._note = (self._note + data)[:_NOTE]
        if last or data == b"":
            self.loop.close(self._note_fd)
            self._note_fd = -1
            self._started()

    def _started(self) -> None:
        if self._starting is not None:
            head = {"error": self._note.decode(errors="replace"), "kind": "broken"} if self._note else {}
            self.loop.answer(self._starting, head)
            self._starting = None


class Process(Cell):
    """A program or a transfer, with pipes."""

    def begin(self, body: Callable[[], Any], *, merged: bool) -> None:
        """`merged`: its errors go to its output; else nowhere."""
        inside, self._in = os.pipe()
        self._out, outside = os.pipe()
        null = os.open("/dev/null", os.O_WRONLY)
        try:
            if merged:
                os.dup2(outside, null)
            self._start({0: inside, 1: outside, 2: null}, body)
        except BaseException:
            os.close(self._in)
            os.close(self._out)
            raise
        if not merged:
            self._started()
        for fd in (self._in, self._out):
            os.set_blocking(fd, False)
        self._room = frames.WINDOW
        self._code: int | None = None
        self._writing: tuple[int, memoryview] | None = None
        self._last = False
        self.loop.watch(self._out, READ, self._read)

    def write(self, request: int, data: bytes, end: bool) -> None:
        if self._writing is not None or self._in < 0:
            raise KeyError("standard input")
        self._writing, self._last = (request, memoryview(data)), end
        self._feed(WRITE)

    def credit(self, count: int) -> None:
        self._room += count
        if self._out >= 0:
            self.loop.watch(self._out, READ if self._room > 0 else 0, self._read)

    def ended(self, code: int) -> None:
        self._code = code
        self.deadline = None
        if self._in >= 0:
            self._stop_writing()
        if self._note_fd >= 0:
            self._read_note(READ, last=True)
        if self._killers and self._out >= 0:  # nobody takes the rest
            self.loop.close(self._out)
            self._out = -1
        self._answer_killers({})
        self._finish()

    def kill(self, request: int) -> None:
        if self._code is not None:  # only its output is still to be taken
            self._room = 0
            self._out_ended()
            self.loop.answer(request, {})
            return
        super().kill(request)

    @property
    def alive(self) -> bool:
        return self._code is None

    def _feed(self, events: int) -> None:
        if self._writing is None:
            return
        request, data = self._writing
        try:
            while data:
                data = data[os.write(self._in, data) :]
        except BlockingIOError:
            self._writing = (request, data)
            self.loop.watch(self._in, WRITE, self._feed)
            return
        except OSError:
            self._stop_writing()
            return
        self._writing = None
        self.loop.watch(self._in, 0, self._feed)
        if self._last:
            self._stop_writing()
        self.loop.answer(request, {})

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self.loop.answer(self._writing[0], {"error": "the program takes no more input", "kind": "gone"})
            self._writing = None
        self.loop.close(self._in)
        self._in = -1

    def _read(self, events: int) -> None:
        data = some(self._out, min(frames.CHUNK, self._room))
        if data is None:
            return
        if not data:
            self._out_ended()
            return
        self._room -= len(data)
        self.loop.tell(frames.output(self.number, data))
        if self._room <= 0:
            self.loop.watch(self._out, 0, self._read)

    def _out_ended(self) -> None:
        if self._out >= 0:
            self.loop.close(self._out)
            self._out = -1
        self._finish()

    def _finish(self) -> None:
        """All is told when the keeper has ended and its output is through."""
        if self._code is not None and self._out < 0 and self.loop.cells.pop(self.number, None) is not None:
            head = {"code": self._code, "note": self._note.decode(errors="replace")}
            self.loop.tell(frames.message(frames.ENDED, self.number, head))
