"""Whether the cluster answers, asked by a connection and a thread of its own.

The producer's thread may be held for half a minute by a broker that hangs; a question that waited behind it would say nothing
of the broker, and one that hung before it would hold the next publish.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from kafka import KafkaAdminClient

from shared.bus import BusUnavailable
from shared.bus.kafka_clients import connected
from shared.bus.kafka_cluster import Cluster

ANSWER_WITHIN_MS = 3_000


class Probe:
    def __init__(self, cluster: Cluster, client: str) -> None:
        """Connects when it is first used."""
        self._cluster, self._client = cluster, client
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"kafka-{client}-probe")
        self._admin: KafkaAdminClient | None = None

    async def ping(self) -> None:
        """Raises BusUnavailable."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._ask)

    def close(self) -> None:
        """Does not wait: a question to a broker that hangs takes its time."""
        self._executor.submit(self._drop)
        self._executor.shutdown(wait=False)

    # In the thread.

    def _ask(self) -> None:
        try:
            if self._admin is None:
                limits = {"bootstrap_timeout_ms": ANSWER_WITHIN_MS, "request_timeout_ms": ANSWER_WITHIN_MS}
                self._admin = connected(
                    KafkaAdminClient, **{**self._cluster.options(), **limits, "client_id": self._client}
                )
            # Of no topic. To describe the cluster would also ask what we may do with it, and a broker with rules logs each time
            # that it refused to say.
            self._admin.describe_topics([])
        except Exception as error:  # kafka-python's loop tells its own death by whatever ended it
            self._drop()  # the next question is asked anew: nothing of an old connection's troubles lives on
            raise BusUnavailable(f"{self._cluster}: {type(error).__name__}: {error}") from None

    def _drop(self) -> None:
        admin, self._admin = self._admin, None
        if admin:
            admin.close()
