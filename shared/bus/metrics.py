"""What every consumer counts, whichever adapter carries its messages.

Only members of a group count: who reads a topic from its start reads messages of any age, and acknowledges none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from prometheus_client import Counter, Histogram

from shared.contracts.codec import TIME_HEADER

AGE = Histogram(
    "etude_bus_delivery_age_seconds",
    "From a message's publication to the moment when a consumer of the group took it.",
    ["topic", "group"],
    buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)
ANSWERS = Counter(
    "etude_bus_deliveries_total",
    "Deliveries to members of a group that were answered: done, retried or buried.",
    ["topic", "group", "answer"],
)


def taken(topic: str, group: str | None, headers: Mapping[str, str]) -> None:
    """Clocks of two machines may differ: an age below zero counts as zero. A message without a time has none."""
    if group is not None:
        with contextlib.suppress(KeyError, ValueError):
            AGE.labels(topic, group).observe(max(0.0, time.time() - float(headers[TIME_HEADER])))


def answered(topic: str, group: str | None, answer: str) -> None:
    if group is not None:
        ANSWERS.labels(topic, group, answer).inc()
