"""Several threads parse Python at the same time, while finalizers run in between."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared import syntax

SOURCE = "\n".join(f"def f{i}():\n    assert f({i}, [1, (2, 3 + {i})]) == {{'a': [{i}]}}" for i in range(100))


class Cycle:
    """Garbage whose finalizer lets another thread run."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        for _ in range(200):
            pass


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Collect garbage often, and let threads take turns often."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)


def parsed(_: int) -> int:
    for _ in range(50):
        Cycle()
    return len(syntax.parse(SOURCE).body)


def test_threads_that_parse_at_the_same_time_all_get_their_trees() -> None:
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(parsed, range(60))) == [100] * 60
