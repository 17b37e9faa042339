"""PgBouncer from Debian's package, before the PostgreSQL that runs.

It is no member of the fleet: a test starts one in the pool mode that it is about, which takes a tenth of a second.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from infra.servers import Unavailable
from infra.servers.debian import libraries, present, program
from infra.servers.ports import free_port
from infra.servers.postgres import somebody

NAME = "pgbouncer"  # of the program and of its package
READY_WITHIN_S = 30.0
LOOK_S = 0.02
SERVERS = 2  # connections to PostgreSQL for each database: so few that clients keep changing places on them


def install() -> Path:
    """Return the program; fetch it if it is not here. Raises Unavailable."""
    return program(NAME, NAME)


def here() -> Path | None:
    """Return the program, or None if it would have to be fetched."""
    return present(NAME, NAME)


@contextmanager
def pooling(binary: Path, ledger: str, folder: Path, mode: str, **options: str) -> Iterator[str]:
    """Run PgBouncer in pool mode `mode` before the PostgreSQL at `ledger`, and give the address through it. `options`: further
    lines of its configuration. Raises Unavailable."""
    url = urlsplit(ledger)
    port = free_port()
    users = folder / "pgbouncer.users"
    users.write_text(f'"{url.username}" "{url.password}"\n')
    users.chmod(0o600)
    lines = {
        "listen_addr": "127.0.0.1",
        "listen_port": str(port),
        "unix_socket_dir": "",
        "auth_type": "scram-sha-256",
        "auth_file": str(users),
        "pool_mode": mode,
        "default_pool_size": str(SERVERS),
        "max_client_conn": "200",
        **options,
    }
    configuration = folder / "pgbouncer.ini"
    configuration.write_text(
        f"[databases]\n* = host={url.hostname} port={url.port}\n[pgbouncer]\n"
        + "".join(f"{name} = {value}\n" for name, value in lines.items())
    )
    with (folder / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen(
            [*somebody(), str(binary), str(configuration)],  # it refuses to be root, as PostgreSQL does
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **libraries(binary)},
        )
    try:
        _await(process, port, folder / "pgbouncer.log")
        yield ledger.replace(f":{url.port}/", f":{port}/")
    finally:
        process.kill()
        process.wait()


def _await(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > until:
                raise Unavailable(f"pgbouncer: does not start: {log.read_text(errors='replace')[-800:]}") from None
        time.sleep(LOOK_S)
