"""The console: topics read as broadcast → the board; requests → pages."""

from __future__ import annotations

import asyncio

import structlog

from services.console.board import Board
from shared.bus import Bus, Deliveries
from shared.contracts import topics as t
from shared.contracts.codec import sent_at
from shared.telemetry import Health

TOPICS = (
    t.RUNS_COMMANDS,
    t.RUNS_STATE,
    t.STEPS_COMMITTED,
    t.ROLLOUTS_FINISHED,  # for those that a worker lost; as many messages as the next has
    t.ROLLOUTS_SCORED,
    t.POLICIES_PUBLISHED,
    t.POLICIES_APPLIED,
    t.EVALS_FINISHED,
    t.ALERTS,
)
IN_FLIGHT = 256

log = structlog.get_logger()


async def read(deliveries: Deliveries, board: Board) -> None:
    """Everything from the start, then what comes. A message that the board cannot take is logged and passed over."""
    async for delivery in deliveries:
        try:
            board.apply(delivery.message, sent_at(delivery.headers))
        except Exception:
            log.exception("console.message", topic=delivery.topic.name, offset=delivery.offset)
        delivery.done()


async def serve(bus: Bus, board: Board, health: Health, stop: asyncio.Event) -> None:
    """Until `stop`. If the reading ends before, so does the service: the supervisor starts it again."""
    board.complete = False
    deliveries = bus.deliveries(TOPICS, None, IN_FLIGHT)
    reading = asyncio.create_task(read(deliveries, board))
    past = asyncio.create_task(deliveries.caught_up())
    stopping = asyncio.create_task(stop.wait())
    health.clear("messages")  # pages show what there is while the past is still read
    await asyncio.wait({reading, stopping, past}, return_when=asyncio.FIRST_COMPLETED)
    if past.done() and not past.exception():
        board.complete = True
        await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for task in (past, stopping):
        task.cancel()
    if not reading.done():
        reading.cancel()
    elif not stop.is_set():
        reading.result()
        raise RuntimeError("the bus ended the console's deliveries")
