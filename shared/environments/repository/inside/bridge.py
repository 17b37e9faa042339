"""Runs inside a sandbox: takes connections on the loopback and carries them over its own standard input and output.

A frame is 4 bytes for the connection, 4 bytes for the length, and so many bytes; length 0 ends the connection. Nothing but
Python's own library is imported here. The first line that it writes says that it listens.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading

HEAD = struct.Struct(">II")
CHUNK = 1 << 16


class Bridge:
    def __init__(self) -> None:
        self.connections: dict[int, socket.socket] = {}
        self.lock = threading.Lock()

    def send(self, number: int, data: bytes) -> None:
        frame = HEAD.pack(number, len(data)) + data
        with self.lock:
            while frame:
                frame = frame[os.write(1, frame) :]

    def listen(self, server: socket.socket) -> None:
        number = 0
        while True:
            connection, _ = server.accept()
            number += 1
            self.connections[number] = connection
            threading.Thread(target=self.outwards, args=(number, connection), daemon=True).start()

    def outwards(self, number: int, connection: socket.socket) -> None:
        try:
            while True:
                data = connection.recv(CHUNK)
                self.send(number, data)
                if not data:
                    return
        except OSError:
            self.send(number, b"")

    def inwards(self) -> None:
        """Until the other side is gone."""
        while head := read(HEAD.size):
            number, length = HEAD.unpack(head)
            data = read(length) if length else b""
            connection = self.connections.get(number)
            if connection is None:
                continue
            try:
                if data:
                    connection.sendall(data)
                else:
                    del self.connections[number]
                    connection.shutdown(socket.SHUT_RDWR)
                    connection.close()
            except OSError:
                pass  # the client has left; its own thread says so


def read(count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            return b""
        data += part
    return data


def main() -> None:
    server = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128)
    bridge = Bridge()
    threading.Thread(target=bridge.listen, args=(server,), daemon=True).start()
    os.write(1, b"ready\n")
    bridge.inwards()


if __name__ == "__main__":
    main()
