"""Who waits for problems to be checked sees how many are done and how long the rest takes, on a terminal and in a file."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from shared.environments import Outcome, progress
from shared.environments.admitting import FEW, admitted


class Slow:
    """An environment whose gate takes every batch. `admits_once`: as function problems say."""

    def __init__(self, admits_once: bool) -> None:
        self.admits_once, self.batches = admits_once, list[int]()

    async def admit(self, pairs: Sequence[tuple[Any, Any]]) -> list[Outcome]:
        self.batches.append(len(pairs))
        return [Outcome(problem, hidden) for problem, hidden in pairs]


@pytest.mark.parametrize(("once", "sizes"), [(False, [FEW, FEW, 1]), (True, [2 * FEW + 1])])
def test_the_progress_of_problems_that_are_graded_many_times_is_told_after_a_few(once: bool, sizes: list[int]) -> None:
    environment, done = Slow(once), list[int]()
    registry: Any = SimpleNamespace(named=lambda kind: environment)
    pairs = [(SimpleNamespace(kind="slow", id=str(i)), None) for i in range(2 * FEW + 1)]
    outcomes = asyncio.run(admitted(registry, pairs, done.append))
    assert [one.problem.id for one in outcomes] == [problem.id for problem, _ in pairs]
    assert environment.batches == sizes
    assert done == [sum(sizes[: i + 1]) for i in range(len(sizes))]


def test_a_file_gets_the_number_and_now_and_then_how_many_are_done_and_how_long_the_rest_takes() -> None:
    out, now = io.StringIO(), [0.0]
    with progress.shown("p.jsonl", 24, Console(file=out, force_terminal=False), lambda: now[0]) as tell:
        for done, seconds in ((4, 5.0), (8, 20.0), (12, 21.0), (16, 40.0)):
            now[0] = seconds
            tell(done)
    assert out.getvalue().splitlines() == [
        "p.jsonl: run in the sandbox: 24 problems",
        "p.jsonl: run in the sandbox: 8 of 24, 20 s, about 40 s left",
        "p.jsonl: run in the sandbox: 16 of 24, 40 s, about 20 s left",
    ]


def test_a_terminal_gets_a_bar() -> None:
    out = io.StringIO()
    with progress.shown("p.jsonl", 24, Console(file=out, force_terminal=True, width=120)) as tell:
        tell(4)
    assert "p.jsonl: run in the sandbox" in out.getvalue()
    assert "/24" in out.getvalue()
