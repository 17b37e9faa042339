"""Sandboxes for any event loop: when they are closed, nobody waits and nothing is left."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from shared.sandbox import SandboxUnavailable
from shared.sandbox.any_loop import AnyLoopSandboxes
from shared.sandbox.bubblewrap_sandboxes import BubblewrapSandboxes
from shared.sandbox.contract import Base, Limits
from tests.contract.sandboxes import NO_BWRAP
from tests.patience import patient

pytestmark = [
    pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]


def test_a_close_ends_the_calls_in_progress_and_refuses_later_ones(tmp_path: Path) -> None:
    sandboxes = AnyLoopSandboxes(BubblewrapSandboxes(tmp_path / "state", warm=0))

    async def scenario() -> None:
        sandbox = await sandboxes.open(Base(), Limits())
        session, program = await sandbox.session(), await sandbox.spawn(["/bin/sh", "-c", "sleep 600"])
        calls: list[Awaitable[Any]] = [
            session.run("sleep 600", time_s=600.0),
            program.receive(10),
            sandboxes.open(Base(), Limits()),
        ]
        waiting = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(asyncio.run, sandboxes.close())  # from another loop
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(one) for one in found] == [SandboxUnavailable] * 3
        for later in (sandboxes.open(Base(), Limits()), sandboxes.reap(), sandbox.session(), program.send(b"x")):
            with pytest.raises(SandboxUnavailable, match="were closed"):
                await later
        await program.kill()
        await session.close()
        await sandbox.close()
        await sandboxes.close()

    asyncio.run(asyncio.wait_for(scenario(), patient(60)))
    assert list((tmp_path / "state").iterdir()) == []


def test_sandboxes_that_were_never_used_stay_closed() -> None:
    sandboxes = AnyLoopSandboxes(BubblewrapSandboxes(warm=0))
    asyncio.run(sandboxes.close())
    with pytest.raises(SandboxUnavailable, match="were closed"):
        asyncio.run(sandboxes.open(Base(), Limits()))
    assert sandboxes._home._thread is None


def test_a_caller_that_is_cancelled_is_cancelled(tmp_path: Path) -> None:
    sandboxes = AnyLoopSandboxes(BubblewrapSandboxes(tmp_path / "state", warm=0))

    async def scenario() -> None:
        session = await (await sandboxes.open(Base(), Limits())).session()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await session.run("sleep 600", time_s=600.0)
        await sandboxes.close()

    asyncio.run(asyncio.wait_for(scenario(), patient(60)))


def test_a_sandbox_opens_though_another_thread_has_set_a_default_timeout(tmp_path: Path) -> None:
    """Celery sets the process's default timeout for as long as it connects."""
    sandboxes = AnyLoopSandboxes(BubblewrapSandboxes(tmp_path / "state", warm=0))

    async def scenario() -> None:
        session = await (await sandboxes.open(Base(), Limits())).session()
        assert (await session.run("echo here", time_s=60.0)).stdout == b"here\n"
        await sandboxes.close()

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(1.0)
    try:
        asyncio.run(asyncio.wait_for(scenario(), patient(120)))
    finally:
        socket.setdefaulttimeout(before)
