"""Real servers on this machine for the integration tests: Kafka, PostgreSQL, MinIO and Redis, without Docker.

`python -m infra.servers up | down | status | env`; `make servers`, `make servers-down`.

Invariants
- Everything of a server (data, configuration, log) lies in `.servers/<name>/`, its address in `.servers/state.json`.
  Programs that had to be fetched or built lie in `~/.cache/etude`, outside the tree, and are made once.
- Servers listen on 127.0.0.1 only, on free ports that stay theirs until the folder is removed, and want the password
  made for them.
- `up` is idempotent: what runs is left alone, what died is started again on its data. A process is known by its id and
  its start, so that a reused id is never taken for a server, nor ended as one.
- A server that cannot be had is an error that says which, what was found and how to get it.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".servers"
CACHE = Path.home() / ".cache" / "etude"


class Unavailable(RuntimeError):
    """A server cannot be had on this machine; the text says which, what was found and the way out."""


def say(text: str) -> None:
    print(f"servers: {text}", flush=True)
