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

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".servers"
CACHE = Path.home() / ".cache" / "etude"


class Unavailable(RuntimeError):
    """A server cannot be had on this machine; the text says which, what was found and the way out."""


_fetching = True


def require_fetching(what: str) -> None:
    """Before anything is downloaded, built or installed. Raises Unavailable inside `only_what_is_here`."""
    if not _fetching:
        raise Unavailable(f"{what}: not here, and nothing is fetched now; `make servers` gets it")


@contextlib.contextmanager
def only_what_is_here() -> Iterator[None]:
    """Within it a server that would have to be fetched is Unavailable."""
    global _fetching
    before, _fetching = _fetching, False
    try:
        yield
    finally:
        _fetching = before


@contextlib.contextmanager
def alone(what: str) -> Iterator[None]:
    """Hold the cache's lock `what`. Checkouts share the cache: one fetches or builds, and another waits, then finds it made."""
    locks = CACHE / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / what).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{what}: another process is fetching or building it; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    print(f"servers: {text}", flush=True)
