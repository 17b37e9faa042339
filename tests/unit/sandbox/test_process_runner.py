"""The runner without isolation: its harness is made once, however many start it at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from shared.sandbox import process


def test_runners_that_start_at_once_all_start():
    process._tree.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        started = [future.result() for future in [pool.submit(process.start) for _ in range(4)]]
    assert all(runner.process.poll() is None for runner in started)
    for runner in started:
        runner.kill()
