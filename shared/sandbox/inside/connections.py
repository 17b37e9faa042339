"""Connections that programs inside make to 127.0.0.1, carried by the loop over its channel: the only way to the egress proxy.

Invariants:
- The loop counts bytes and passes them on. It parses none of them and decides nothing: the proxy outside does.
- Code inside cannot end the door or take its port: both belong to the loop, which no cell reaches.
- What the loop and the worker hold of a connection is bounded: about WINDOW bytes outwards, the blob of one request inwards.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from shared.sandbox.inside import frames
from shared.sandbox.inside.cells import READ, WRITE

if TYPE_CHECKING:
    from shared.sandbox.inside.loop import Loop

MOST = 96  # at once; more wait to be accepted. The proxy allows fewer and says so
# Bytes on their way outwards before the proxy took the first. The adapter gives credit after half of them.
WINDOW = frames.WINDOW // 2
FIRST = 1 << 31  # the number of the first connection: adapters count theirs from 1


class Connection:
    """One accepted connection. `gone`: called once, when it is closed."""

    def __init__(self, loop: Loop, accepted: socket.socket, number: int, gone: Callable[[int], None]) -> None:
        self._loop, self._socket, self._number, self._gone = loop, accepted, number, gone
        accepted.setblocking(False)
        self._room = WINDOW
        self._read_last = self._write_last = False
        self._writing: tuple[int, memoryview] | None = None
        loop.tell(frames.message(frames.OPENED, number, {}))
        self._interest()

    def write(self, request: int, data: bytes, end: bool) -> None:
        """Send to the program inside. The request is answered when the kernel took it all."""
        if self._writing is not None or self._write_last:
            raise KeyError("a connection that is written to")
        self._writing, self._write_last = (request, memoryview(data)), end
        self._send()

    def credit(self, count: int) -> None:
        self._room += count
        self._interest()

    def close(self) -> None:
        self._loop.watch(self._socket.fileno(), 0, self._move)
        with contextlib.suppress(OSError):  # an errand of the loop may hold a copy of the descriptor for a moment
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._writing is not None:
            self._loop.answer(self._writing[0], {"error": "the program inside has closed its end", "kind": "gone"})
            self._writing = None
        self._gone(self._number)
        self._loop.tell(frames.message(frames.ENDED, self._number, {"code": 0, "note": ""}))

    def _interest(self) -> None:
        reads = READ if self._room > 0 and not self._read_last else 0
        self._loop.watch(self._socket.fileno(), reads | (WRITE if self._writing is not None else 0), self._move)

    def _move(self, events: int) -> None:
        if events & WRITE:
            self._send()
        if events & READ and self._socket.fileno() >= 0:
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(frames.CHUNK)
        except BlockingIOError:
            return
        except OSError:
            return self.close()
        self._read_last = not data
        self._room -= len(data)
        self._loop.tell(frames.output(self._number, data))  # without a byte: the program wrote its last
        return self._interest()

    def _send(self) -> None:
        assert self._writing is not None
        request, data = self._writing
        try:
            while data:
                data = data[self._socket.send(data) :]
            if self._write_last:
                self._socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            self._writing = (request, data)
            return self._interest()
        except OSError:
            return self.close()
        self._writing = None
        self._loop.answer(request, {})
        return self._interest()


class Door:
    """Listens on 127.0.0.1 of the sandbox. Raises OSError where the port is taken."""

    def __init__(self, loop: Loop, port: int) -> None:
        self._loop = loop
        self._listener = socket.create_server(("127.0.0.1", port), backlog=MOST)
        self._listener.setblocking(False)
        self._numbers = itertools.count(FIRST)
        self.connections: dict[int, Connection] = {}
        self._watch()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def _watch(self) -> None:
        self._loop.watch(self._listener.fileno(), READ if len(self.connections) < MOST else 0, self._accept)

    def _accept(self, events: int) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # it has gone already
            return
        number = next(self._numbers)
        self.connections[number] = Connection(self._loop, accepted, number, self._closed)
        self._watch()

    def _closed(self, number: int) -> None:
        self.connections.pop(number, None)
        self._watch()
