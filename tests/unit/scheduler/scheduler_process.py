"""Runs the scheduler service as a process of its own for tests: `python -m tests.unit.scheduler.scheduler_process`.

With ETUDE_TEST_DIE_AT=N the process kills itself (SIGKILL) when it is about to publish for the N-th time: after its
commit, before its relay. With ETUDE_TEST_DIE_AFTER=N it does so right after the N-th publication, before it is marked.
With ETUDE_TEST_FREEZE_AT=N it stops itself (SIGSTOP) in the N-th transaction of a term, with the lease's row locked.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection

from services.scheduler import __main__ as entry
from services.scheduler import store
from services.scheduler.config import SchedulerConfig
from shared.bus import Bus, watched
from shared.contracts.topics import Topic
from shared.settings import load
from shared.telemetry import configure_logs


def fatal(bus: Bus, before: int, after: int) -> Bus:
    """The same bus, deadly at its `before`-th publish_many, or after its `after`-th."""
    publish, calls = bus.publish_many, 0

    async def publish_many(items: Sequence[tuple[Topic, str, msgspec.Struct]]) -> None:
        nonlocal calls
        calls += 1
        if calls == before:
            os.kill(os.getpid(), signal.SIGKILL)
        await publish(items)
        if calls == after:
            os.kill(os.getpid(), signal.SIGKILL)

    bus.publish_many = publish_many  # type: ignore[method-assign]
    return bus


def freezing(check: Callable[[Connection, int | None], None], at: int) -> Callable[[Connection, int | None], None]:
    """The same check of the term, and at its `at`-th call the process stands still until it is told to go on."""
    calls = 0

    def check_term(connection: Connection, term: int | None) -> None:
        nonlocal calls
        check(connection, term)
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGSTOP)

    return check_term


def main() -> None:
    before, after = (int(os.environ.get(name, "0")) for name in ("ETUDE_TEST_DIE_AT", "ETUDE_TEST_DIE_AFTER"))
    connect = watched.connect

    def connected(url: str, **options: Any) -> Bus:
        return fatal(connect(url, **options), before, after)

    watched.connect = connected
    store._check_term = freezing(store._check_term, int(os.environ.get("ETUDE_TEST_FREEZE_AT", "0")))
    settings = load(SchedulerConfig)
    configure_logs("scheduler", settings)
    asyncio.run(entry.main(settings))


if __name__ == "__main__":
    main()
