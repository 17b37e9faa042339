"""Runs coroutines at the same time, and leaves none running when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Found = TypeVar("Found")


async def together(work: Iterable[Coroutine[Any, Any, Found]]) -> list[Found]:
    """Return the results in order. When one raises, cancel the others, wait for their end, and raise its error alone.
    `asyncio.gather` would leave them running."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failed:
        first = failed.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first
