"""What every consumer counts, whichever adapter carries its messages.

Only members of a group count: who reads a topic from its start reads messages of any age, and acknowledges none.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakSet

from prometheus_client import Counter, Gauge, Histogram

from shared.contracts.codec import TIME_HEADER

AGE = Histogram(
    "etude_bus_delivery_age_seconds",
    "From a message's publication to the moment when a consumer of the group took it; counted when it is answered.",
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
    "Deliveries to members of a group that were answered: done, retried or buried; buried also what none of them could read.",
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


class Taken(Protocol):
    """A delivery that a consumer took."""

    taken_ns: int  # Unix time of that
    headers: dict[str, str]


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


def observe(histogram: Histogram, values: list[float]) -> None:
    """As `histogram.observe` of each value, at a third of the cost where there are many: each bucket counts once. The only
    place that knows its insides."""
    buckets, bounds = histogram._buckets, histogram._upper_bounds
    counts = [0] * len(buckets)
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    for bucket, count in zip(buckets, counts, strict=True):
        if count:
            bucket.inc(count)
    histogram._sum.inc(sum(values))


class Meter:
    """Of one topic and group. A label is looked up once here, not with every message."""

    __slots__ = ("_age", "_answers")

    def __init__(self, topic: str, group: str) -> None:
        self._age = AGE.labels(topic, group)
        # Answers begin at 0: a counter that is born with its first event shows no increase.
        self._answers = {kind: ANSWERS.labels(topic, group, kind) for kind in KINDS}

    def taken(self, deliveries: Iterable[Taken]) -> None:
        """Clocks of two machines may differ: an age below zero counts as zero. A message without a time has none."""
        ages = []
        for delivery in deliveries:
            try:
                age = delivery.taken_ns * 1e-9 - float(delivery.headers[TIME_HEADER])
            except (KeyError, ValueError):
                continue
            ages.append(max(0.0, age))
        observe(self._age, ages)

    def answered(self, answer: str, count: int = 1) -> None:
        self._answers[answer].inc(count)


class Silent:
    """Of a reader without a group: nothing counts."""

    __slots__ = ()

    def taken(self, deliveries: Iterable[Taken]) -> None:
        pass

    def answered(self, answer: str, count: int = 1) -> None:
        pass


_SILENT = Silent()


@functools.cache
def meter(topic: str, group: str | None) -> Meter | Silent:
    return _SILENT if group is None else Meter(topic, group)
