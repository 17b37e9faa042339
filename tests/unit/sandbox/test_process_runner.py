"""The runner without isolation: its harness is made once, however many start it at the same time."""

from __future__ import annotations

import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.sandbox import process


def test_runners_that_start_at_once_all_start():
    process._tree.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        started = [future.result() for future in [pool.submit(process.start) for _ in range(4)]]
    assert all(runner.process.poll() is None for runner in started)
    for runner in started:
        runner.kill()


def test_a_runner_waits_for_its_order_though_its_parent_had_a_default_timeout():
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(1.0)
    try:
        runner = process.start()
    finally:
        socket.setdefaulttimeout(before)
    try:
        with pytest.raises(subprocess.TimeoutExpired):  # it would end at once
            runner.process.wait(0.5)
    finally:
        runner.kill()
