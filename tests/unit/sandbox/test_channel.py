"""Deadlines of requests to a sandbox: time in which this process stood still is not the sandbox's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from typing import Any

import pytest

from shared.sandbox import SandboxUnavailable
from shared.sandbox.channel import Channel
from shared.sandbox.inside import frames

WAIT_S = 0.5


def answer(theirs: socket.socket, late_s: float) -> None:
    """Answer each request of one byte stream, `late_s` after it has come."""
    splitter = frames.Splitter()
    while data := theirs.recv(1 << 16):
        for _, number, _ in splitter.feed(data):
            time.sleep(late_s)
            with contextlib.suppress(BrokenPipeError):  # given up
                theirs.sendall(frames.message(frames.ANSWER, number, {"late": late_s}))


async def asked(late_s: float, stands_still_s: float) -> dict[str, Any]:
    """Ask a loop that answers late, in a process that stands still when it has asked, as one that is stopped does."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=answer, args=(theirs, late_s))
    thread.start()
    channel = Channel(*await asyncio.open_unix_connection(sock=ours))
    try:
        asyncio.get_running_loop().call_later(0.05, time.sleep, stands_still_s)
        head, _ = await channel.ask({"do": "held"}, wait_s=WAIT_S)
        return head
    finally:
        await channel.close()
        await asyncio.to_thread(thread.join)
        theirs.close()


@pytest.mark.parametrize("late_s", [0.1, 0.9])
def test_a_process_that_stood_still_takes_the_answer_that_came_meanwhile(late_s: float) -> None:
    assert asyncio.run(asked(late_s, stands_still_s=2 * WAIT_S)) == {"late": late_s}


def test_a_loop_that_does_not_answer_in_time_has_ended() -> None:
    with pytest.raises(SandboxUnavailable, match="no answer to 'held' within"):
        asyncio.run(asked(3 * WAIT_S, stands_still_s=0.0))
