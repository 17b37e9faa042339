"""Celery's Redis transport, made fit for a Redis that hangs, and for one that fails over.

The original frees a job's place only after Redis has answered. Where the answer does not come (Celery logs it, and goes on) the
place stays taken, and a worker that takes one job at a time never takes another. Here the place is free either way. The job
itself is not lost and not done twice for nothing: it was begun, and what comes of it is an object that is put once.

After a fail-over the address leads to the new primary, but connections made before lead to the old one, which refuses every write
from then on. The original keeps them for good. Here such a connection is closed, and the next try makes a new one.
"""

from __future__ import annotations

from typing import Any

import redis
from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.transport import redis as original

TRANSPORT_ALIASES["redis"] = TRANSPORT_ALIASES["rediss"] = f"{__name__}:Transport"
UNBLOCKED = "UNBLOCKED"  # what a primary says that becomes a replica, to who waits for a job


class QoS(original.QoS):
    def ack(self, delivery_tag: Any) -> None:
        try:
            super().ack(delivery_tag)
        except Exception:
            virtual.QoS.ack(self, delivery_tag)
            raise


class _ToPrimary:
    """Part of a connection: it ends where it leads to a replica."""

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().read_response(*arguments, **options)  # type: ignore[misc]
        except redis.ResponseError as error:
            if isinstance(error, redis.ReadOnlyError) or str(error).startswith(UNBLOCKED):
                self.disconnect()  # type: ignore[attr-defined]
                raise redis.ConnectionError(f"this Redis has become a replica: {error}") from None
            raise


class Connection(_ToPrimary, redis.Connection):
    """See _ToPrimary."""


class SSLConnection(_ToPrimary, redis.SSLConnection):
    """The same with TLS."""


class Channel(original.Channel):
    QoS = QoS
    connection_class = Connection
    connection_class_ssl = SSLConnection


class Transport(original.Transport):
    Channel = Channel
