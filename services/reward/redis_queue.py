"""Celery's Redis transport, made fit for a Redis that hangs: a worker whose acknowledgement was lost takes the next job.

The original frees a job's place only after Redis has answered. Where the answer does not come (Celery logs it, and goes on) the
place stays taken, and a worker that takes one job at a time never takes another. Here the place is free either way. The job
itself is not lost and not done twice for nothing: it was begun, and what comes of it is an object that is put once.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import TRANSPORT_ALIASES, virtual
from kombu.transport import redis as original

TRANSPORT_ALIASES["redis"] = TRANSPORT_ALIASES["rediss"] = f"{__name__}:Transport"


class QoS(original.QoS):
    def ack(self, delivery_tag: Any) -> None:
        try:
            super().ack(delivery_tag)
        except Exception:
            virtual.QoS.ack(self, delivery_tag)
            raise


class Channel(original.Channel):
    QoS = QoS


class Transport(original.Transport):
    Channel = Channel
