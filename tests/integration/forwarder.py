"""A careless sandbox's way to a proxy: passes connections to 127.0.0.1:PORT on to a socket. Standard library only.

    python forwarder.py PORT SOCKET      writes `ready PORT` once it listens; PORT 0: any free one

The sandboxes of shared.sandbox have another: their loop (shared/sandbox/inside/connections.py).
"""

from __future__ import annotations

import os
import selectors
import socket
import sys

CHUNK = 1 << 16
CONNECT_S = 5.0
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Forwarder:
    """Copies between pairs of sockets. `waiting`: what a socket is still to be sent; `ended`: sockets that wrote their last;
    `told`: those whose other end knows that of their peer; `lost`: those whose other end is gone."""

    def __init__(self, listener: socket.socket, path: str) -> None:
        self._listener, self._path = listener, path
        self._selector = selectors.DefaultSelector()
        self._peer: dict[socket.socket, socket.socket] = {}
        self._waiting: dict[socket.socket, bytearray] = {}
        self._ended: set[socket.socket] = set()
        self._told: set[socket.socket] = set()
        self._lost: set[socket.socket] = set()
        self._proxies: set[socket.socket] = set()
        listener.setblocking(False)
        self._selector.register(listener, READ)

    def serve(self) -> None:
        while True:
            for key, events in self._selector.select():
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if one is self._listener:
                    self._accept()
                elif one in self._peer:  # else its pair was closed by an earlier event
                    self._move(one, events)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        proxy = socket.socket(socket.AF_UNIX)
        try:
            proxy.settimeout(CONNECT_S)
            proxy.connect(self._path)
        except OSError:
            client.close()
            proxy.close()
            return
        self._proxies.add(proxy)
        self._peer |= {client: proxy, proxy: client}
        for one in (client, proxy):
            one.setblocking(False)
            self._waiting[one] = bytearray()
            self._selector.register(one, READ)

    def _move(self, one: socket.socket, events: int) -> None:
        peer = self._peer[one]
        if events & READ and one not in self._ended and len(self._waiting[peer]) < CHUNK:
            try:
                data = one.recv(CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
                self._lost.add(one)
            self._waiting[peer] += data
            if not data:
                self._ended.add(one)
        for to in (peer, one):
            try:
                self._send(to)
            except OSError:
                self._lost.add(to)
                self._ended.add(to)
            if to in self._lost:
                self._waiting[to].clear()
        # When the proxy has ended there is nobody to send to. When the client has, the proxy still has to learn why.
        if any(side in self._ended and not self._waiting[self._peer[side]] for side in self._proxies & {one, peer}):
            self._close(one)
            return
        for side in (one, peer):
            self._watch(side)

    def _send(self, to: socket.socket) -> None:
        waiting = self._waiting[to]
        if waiting:
            try:
                del waiting[: to.send(waiting)]
            except BlockingIOError:
                return
        if not waiting and self._peer[to] in self._ended and to not in self._told:
            self._told.add(to)
            to.shutdown(socket.SHUT_WR)

    def _watch(self, one: socket.socket) -> None:
        reads = one not in self._ended and len(self._waiting[self._peer[one]]) < CHUNK
        events = (READ if reads else 0) | (WRITE if self._waiting[one] else 0)
        if one in self._selector.get_map():
            self._selector.modify(one, events) if events else self._selector.unregister(one)
        elif events:
            self._selector.register(one, events)

    def _close(self, one: socket.socket) -> None:
        for side in (one, self._peer[one]):
            if side in self._selector.get_map():
                self._selector.unregister(side)
            side.close()
            del self._peer[side], self._waiting[side]
            for some in (self._ended, self._told, self._lost, self._proxies):
                some.discard(side)


def serve(port: int, path: str) -> None:
    """Listen, say so on standard output, and forward until the process is killed."""
    listener = socket.create_server(("127.0.0.1", port))
    os.write(1, b"ready %d\n" % listener.getsockname()[1])
    Forwarder(listener, path).serve()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
