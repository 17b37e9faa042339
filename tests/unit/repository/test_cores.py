"""A core that one grading claims is free for no other, until its block ends or its process dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shared.environments.repository.cores import claimed


@pytest.fixture(autouse=True)
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})


def test_claims_never_add_up_to_more_than_the_cores(tmp_path: Path) -> None:
    with claimed(tmp_path, 2) as first:
        with claimed(tmp_path, 2) as second, claimed(tmp_path, 2) as third:
            assert (first, second, third) == (2, 1, 0)
        with claimed(tmp_path, 2) as later:
            assert later == 1
    with claimed(tmp_path, 3) as all_:
        assert all_ == 3


def test_a_block_that_raises_lets_go(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wrong"), claimed(tmp_path, 3):
        raise ValueError("wrong")
    with claimed(tmp_path, 3) as free:
        assert free == 3


def test_a_process_that_dies_lets_go(tmp_path: Path) -> None:
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with claimed(tmp_path, 2):
            os.write(tell, b"!")
            signal.pause()
        os._exit(1)
    os.read(told, 1)
    with claimed(tmp_path, 3) as free:
        assert free == 1
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with claimed(tmp_path, 3) as free:
        assert free == 3


def test_a_child_that_has_the_claim_open_does_not_keep_it(tmp_path: Path) -> None:
    with claimed(tmp_path, 3):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(1)
    try:
        with claimed(tmp_path, 3) as free:
            assert free == 3
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
