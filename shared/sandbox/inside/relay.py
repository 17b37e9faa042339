"""A program that the worker starts in its pod: it copies between its standard input and output and the porter's socket.

It ends when either side ends. Nothing passes through it but bytes that it does not read.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable

from shared.sandbox.inside import cell
from shared.sandbox.inside.porter import SOCKET

_CHUNK = 1 << 16


def _copy(receive: Callable[[int], bytes], send: Callable[[bytes], object], end: Callable[[], object]) -> None:
    try:
        while data := receive(_CHUNK):
            send(data)
    except OSError:
        pass
    end()


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def main() -> None:
    """Argument: the path of the socket; none: SOCKET."""
    cell.hide_self()
    there = socket.socket(socket.AF_UNIX)
    try:
        there.connect(sys.argv[1] if len(sys.argv) > 1 else SOCKET)
    except OSError as error:
        sys.exit(f"the pod's first process does not answer: {error.strerror}")
    arguments = (lambda most: os.read(0, most), there.sendall, lambda: there.shutdown(socket.SHUT_RDWR))
    threading.Thread(target=_copy, args=arguments, daemon=True).start()
    _copy(there.recv, _write, lambda: os._exit(0))


if __name__ == "__main__":
    main()
