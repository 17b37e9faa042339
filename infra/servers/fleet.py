"""Starts, awaits and stops the servers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from infra.servers import FOLDER, Unavailable, say, state
from infra.servers.kafka import Kafka
from infra.servers.minio import Minio
from infra.servers.place import Place, Server
from infra.servers.ports import free_ports, is_free
from infra.servers.postgres import Postgres
from infra.servers.redis import Redis
from shared.process import identity

SERVERS: tuple[type[Server], ...] = (Redis, Postgres, Minio, Kafka)  # quickest to get first
NAMES = tuple(kind.name for kind in SERVERS)
READY_WITHIN_S = 180.0  # seconds on a quiet machine; a JVM among busy neighbours takes a minute and more
GRACE_S = 20.0
LOOK_S = 0.1
LOCK = "lock"  # stays: who waits for it must not wait for a file that is gone
LOG_TAIL = 1500  # characters of a server's log in an error


class Ended(Unavailable):
    """A server's process ended while it started."""


def up(names: Sequence[str] = NAMES, folder: Path = FOLDER) -> None:
    """Every server of `names` runs and answers when it returns. One that ends while it starts is started once more. Raises
    Unavailable."""
    with _alone(folder):
        rows = state.read(folder)
        servers = [kind() for kind in SERVERS if kind.name in names]
        missing = [server for server in servers if server.name not in rows or rows[server.name].process is None]
        versions = {server.name: server.install() for server in missing}  # all of them before anything is started
        places = {server.name: _begin(server, versions[server.name], rows, folder) for server in missing}
        for server in missing:
            try:
                _await(server, places[server.name], rows[server.name])
            except Ended as error:  # another program took its port, say; then it gets another one
                say(f"{error}\n{server.name}: once more")
                place = _begin(server, versions[server.name], rows, folder)
                _await(server, place, rows[server.name])
            say(f"{server.name} {versions[server.name]} on port {rows[server.name].ports[0]}")


def _begin(server: Server, version: str, rows: dict[str, state.Running], folder: Path) -> Place:
    """Start a server, and remember it in `rows` and in the folder."""
    row = _row(rows.get(server.name), server, version)
    place = Place(folder / server.name, row.ports, row.secret)
    place.folder.mkdir(exist_ok=True)
    server.prepare(place)
    row.settings = server.settings(place)
    _start(server, place, row)
    rows[server.name] = row
    state.write(rows, folder)  # at once: a process that nobody knows could never be stopped
    return place


def _row(before: state.Running | None, server: Server, version: str) -> state.Running:
    """Addresses and password stay as they were, so that who has them finds the server again."""
    ports = before.ports if before and all(is_free(port) for port in before.ports) else free_ports(server.ports)
    return state.Running(version, ports, before.secret if before else secrets.token_hex(16))


def down(folder: Path = FOLDER, *, keep: bool = False) -> None:
    """Stops all; unless `keep`, their data, addresses and passwords go too."""
    if not folder.exists():
        return
    with _alone(folder):
        processes = []
        for name, row in state.read(folder).items():
            if process := row.process:
                say(f"stopping {name}")
                process.send_signal(row.stop)
                processes.append(process)
        _, left = psutil.wait_procs(processes, timeout=GRACE_S)
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=GRACE_S)
        if not keep:
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != LOCK:
                    path.unlink()


def _start(server: Server, place: Place, row: state.Running) -> None:
    launch = server.launch(place)
    with (place.folder / "log").open("ab") as log:
        process = subprocess.Popen(
            launch.arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=place.folder,
            env={**os.environ, **launch.variables},
            start_new_session=True,  # Ctrl-C in a test is not meant for it
        )
    row.pid, row.stop = process.pid, launch.stop
    row.identity = identity(process.pid)


def _await(server: Server, place: Place, row: state.Running) -> None:
    until = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            if server.ready(place):
                return
            reason = "it does not answer as it should"
        except Exception as error:  # whatever its client raises while it is coming up
            reason = f"{type(error).__name__}: {error}"
        if row.process is None:
            raise Ended(f"{server.name}: ended while starting. Its log says:\n{_tail(place)}")
        if time.monotonic() > until:
            raise Unavailable(
                f"{server.name}: not ready after {READY_WITHIN_S:.0f} s ({reason}). Its log says:\n{_tail(place)}"
            )
        time.sleep(LOOK_S)


def _tail(place: Place) -> str:
    return (place.folder / "log").read_text(errors="replace")[-LOG_TAIL:].strip() or "(nothing)"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One `up` or `down` at a time."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
