"""What every consumer counts, whichever adapter carries its messages.

Only members of a group count: who reads a topic from its start reads messages of any age, and acknowledges none.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from typing import Protocol
from weakref import WeakSet

from prometheus_client import Counter, Gauge, Histogram

from shared.contracts.codec import TIME_HEADER

AGE = Histogram(
    "etude_bus_delivery_age_seconds",
    "From a message's publication to the moment when a consumer of the group took it.",
    ["topic", "group"],
    buckets=(0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)
IN_FLIGHT = Gauge(
    "etude_bus_in_flight", "Deliveries taken by this process's consumers of a group and not yet answered.", ["group"]
)
OLDEST = Gauge(
    "etude_bus_oldest_unanswered_seconds",
    "Since when the delivery that waits longest for its answer was taken; 0: none waits.",
    ["group"],
)
ANSWERS = Counter(
    "etude_bus_deliveries_total",
    "Deliveries to members of a group that were answered: done, retried or buried.",
    ["topic", "group", "answer"],
)
KINDS = ("done", "retried", "buried")


class Holder(Protocol):
    """Somebody who holds deliveries."""

    @property
    def in_flight(self) -> int: ...

    @property
    def oldest_s(self) -> float:
        """Seconds; 0 when nothing is held."""


_holders: dict[str, WeakSet[Holder]] = {}


def watch(holder: Holder, group: str | None) -> None:
    """Its deliveries count from now on, until it is gone. Nothing is computed but when somebody looks."""
    if group is None:
        return
    if group not in _holders:
        holders: WeakSet[Holder] = WeakSet()
        _holders[group] = holders
        IN_FLIGHT.labels(group).set_function(lambda: sum(h.in_flight for h in list(holders)))
        OLDEST.labels(group).set_function(lambda: max((h.oldest_s for h in list(holders)), default=0.0))
    _holders[group].add(holder)


def taken(topic: str, group: str | None, headers: Mapping[str, str]) -> None:
    """Clocks of two machines may differ: an age below zero counts as zero. A message without a time has none."""
    if group is not None:
        _begin(topic, group)
        with contextlib.suppress(KeyError, ValueError):
            AGE.labels(topic, group).observe(max(0.0, time.time() - float(headers[TIME_HEADER])))


@functools.cache
def _begin(topic: str, group: str) -> None:
    """Answers begin at 0: a counter that is born with its first event shows no increase."""
    for answer in KINDS:
        ANSWERS.labels(topic, group, answer)


def answered(topic: str, group: str | None, answer: str) -> None:
    if group is not None:
        ANSWERS.labels(topic, group, answer).inc()
