"""Records that no longer exist although a reader had not acknowledged them: retention deleted them while it was away, or
somebody deleted their topic.

Both adapters look for them when a member gets a partition and while it reads. A metric and a log line count them for every
reader; for a group an alert goes to every run that is not over, and the scheduler records it in their ledgers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from prometheus_client import Counter

from shared.contracts.messages import EVERY_RUN, RECORDS_GONE, Alert

GONE = Counter(
    "etude_bus_records_gone_total",
    "Records that retention deleted before a reader acknowledged them. On Kafka of a compacted topic: at most so many.",
    ["topic", "group"],
)
NO_GROUP = "none"  # the metric's label of a reader without a group
EXAMPLES = 20

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Gone:
    """`first`..`last`: offsets of one partition that no longer exist. `count`: how many records were there, at most."""

    topic: str
    partition: int
    first: int
    last: int
    count: int


def count(group: str | None, found: Sequence[Gone]) -> None:
    """Add to the metric and the log."""
    for one in found:
        GONE.labels(one.topic, group or NO_GROUP).inc(one.count)
        log.error(
            "bus.records_gone",
            topic=one.topic,
            group=group,
            partition=one.partition,
            first=one.first,
            last=one.last,
            records=one.count,
        )


def alert(group: str, found: Sequence[Gone]) -> Alert:
    """Return the alert about `found`, which must not be empty."""
    topics: dict[str, int] = {}
    for one in found:
        topics[one.topic] = topics.get(one.topic, 0) + one.count
    counted = ", ".join(f"{number:,} records of {topic}" for topic, number in sorted(topics.items()))
    what = (
        f"{counted} no longer exist: retention deleted them before group {group!r} acknowledged them. Way out: `etude ledger "
        "audit` names what a run lacks; keep readers from being away longer than the topic's retention (docs/operations.md)"
    )
    rows = [f"{one.topic}/{one.partition}: {one.count} records, offsets {one.first} to {one.last}" for one in found]
    return Alert(run=EVERY_RUN, name=RECORDS_GONE, severity="critical", what=what, examples=rows[:EXAMPLES])


def alert_of_deleted(group: str, topics: Sequence[str]) -> Alert:
    """Return the alert about topics that were deleted, and made again, while the group read them."""
    what = (
        f"{', '.join(topics)}: deleted and made again. What group {group!r} had not acknowledged no longer exists; how much it was "
        "cannot be told. Way out: `etude ledger audit` names what a run lacks; nobody may delete topics of a run that goes on"
    )
    return Alert(run=EVERY_RUN, name=RECORDS_GONE, severity="critical", what=what, examples=list(topics[:EXAMPLES]))


def missing(position: int, first: int, finished: Sequence[int]) -> tuple[int, int, int] | None:
    """Return (first, last, count) of the offsets from `position` to before `first`, the oldest that exists, which are not in
    `finished`. None: nothing is missing. Pure."""
    number = first - position - sum(position <= offset < first for offset in finished)
    return (position, first - 1, number) if number > 0 else None
