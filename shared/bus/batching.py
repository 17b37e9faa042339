"""For consumers that work in bulk: one transaction, one acknowledgement for many deliveries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from shared.bus import Delivery


async def batches(deliveries: AsyncIterator[Delivery], max_size: int, linger_s: float) -> AsyncIterator[list[Delivery]]:
    """Lists of 1 to `max_size` deliveries, in order; a list waits at most `linger_s` seconds for more after its first.

    `max_size` must not exceed the `max_in_flight` of `deliveries`, or a full list never comes before the linger ends.
    Nothing is acknowledged here.
    """
    if max_size < 1:
        raise ValueError(f"max_size: found {max_size}, allowed: at least 1")
    loop = asyncio.get_running_loop()
    pending: asyncio.Task[Delivery] | None = None

    async def following() -> Delivery:
        return await anext(deliveries)

    try:
        while True:
            try:
                batch = [await (pending if pending else anext(deliveries))]
            except StopAsyncIteration:
                return
            pending = None
            deadline = loop.time() + linger_s
            while len(batch) < max_size:
                pending = pending or asyncio.ensure_future(following())
                await asyncio.wait({pending}, timeout=max(0.0, deadline - loop.time()))
                if not pending.done():
                    break
                if isinstance(pending.exception(), StopAsyncIteration):
                    break
                batch.append(pending.result())
                pending = None
            yield batch
    finally:
        if pending:
            pending.cancel()
