"""The bus: one small Protocol, two adapters (`sqlite` for one machine, `kafka` for a cluster).

Promises, the same for both and held by tests/contract/test_bus.py:
- `publish` returns when the message is durable. Order holds per key within a topic.
- At least once: a delivery that was neither `done` nor buried comes again after a crash or a rebalance.
- Deliveries are acknowledged one by one and in any order; the adapter commits the lowest contiguous offset.
- A topic keeps records for its retention, whoever has read them. A group that finds some gone says how many, in an alert and a
  metric (shared.bus.gone): "nothing is lost" assumes that no reader is away for longer.
- Long work is not held by a delivery: claim it, acknowledge, and let the ledger own the rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from shared.contracts.codec import Raw
from shared.contracts.topics import YEAR_H, Topic
from shared.settings import Told, without_credentials
from shared.structs import settle


class BusUnavailable(Told, RuntimeError):
    """The log cannot be reached or written, or this process has closed its bus. Trying again later may help."""


class Delivery(Protocol):
    topic: Topic
    key: str
    message: Any  # decoded; an unreadable one never gets here: the adapter buries it (without a group: passes it over)
    headers: dict[str, str]
    offset: int

    def done(self) -> None:
        """Acknowledge. May come in any order; only the first answer to a delivery counts."""

    def retry(self, after_s: float) -> None:
        """Deliver again, not before `after_s` seconds; until then it takes no place of `max_in_flight`. If this
        consumer dies or hands the partition back meanwhile, the next one gets it at once."""

    def bury(self, reason: str) -> None:
        """To the dead-letter topic, with the reason and the original bytes and headers; then acknowledged. Without a group
        it is logged and passed over: there are many such readers, and each begins anew at every start."""


class Deliveries(Protocol):
    """Also an AsyncIterator[Delivery]."""

    def __aiter__(self) -> AsyncIterator[Delivery]: ...

    async def __anext__(self) -> Delivery: ...

    async def caught_up(self) -> None:
        """Without a group: returns when everything that was in the topics at the subscription has been handed out to the one
        who iterates (another task); what it does with the last of them before it next awaits is done then, too.
        Raises BusUnavailable where the bus is closed before; ValueError with a group, whose members share the past."""

    async def aclose(self) -> None:
        """Leaves: nothing new is read; what is in flight can be settled for a short while."""


class Standing(NamedTuple):
    """Offsets in one partition. `acknowledged`: all before it are; `end`: the next one to be written."""

    acknowledged: int
    end: int


class Bus(Protocol):
    async def publish(self, topic: Topic, key: str, message: msgspec.Struct) -> None: ...

    async def publish_many(self, items: Sequence[tuple[Topic, str, msgspec.Struct]]) -> None:
        """All durable when it returns; order within a key is the order given. Not a transaction."""

    def deliveries(self, topics: Sequence[Topic], group: str | None, max_in_flight: int) -> Deliveries:
        """`group=None`: this consumer alone reads all from the start, without commits (broadcast topics)."""

    async def lag(self, topics: Sequence[Topic], group: str) -> dict[str, int]:
        """Messages not yet acknowledged by the group, per topic name."""

    async def standing(self, topics: Sequence[Topic], group: str) -> dict[tuple[str, int], Standing]:
        """Where the group stands in every partition that holds something: (topic name, partition) -> positions."""

    async def ping(self) -> None:
        """Returns when the log has answered: its file could be written, or a broker is there, which says nothing of a single
        topic. Raises BusUnavailable, within seconds where the log is away."""

    async def close(self) -> None:
        """Writes what was published and settled, leaves every group; iterators end."""


def dead_letters(topic: Topic) -> Topic:
    """The dead-letter topic of `topic`, as a topic to read: it carries `codec.Raw`, the original bytes and headers and
    two more headers, `dead-letter-reason` and `dead-letter-source` (topic/offset/group). What no letter can hold, of the
    bytes, key or headers, is cut, and `dead-letter-cut` says how long it was. Kept for a year: what was buried is found by
    people, weeks later perhaps."""
    return Topic(topic.dead_letter, (Raw,), partitions=1, retention_h=YEAR_H)


def connect(url: str, *, client: str) -> Bus:
    """`sqlite:PATH` (`sqlite:PATH?synchronous=full` survives a power loss too) or a `kafka://` URL
    (shared.bus.kafka_cluster). `client` names this process in logs and group membership."""
    settle()
    scheme = url.split(":", 1)[0]
    if scheme == "sqlite":
        from shared.bus.sqlite import SqliteBus

        return SqliteBus(url.removeprefix("sqlite:"), client=client)
    if scheme == "kafka":
        from shared.bus.kafka import KafkaBus

        return KafkaBus(url, client=client)
    raise ValueError(
        f"bus (ETUDE_BUS): found {without_credentials(url)!r}; allowed: sqlite:PATH, kafka://HOST:PORT[,…]"
    )
