"""PostgreSQL from Debian's packages, any version from 14 on.

It refuses to run as root; then it gets a user namespace of its own in which we are somebody else. So it needs no account
on this machine, and its data lies where everything else does.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

from infra.servers import Unavailable
from infra.servers.debian import libraries, program
from infra.servers.place import Launch, Place

FOLDERS = ("/usr/lib/postgresql/*/bin",)
OLDEST = 14
USER = "etude"
DATABASE = "etude"
# The tests kill processes, not the machine: what a dead process wrote stays with the kernel, so nothing waits for the disk.
OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "shared_buffers": "32MB",
    "max_connections": "200",
}


class Postgres:
    name = "postgres"
    ports = 1

    def install(self) -> str:
        self._bin = program("postgres", "postgresql", FOLDERS).parent
        self._variables = libraries(self._bin / "postgres")
        done = self._run([self._tool("postgres"), "--version"])
        found = re.search(r"(\d+)[.\d]*", done.stdout)
        if done.returncode or not found or int(found[1]) < OLDEST:
            raise Unavailable(
                f"postgres: needs version {OLDEST} or newer, found {done.stdout.strip()!r}. "
                "Way out: apt-get install postgresql, from the release's own packages"
            )
        return found[0]

    def prepare(self, place: Place) -> None:
        if place.data.exists():
            return
        new = place.folder / "new"  # renamed when it is whole
        shutil.rmtree(new, ignore_errors=True)
        password = place.folder / "password"
        try:
            password.write_text(place.secret)
            arguments = ["-D", str(new), "-U", USER, f"--pwfile={password}", "-A", "scram-sha-256", "-E", "UTF8"]
            self._must("initdb", [*arguments, "--locale=C", "--no-sync", "--no-instructions"])
        finally:
            password.unlink(missing_ok=True)
        self._must("postgres", ["--single", "-D", str(new), "postgres"], f"CREATE DATABASE {DATABASE}\n")
        new.rename(place.data)

    def stand_by(self, place: Place, primary: str) -> None:
        """Make the data of a standby, which follows the server at the URL `primary`. Needs `install`, and pg_basebackup from the
        client's package."""
        self._must(
            "pg_basebackup", ["-D", str(place.data), "-d", primary, "-R", "-X", "stream", "-c", "fast", "--no-sync"]
        )

    def launch(self, place: Place) -> Launch:
        options = [f"--{name}={value}" for name, value in {**OPTIONS, "port": str(place.port)}.items()]
        arguments = [*somebody(), self._tool("postgres"), "-D", str(place.data), *options]
        return Launch(arguments, self._variables, signal.SIGINT)  # "fast": open sessions are ended

    def ready(self, place: Place) -> bool:
        import psycopg

        with psycopg.connect(self.settings(place)["ETUDE_LEDGER"], connect_timeout=2) as connection:
            return connection.execute("SELECT 1").fetchone() == (1,)

    def settings(self, place: Place) -> dict[str, str]:
        return {"ETUDE_LEDGER": f"postgresql://{USER}:{place.secret}@127.0.0.1:{place.port}/{DATABASE}"}

    def _tool(self, name: str) -> str:
        return str(Path(self._bin) / name)

    def _run(self, arguments: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            arguments,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **self._variables},
        )

    def _must(self, tool: str, arguments: list[str], text: str = "") -> None:
        done = self._run([*somebody(), self._tool(tool), *arguments], text)
        if done.returncode:
            raise Unavailable(f"postgres: {tool} failed: {done.stdout.strip()[-800:]}")


def somebody() -> list[str]:
    """Return what stands before a command that refuses to be root: a user namespace in which we are somebody else."""
    return ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else []
