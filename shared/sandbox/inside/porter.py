"""The first process of a pod: it waits for its worker, hands the connection to the loop, and ends with the loop.

A pod of a warm pool has run nothing of any task. The worker that claimed it starts the relay (relay.py) in it, whose standard
input and output lead to the socket here. The first line through it is an order in JSON:

    {"token": 32 hexadecimal digits, "seconds": until the loop ends, "places": […], "mounts": […], "shm": bytes}

The answer is one line: {"owner": digest of the token, "code": digest of our modules, "environment": what the image and the pod's
spec set}. The loop's frames follow it. An order that is refused gets a line with `error`.

Invariants:
- A pod serves one token, once. Later connections are told whether theirs is that token, and are closed.
- No cell sees the socket: it lies in the volume that the loop hides.
- The pod ends when its worker's connection ends, or at the order's deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import select
import signal
import socket
import sys
import time
from typing import Any

from shared.sandbox.inside import cell, confine
from shared.sandbox.inside.container import REFUSED, loop_pid, serve
from shared.sandbox.inside.layer import VOLUME, Layers

SOCKET = f"{VOLUME}/porter"
DIGEST = "digest"  # a file beside our modules: what the worker compares with its own
_ORDER_S = 30.0  # for a connection to give its order; a busy machine has its share of it
_MOST = 1 << 16  # bytes of an order
_CLUSTERS = (
    "KUBERNETES_",
    "HOSTNAME",
    "LC_CTYPE",
    "LD_",
)  # variables of the cluster, of this interpreter, and those that the pod's spec has emptied
_TOKEN = re.compile(r"[0-9a-f]{32}\Z")


def owner(token: str) -> str:
    """Return what a pod may say of its token: who knows it can compare, and nobody can read it back."""
    return hashlib.sha256(f"etude pod {token}".encode()).hexdigest()


def order(connection: socket.socket) -> dict[str, Any]:
    """Read the order of a connection. Raises ValueError where it is none, and OSError."""
    found, ends = b"", time.monotonic() + _ORDER_S
    while not found.endswith(b"\n"):
        connection.settimeout(max(0.001, ends - time.monotonic()))
        part = connection.recv(1)  # not a byte more: what follows is the loop's
        if not part or len(found) >= _MOST:
            raise ValueError("order: found no whole line")
        found += part
    connection.settimeout(None)
    read = json.loads(found)
    if not isinstance(read, dict) or not _TOKEN.match(str(read.get("token"))):
        raise ValueError("token: found none; allowed: 32 hexadecimal digits")
    if not isinstance(read.get("places"), list) or not isinstance(read.get("mounts"), list):
        raise ValueError("places, mounts: allowed: lists of absolute paths")
    return {**read, "seconds": float(read["seconds"]), "shm": int(read["shm"])}


def _say(connection: socket.socket, **said: object) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(said).encode() + b"\n")


def _first(listening: socket.socket) -> tuple[socket.socket, dict[str, Any]]:
    while True:
        connection, _ = listening.accept()
        try:
            return connection, order(connection)
        except (ValueError, KeyError, TypeError, OSError) as error:
            _say(connection, error=f"{type(error).__name__}: {error}")
            connection.close()


def _answer_late(listening: socket.socket, token: str) -> None:
    connection, _ = listening.accept()
    with connection:
        try:
            same = hmac.compare_digest(owner(str(order(connection)["token"])), owner(token))
        except (ValueError, KeyError, TypeError, OSError):
            same = False
        _say(connection, error="taken: by this token" if same else "taken: by another worker")


def _guard(listening: socket.socket, pid: int, token: str) -> None:
    """Answer late connections, and reap, until the loop ends. The container's other processes then end with this one."""
    waker, wake = os.pipe()
    for fd in (waker, wake):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) and ended != pid:
                pass
            if ended == pid:
                return
        watched: list[Any] = [waker, listening]
        ready, _, _ = select.select(watched, [], [])
        if waker in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(waker, 4096)
        if listening in ready:
            _answer_late(listening, token)


def main() -> None:
    """Argument: the path of the socket; none: SOCKET."""
    path = sys.argv[1] if len(sys.argv) > 1 else SOCKET
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        os.chmod(path, 0o600)
        listening.listen(8)
        connection, wanted = _first(listening)
        pid = loop_pid()
        if pid < 0:
            _say(connection, error=REFUSED)
            sys.exit(REFUSED)
        if pid > 0:
            connection.close()
            cell.hide_self()  # not earlier: a hidden process may not map its child's users
            _guard(listening, pid, str(wanted["token"]))
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(f"{os.path.dirname(__file__)}/{DIGEST}") as file:
        code = file.read().strip()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_CLUSTERS)}
    _say(connection, owner=owner(str(wanted["token"])), code=code, environment=environment)
    # A pool's pods are larger than some of their sandboxes, and what lies here counts as memory.
    flags, size = confine._MS_NOSUID | confine._MS_NODEV, f"size={wanted['shm']},mode=1777"
    confine._check(confine._libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", flags, size.encode()), "mount /dev/shm")
    channel = connection.detach()
    layers = Layers(wanted["places"], [], mounts=wanted["mounts"])
    serve(channel, channel, time.monotonic() + wanted["seconds"], layers)


if __name__ == "__main__":
    main()
