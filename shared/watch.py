"""A server that a service only listens to, asked every few seconds whether it answers.

Who only listens cannot tell a server that is silent from one that is away: nothing comes in both cases. So it is asked, and
`/readyz` says since when it has not answered, and why. Nothing is decided by it: reading and publishing go on trying by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from shared.telemetry import Health

ASK_EVERY_S, WITHIN_S = 5.0, 5.0

log = structlog.get_logger()


@contextlib.asynccontextmanager
async def watched(
    health: Health, what: str, ask: Callable[[], Awaitable[object]], away: tuple[type[Exception], ...]
) -> AsyncIterator[None]:
    """`what` is waited on from the start until `ask` returns, and whenever it raises or takes longer than WITHIN_S.
    `away`: what it raises of a server that is away; anything else is logged with its traceback."""
    health.wait_on(what)
    watching = asyncio.create_task(_watch(health, what, ask, (*away, TimeoutError)))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(
    health: Health, what: str, ask: Callable[[], Awaitable[object]], away: tuple[type[Exception], ...]
) -> None:
    silent = False
    while True:
        try:
            async with asyncio.timeout(WITHIN_S):
                await ask()
            health.clear(what)
            health.tell(what, None)
            silent = False
        except Exception as error:  # whatever it is: a watch that ends would leave its last word standing
            health.wait_on(what)
            said = str(error) or f"no answer within {WITHIN_S:.0f} s"
            health.tell(what, said)
            if not silent:
                log.warning("no_answer", waits_on=what, error=said, exc_info=not isinstance(error, away))
            silent = True
        await asyncio.sleep(ASK_EVERY_S)
