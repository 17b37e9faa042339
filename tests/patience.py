"""How long tests wait for what must happen. Not for windows that show that something does not happen, nor for what is measured.

A test waits for an event: `await eventually(condition, "what is awaited")`, or `until(…)` without asyncio. It is told what it
waited for when the deadline passes. `patient` is the deadline alone, for what waits by other means.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

# ETUDE_TEST_PATIENCE, else 3 where CI is set: other work may run beside the tests there.
FACTOR = float(os.environ.get("ETUDE_TEST_PATIENCE") or (3 if os.environ.get("CI") else 1))
MOST_S = 1800.0  # a test that hangs ends before the check does
LOOK_S = 0.02

T = TypeVar("T")


def patient(seconds: float) -> float:
    """Return the deadline, in seconds, on a machine that may be busy with other work."""
    return seconds * FACTOR


def limit(seconds: float) -> float:
    """Return the limit of a whole test, which the deadlines within it never exceed: they grow together."""
    return min(patient(seconds), max(seconds, MOST_S))


async def eventually(
    look: Callable[[], T | Awaitable[T]], what: str = "", seconds: float = 30.0, every: float = LOOK_S
) -> T:
    """Look until `look` returns something true, and return that. Raise TimeoutError with `what` after `seconds`, made patient."""
    deadline = time.monotonic() + patient(seconds)
    while True:
        found = look()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(_late(look, what, seconds))
        await asyncio.sleep(every)


def until(look: Callable[[], T], what: str = "", seconds: float = 30.0, every: float = LOOK_S) -> T:
    """As `eventually`, for a test without asyncio."""
    deadline = time.monotonic() + patient(seconds)
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(_late(look, what, seconds))
        time.sleep(every)
    return found


def within(look: Callable[[], object], seconds: float, why: str) -> bool:
    """Return whether `look` returns something true within `seconds`, never made patient: a window for what must not happen.
    `why`: what would be wrong."""
    assert why
    deadline = time.monotonic() + seconds
    while not (found := bool(look())) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return found


async def quiet(seconds: float, why: str) -> None:
    """Let `seconds` pass, never made patient: a window in which something must not happen, where no event says that it did not.
    `why`: what must not happen."""
    assert why
    await asyncio.sleep(seconds)


def still(seconds: float, why: str) -> None:
    """As `quiet`, for a test without asyncio."""
    assert why
    time.sleep(seconds)


def _late(look: Callable[[], object], what: str, seconds: float) -> str:
    return f"{what or getattr(look, '__qualname__', look)}: not within {patient(seconds):g} s"
