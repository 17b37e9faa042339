"""Real ledgers for tests: SQLite always, PostgreSQL where one runs (tests/servers.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Engine

from shared import ledger
from tests.servers import need, own_schema

KINDS = ("sqlite", "postgresql")


@contextlib.contextmanager
def ledger_url(kind: str, folder: Path) -> Iterator[str]:
    """The address of an empty ledger. PostgreSQL: a schema of its own, dropped afterwards."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'ledger.db'}"
        return
    with own_schema(need("ETUDE_LEDGER")["ETUDE_LEDGER"]) as url:
        yield url


@contextlib.contextmanager
def opened(kind: str, folder: Path) -> Iterator[Engine]:
    """An empty ledger with its tables."""
    with ledger_url(kind, folder) as url:
        engine = ledger.connect(url)
        try:
            ledger.upgrade(engine)
            yield engine
        finally:
            engine.dispose()
