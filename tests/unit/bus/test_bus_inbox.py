"""The inbox between a reading thread and its consumer: when the past of a broadcast has been read."""

from __future__ import annotations

import asyncio

from shared.bus.inbox import Inbox, Lease, Received
from shared.contracts.messages import Alert
from shared.contracts.topics import Topic

TOPIC = Topic("t", (Alert,))


def offer(inbox: Inbox, lease: Lease, *offsets: int) -> None:
    words = [Alert(run="r", name="n", severity="info", what=str(offset)) for offset in offsets]
    inbox.offer([Received(inbox, lease, "k", w, {}, o, b"") for o, w in zip(offsets, words, strict=True)])


def test_a_reader_that_broke_in_the_middle_of_the_past_counts_it_anew() -> None:
    async def scenario() -> None:
        inbox = Inbox(64, lambda: None)
        first = Lease(TOPIC, -1, 0)
        offer(inbox, first, 0, 1, 2, 3)
        inbox.past_read()
        knows = asyncio.create_task(inbox.caught_up())
        await inbox.take()  # one of four; then the connection breaks, and what nobody has taken is forgotten
        inbox.withdraw(first)
        assert inbox.past_again()
        again = Lease(TOPIC, -1, 0)
        offer(inbox, again, 0, 1, 2, 3)
        inbox.past_read()
        for _ in range(4):
            await asyncio.sleep(0)
            assert not knows.done()
            await inbox.take()
        await asyncio.wait_for(knows, 1)
        assert not inbox.past_again()  # it stays known, whatever breaks later
        await asyncio.wait_for(inbox.caught_up(), 1)

    asyncio.run(scenario())
