"""Gradings at a time: a machine runs as many as it has processors, whoever asks for them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.trajectory import Change, Submission
from shared.environments import Grading, Places, Ungradable
from shared.environments.repository import RepositoryEnvironment, grading, trees
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.objects.directory import DirectoryObjects
from shared.sandbox.contract import NO_NETWORK, Base, Limits, Network, Sandbox, Snapshot

HIDDEN = RepositoryHidden(id="p", fail_to_pass=["test_x.py::test_x"], solution={"x.py": Change(text="")})


class Full:
    """Sandboxes of a machine without room. `running`: starts at a time, for each start."""

    name = "bubblewrap"

    def __init__(self) -> None:
        self.now, self.running = 0, list[int]()

    async def open(
        self, base: Base, limits: Limits, network: Network = NO_NETWORK, *, snapshot: Snapshot | None = None
    ) -> Sandbox:
        self.now += 1
        self.running.append(self.now)
        for _ in range(200):  # for others to start: two at a time, and a third if the limit does not hold
            await asyncio.sleep(0.01)
            if self.now > 1:
                break
        await asyncio.sleep(0.02)
        self.now -= 1
        raise OSError("no room")


@pytest.fixture
def sandboxes() -> Full:
    return Full()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests: the runtime in it takes seconds to make."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def environment(tmp_path: Path, cache: Path, sandboxes: Any, monkeypatch: pytest.MonkeyPatch) -> RepositoryEnvironment:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return RepositoryEnvironment(Places(sandboxes=sandboxes, objects=DirectoryObjects(tmp_path), cache=cache))


@pytest.fixture
def problem(tmp_path: Path) -> RepositoryProblem:
    tree = trees.store_tree(DirectoryObjects(tmp_path), trees.encode({"x": trees.File(b"x")}))
    return RepositoryProblem(id="p", kind="repository", prompt="Do it.", tree=tree)


def test_batches_at_a_time_share_the_processors_also_in_the_next_event_loop(
    environment: RepositoryEnvironment, problem: RepositoryProblem, sandboxes: Full
) -> None:
    async def batches() -> None:
        batch = [Grading(problem, HIDDEN, Submission())] * 4
        found = await asyncio.gather(*(environment.grade(batch) for _ in range(3)))
        assert all(isinstance(one, Ungradable) for answers in found for one in answers)

    for _ in range(2):
        asyncio.run(batches())
    assert len(sandboxes.running) == 24
    assert max(sandboxes.running) == 2


def test_refused_solutions_are_explained_side_by_side_within_the_same_limit(
    environment: RepositoryEnvironment, problem: RepositoryProblem, sandboxes: Full
) -> None:
    outcomes = asyncio.run(environment.admit([(problem, HIDDEN)] * 4))
    assert [one.refused_by for one in outcomes] == ["oracle"] * 4
    explaining = sandboxes.running[4 * 3 :]
    assert len(explaining) == 4
    assert max(explaining) == 2


def test_where_nothing_is_to_be_written_no_server_of_files_is_started(
    problem: RepositoryProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    class Server:
        def __init__(self, sandbox: Any, python: str) -> None:
            started.append(sandbox)

        async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
            return {"refused": ""}

        async def close(self) -> None:
            pass

    monkeypatch.setattr(grading, "Files", Server)
    sandbox: Any = object()
    assert asyncio.run(grading._filled(sandbox, problem, {}, {})) == ""
    assert started == []
    for changes, tests in (({"x": Change(text="")}, {}), ({}, {"x": Change(text="")})):
        assert asyncio.run(grading._filled(sandbox, problem, changes, tests)) == ""
    assert started == [sandbox, sandbox]
