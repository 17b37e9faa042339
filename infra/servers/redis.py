"""Redis from Debian's packages."""

from __future__ import annotations

import os
import re
import signal
import subprocess

from infra.servers import Unavailable
from infra.servers.debian import libraries, program
from infra.servers.place import Launch, Place


class Redis:
    name = "redis"
    ports = 1

    def install(self) -> str:
        self._path = program("redis-server", "redis-server")
        self._variables = libraries(self._path)
        done = subprocess.run(
            [str(self._path), "--version"], capture_output=True, text=True, env={**os.environ, **self._variables}
        )
        found = re.search(r"v=([\d.]+)", done.stdout)
        if not found:
            raise Unavailable(f"redis: {self._path} does not run: {(done.stdout + done.stderr).strip()[-400:]}")
        return found[1]

    def prepare(self, place: Place) -> None:
        place.data.mkdir(exist_ok=True)
        # In a file: a password among the arguments could be read by every user of this machine.
        (place.folder / "redis.conf").write_text(
            f"bind 127.0.0.1\nport {place.port}\nrequirepass {place.secret}\ndir {place.data}\n"
            'appendonly yes\nappendfsync everysec\nsave ""\n'
        )

    def launch(self, place: Place) -> Launch:
        return Launch([str(self._path), str(place.folder / "redis.conf")], self._variables, signal.SIGTERM)

    def ready(self, place: Place) -> bool:
        from redis import Redis as Client

        with Client.from_url(self.settings(place)["ETUDE_JOBS"], socket_timeout=2) as client:
            return bool(client.ping())

    def settings(self, place: Place) -> dict[str, str]:
        return {"ETUDE_JOBS": f"redis://:{place.secret}@127.0.0.1:{place.port}/0"}
