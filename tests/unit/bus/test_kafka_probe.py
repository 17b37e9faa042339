"""Asking a broker that is not there, again and again, costs nothing that lasts."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from shared.bus import BusUnavailable, connect, kafka_probe


@pytest.fixture
def silence() -> Iterator[None]:
    """pytest keeps what was logged, sockets with it."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("silence")
def test_questions_without_an_answer_leave_no_threads_and_no_files_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_probe, "ANSWER_WITHIN_MS", 200)
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"kafka://127.0.0.1:{taken.getsockname()[1]}"

        async def scenario() -> None:
            bus = connect(url, client="test")
            held = []
            for _ in range(4):
                with pytest.raises(BusUnavailable, match=r"kafka 127\.0\.0\.1"):
                    await bus.ping()
                gc.collect()  # some sockets are closed by it alone
                held.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
            await bus.close()
            # Threads and files of earlier tests may end meanwhile.
            assert all(last <= first for first, last in zip(held[0], held[-1], strict=True)), held

        asyncio.run(asyncio.wait_for(scenario(), 60))
