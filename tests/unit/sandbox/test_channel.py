"""Deadlines of requests to a sandbox: time in which this process stood still is not the sandbox's."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from shared.sandbox import SandboxUnavailable
from shared.sandbox.channel import Channel
from shared.sandbox.inside import frames
from tests.patience import still

WAIT_S = 0.5


class Loop:
    """The other end: it answers a request when it may, and says when it has."""

    def __init__(self, theirs: socket.socket) -> None:
        self.may, self.asked, self.answered = threading.Event(), threading.Event(), threading.Event()
        self._theirs = theirs

    def serve(self) -> None:
        for _, number, _ in frames.Splitter().feed(self._theirs.recv(1 << 16)):
            self.asked.set()
            self.may.wait()
            with suppress(ConnectionError):  # nobody waits any more
                self._theirs.sendall(frames.message(frames.ANSWER, number, {"whole": 1}))
            self.answered.set()

    def answers_while_this_process_stands_still(self) -> None:
        """Called by the event loop, which can do nothing meanwhile."""
        self.asked.wait()
        self.may.set()
        self.answered.wait()
        still(2 * WAIT_S, "a deadline that passes while this process stands still ends the sandbox")


@contextmanager
def other_end() -> Iterator[tuple[socket.socket, Loop]]:
    ours, theirs = socket.socketpair()
    loop = Loop(theirs)
    thread = threading.Thread(target=loop.serve)
    thread.start()
    try:
        yield ours, loop
    finally:
        loop.may.set()
        thread.join()
        theirs.close()


def test_a_process_that_stood_still_takes_the_answer_that_came_meanwhile() -> None:
    async def scenario(ours: socket.socket, loop: Loop) -> None:
        channel = Channel(*await asyncio.open_unix_connection(sock=ours))
        try:
            asyncio.get_running_loop().call_later(0.05, loop.answers_while_this_process_stands_still)
            assert (await channel.ask({"do": "held"}, wait_s=WAIT_S))[0] == {"whole": 1}
        finally:
            await channel.close()

    with other_end() as (ours, loop):
        asyncio.run(scenario(ours, loop))


def test_a_loop_that_does_not_answer_in_time_has_ended() -> None:
    async def scenario(ours: socket.socket) -> None:
        channel = Channel(*await asyncio.open_unix_connection(sock=ours))
        try:
            with pytest.raises(SandboxUnavailable, match="no answer to 'held' within"):
                await channel.ask({"do": "held"}, wait_s=WAIT_S)
        finally:
            await channel.close()

    with other_end() as (ours, _):
        asyncio.run(scenario(ours))
