"""Celery's SQLAlchemy transport, made fit for one machine: looks often at little cost, and keeps nothing it delivered.

The original looks once a second, in a write transaction, and marks delivered rows instead of deleting them. Here a look is
one indexed read; only a worker that sees a job takes the write lock, and taking is deleting. A job whose worker dies is gone
with it: the reward service gives it again. The file is no record, so it is not flushed to disk.
"""

from __future__ import annotations

import json
from pathlib import Path
from queue import Empty
from typing import Any
from urllib.parse import unquote

from kombu.transport import TRANSPORT_ALIASES
from kombu.transport import sqlalchemy as original
from sqlalchemy import create_engine, event, text

from shared.sqlite import write_ahead

POLL_S = 0.05
BUSY_S = 30.0  # how long a worker waits for another one's write
_ALIAS = "etude-embedded"
TRANSPORT_ALIASES[_ALIAS] = f"{__name__}:Transport"

_LOOK = text(
    "SELECT m.id FROM kombu_message AS m JOIN kombu_queue AS q ON m.queue_id = q.id WHERE q.name = :queue ORDER BY m.id LIMIT 1"
)
_TAKE = text("DELETE FROM kombu_message WHERE id = :id RETURNING payload")
_COUNT = text(
    "SELECT count(*) FROM kombu_message AS m JOIN kombu_queue AS q ON m.queue_id = q.id WHERE q.name = :queue"
)


def broker_url(url: str) -> str:
    """`sqla+sqlite:///PATH` goes through this transport; every other broker through its own."""
    if not url.startswith("sqla+sqlite:"):
        return url
    path = unquote(url.removeprefix("sqla+sqlite:///").partition("?")[0])
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return f"{_ALIAS}+{url.removeprefix('sqla+')}"


class Channel(original.Channel):
    def _engine_from_config(self) -> Any:
        engine = create_engine(self.connection.client.hostname, connect_args={"timeout": BUSY_S})

        @event.listens_for(engine, "connect")
        def _prepare(connection: Any, _: Any) -> None:
            write_ahead(connection, BUSY_S)
            connection.execute("PRAGMA synchronous = OFF")

        return engine

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        engine, _ = self._open()
        with engine.connect() as connection:
            row = connection.execute(_LOOK, {"queue": queue}).first()
        if row is not None:
            with engine.begin() as connection:
                taken = connection.execute(_TAKE, {"id": row[0]}).first()
            if taken is not None:  # else another worker was faster
                return json.loads(taken[0])
        raise Empty

    def _size(self, queue: str) -> int:
        engine, _ = self._open()
        with engine.connect() as connection:
            return int(connection.execute(_COUNT, {"queue": queue}).scalar_one())


class Transport(original.Transport):
    Channel = Channel
    polling_interval = POLL_S
