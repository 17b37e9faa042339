"""Which log a position is of: topics made again, brokers that have not heard of it, positions that were committed late."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka import TopicPartition
from kafka.structs import OffsetAndMetadata

from shared.bus.gone import Gone
from shared.bus.inbox import Inbox
from shared.bus.kafka_batches import Record
from shared.bus.kafka_partitions import Partitions, marked, unmarked
from shared.contracts import codec
from shared.contracts.topics import ALERTS
from tests.contract.bus_world import alert

OLD, NEW = UUID(int=1), UUID(int=2)
HERE, THERE = TopicPartition("alerts", 0), TopicPartition("alerts", 1)


def reading(group: str | None = "g") -> Partitions:
    return Partitions({"alerts": ALERTS}, group, Inbox(10, lambda: None, group))


def committed(offset: int, log: UUID | None, finished: str = "") -> OffsetAndMetadata:
    return OffsetAndMetadata(offset, marked(finished, log), -1)


def records(*offsets: int) -> list[Record]:
    data, headers = codec.encode(ALERTS, alert("x"))
    return [Record(offset, b"k", data, headers) for offset in offsets]


def test_a_topic_that_was_made_again_is_begun_once_though_a_broker_still_names_the_old_one() -> None:
    partitions = reading()
    partitions.assigned([HERE], {}, {"alerts": OLD})
    for _ in range(2):
        assert partitions.begin_again([HERE], {"alerts": OLD}, {}) == (set(), [])
    assert partitions.begin_again([HERE], {"alerts": NEW}, {}) == ({"alerts"}, [HERE])
    for log in (OLD, NEW, OLD, NEW):
        assert partitions.begin_again([HERE], {"alerts": log}, {}) == (set(), [])


def test_a_position_of_a_log_that_is_gone_is_not_taken() -> None:
    """Its owner committed it before it heard of the new log, and then the partition moved."""
    partitions = reading()
    partitions.assigned([HERE], {}, {"alerts": NEW})
    partitions.begin_again([HERE], {"alerts": NEW}, {})
    partitions.assigned([THERE], {THERE: committed(3, OLD)}, {"alerts": NEW})
    partitions.take({HERE: records(0), THERE: records(3)})
    assert set(partitions.moved([HERE, THERE], {"alerts": NEW})) == set()
    assert partitions.begin_again([HERE, THERE], {"alerts": NEW}, {}) == ({"alerts"}, [THERE])
    assert partitions.begin_again([HERE, THERE], {"alerts": NEW}, {}) == (set(), [])


def test_a_position_of_a_log_that_the_metadata_does_not_name_yet_is_given_up_once_it_names_another() -> None:
    partitions = reading()
    partitions.assigned([HERE], {HERE: committed(3, OLD)}, {})
    assert partitions.begin_again([HERE], {}, {}) == (set(), [])
    assert partitions.begin_again([HERE], {"alerts": NEW}, {}) == ({"alerts"}, [HERE])


@pytest.mark.parametrize("metadata", ["", "etude:2-4", "somebody's", f"somebody's {OLD.hex}"])
def test_positions_that_name_no_log_hold_as_before(metadata: str) -> None:
    partitions = reading()
    partitions.assigned([HERE], {HERE: OffsetAndMetadata(3, metadata, -1)}, {"alerts": NEW})
    assert partitions.begin_again([HERE], {"alerts": NEW}, {}) == (set(), [])
    taken = [item.offset for item, _ in partitions.take({HERE: records(3, 4, 5, 6, 7)})]
    assert taken == ([3, 4] if metadata.startswith("etude:") else [3, 4, 5, 6, 7])


def test_what_is_committed_names_its_log_and_is_not_committed_twice() -> None:
    partitions = reading()
    partitions.assigned([HERE], {HERE: committed(3, OLD)}, {"alerts": OLD})
    partitions.begin_again([HERE], {"alerts": OLD}, {})
    for item, _ in partitions.take({HERE: records(3, 4, 5)}):
        if item.offset != 4:
            item.lease.tracker.done(item.offset)
    moved = partitions.moved([HERE], {"alerts": OLD})
    assert moved == {HERE: committed(4, OLD, "etude:1")}
    partitions.committed(moved)
    assert partitions.moved([HERE], {"alerts": OLD}) == {}
    heir = reading()
    heir.assigned([HERE], moved, {"alerts": OLD})
    assert [item.offset for item, _ in heir.take({HERE: records(4, 5, 6)})] == [4, 6]


@pytest.mark.parametrize("group", ["g", None])
def test_every_reader_finds_what_retention_deleted_while_it_read(group: str | None) -> None:
    partitions = reading(group)
    partitions.take({HERE: records(0, 1)})
    came = {HERE: records(7)}
    assert partitions.to_ask([HERE], {HERE: records(2)}) == []
    assert partitions.to_ask([HERE], came) == [HERE]
    assert partitions.gone({HERE: 7}, came) == [Gone("alerts", 0, first=2, last=6, count=5)]
    assert partitions.to_ask([HERE], came) == []


@given(st.sampled_from(["", "etude:1", "etude:1-3,5"]), st.uuids())
def test_metadata_says_what_was_put_into_it(finished: str, log: UUID) -> None:
    assert unmarked(marked(finished, log)) == (finished or "etude:", log)
    assert unmarked(marked(finished, None)) == (finished, None)
