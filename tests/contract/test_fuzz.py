"""10,000 damaged messages per topic: the bad ones become dead letters with a reason, the good ones arrive, nobody stops."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shared.bus import dead_letters
from shared.contracts.codec import Raw
from shared.contracts.topics import TOPICS, Topic
from tests.contract.bus_world import go, world
from tests.contract.fuzzing import fuzzed, good, readable

__all__ = ["go", "world"]

NUMBER = 10_000
AT_A_TIME = 500


@pytest.mark.parametrize("topic", TOPICS.values(), ids=list(TOPICS))
def test_every_message_is_read_or_refused_with_a_reason(topic: Topic) -> None:
    verdicts = [readable(topic, raw) for raw in fuzzed(topic, NUMBER, seed=1)]
    assert 0.05 * NUMBER < sum(verdicts) < 0.5 * NUMBER  # both kinds are many


@pytest.mark.parametrize("topic", TOPICS.values(), ids=list(TOPICS))
def test_what_is_too_large_is_refused_whatever_it_says(topic: Topic) -> None:
    import random

    one = good(topic, random.Random(1))
    for size in (1 << 17, 1 << 24):
        assert not readable(topic, Raw(one.data[:-1] + b" " * size + b"}", one.headers))


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", list(TOPICS))
def test_a_consumer_gets_all_good_ones_and_the_dead_letters_all_others(world, go, name, monkeypatch):
    monkeypatch.setattr("tests.contract.bus_world.PATIENCE_S", 600.0)
    topic = replace(TOPICS[name], name=f"{world.topic.name}.{name}", compacted=False)
    messages = list(fuzzed(topic, NUMBER, seed=2))
    bad = [raw for raw in messages if not readable(topic, raw)]

    async def scenario():
        bus = world.open()
        raw_topic = replace(topic, types=(Raw,))
        for first in range(0, NUMBER, AT_A_TIME):
            some = enumerate(messages[first : first + AT_A_TIME])
            await bus.publish_many([(raw_topic, str(first + i), raw) for i, raw in some])
        deliveries = bus.deliveries([topic], world.group, 256)
        for _ in range(NUMBER - len(bad)):
            (await anext(deliveries)).done()
        letters = bus.deliveries([dead_letters(topic)], world.group, 256)
        found = []
        for _ in bad:
            letter = await anext(letters)
            assert letter.message.headers["dead-letter-reason"]
            found.append(letter.message.data)
            letter.done()
        assert sorted(found) == sorted(raw.data for raw in bad)
        while await bus.lag([topic], world.group) != {topic.name: 0}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    go(scenario)
