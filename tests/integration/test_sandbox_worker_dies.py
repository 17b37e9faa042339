"""What is left of sandboxes whose worker was killed by `kill -9`, and whose users live sandboxes are. Looked at from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.sandbox.contract import Base, Sandboxes
from tests.integration.sandbox_attacks import (
    ADAPTERS,
    ROOT,
    adapters,
    cgroups_of,
    end_marked,
    marked,
    mounts_at,
    of_user,
    user_of,
)
from tests.integration.sandbox_worker import AT_ONCE, LIMITS, adapter
from tests.patience import until, within

SANDBOXES = 32
GONE_S = 60.0
PROJECT = Path(__file__).parents[2]


@pytest.fixture
def state() -> Iterator[Path]:
    """A folder that users of sandboxes can reach, as pytest's own is not."""
    place = Path(tempfile.mkdtemp(prefix="etude-workers-"))
    place.chmod(0o755)
    before = tempfile.tempdir
    yield place / "state"
    tempfile.tempdir = before
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def mark() -> Iterator[str]:
    mark = str(10**9 + int.from_bytes(os.urandom(3), "big"))
    yield mark
    end_marked(mark)


@contextlib.contextmanager
def worker(name: str, state: Path, count: int, mark: str) -> Iterator[subprocess.Popen[str]]:
    """A worker that is ready."""
    command = [sys.executable, "-m", "tests.integration.sandbox_worker", name, str(state), str(count), mark]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def sleepers(mark: str) -> set[int]:
    """Return the daemons and programs of a worker: not the worker itself, which has the mark in its arguments, too."""
    found = set()
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            if Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")[0].endswith(b"sleep"):
                found.add(pid)
    return found


def wait_for_sleepers(process: subprocess.Popen[str], mark: str, sandboxes: int) -> None:
    """Wait for a daemon and a program in each sandbox. Raises TimeoutError, which says what there was instead."""
    try:
        until(lambda: len(sleepers(mark)) == 2 * sandboxes, "all sleepers")
    except TimeoutError as error:
        worker = "lives" if process.poll() is None else f"ended with {process.returncode}"
        raise TimeoutError(f"{error}; the worker {worker}; found {found_asleep(mark)} of {sandboxes} each") from None


def found_asleep(mark: str) -> str:
    """Return how many daemons and programs there are, and which users have not one of each."""
    daemons, programs = Counter[int](), Counter[int]()
    for pid in sleepers(mark):
        with contextlib.suppress(OSError):
            (daemons if os.getsid(pid) == pid else programs)[user_of(pid)] += 1  # `setsid` makes a session of its own
    users = sorted(daemons.keys() | programs.keys())
    uneven = [f"user {user} has {daemons[user]} and {programs[user]}" for user in users]
    uneven = [text for text in uneven if not text.endswith(" has 1 and 1")]
    counts = f"{daemons.total()} daemons and {programs.total()} programs of {len(users)} users"
    return f"{counts} ({', '.join(uneven) or 'one of each for every user'})"


def test_the_naive_sandbox_leaves_everything(state: Path, mark: str) -> None:
    with worker("naive", state, 2, mark) as process:
        wait_for_sleepers(process, mark, 2)
    asyncio.run(reaped(adapter("naive", state)))
    assert not within(lambda: not sleepers(mark), 1.0, "sandboxes end although their worker lives")
    assert len(list(state.iterdir())) == 2


@pytest.mark.parametrize("name", adapters())
def test_nothing_is_left_of_a_killed_worker(name: str, state: Path, mark: str) -> None:
    kept = asyncio.run(used_once(adapter(name, state), state))
    with worker(name, state, SANDBOXES, mark) as process:
        wait_for_sleepers(process, mark, SANDBOXES)
        users = {user_of(pid) for pid in sleepers(mark)} - {os.geteuid()}
        groups = {group for pid in sleepers(mark) for group in cgroups_of(pid)}
    sandboxes = adapter(name, state)
    asyncio.run(reaped(sandboxes))
    until(lambda: not marked(mark), seconds=GONE_S)
    until(lambda: not [pid for user in users for pid in of_user(user)], seconds=GONE_S)
    until(lambda: not [group for group in groups if group.exists()], seconds=GONE_S)
    assert not mounts_at(state)
    assert {path.relative_to(state) for path in state.rglob("*")} == kept


async def reaped(sandboxes: Sandboxes) -> int:
    try:
        return await sandboxes.reap()
    finally:
        await sandboxes.close()


async def used_once(sandboxes: Sandboxes, state: Path) -> set[Path]:
    """Return what an adapter keeps between sandboxes, such as an unpacked base."""
    try:
        sandbox = await sandboxes.open(Base(), LIMITS)
        await sandbox.close()
    finally:
        await sandboxes.close()
    return {path.relative_to(state) for path in state.rglob("*")}


@pytest.mark.parametrize("name", adapters())
@pytest.mark.parametrize("count", [48, pytest.param(256, marks=pytest.mark.nightly)])
@pytest.mark.skipif(not ROOT, reason="without root all sandboxes belong to the user who opens them")
def test_every_live_sandbox_has_a_user_of_its_own(name: str, count: int, state: Path, mark: str) -> None:
    async def scenario() -> set[int]:
        sandboxes = adapter(name, state)
        try:
            for begin in range(0, count, AT_ONCE):
                await asyncio.gather(*(one(sandboxes) for _ in range(begin, min(begin + AT_ONCE, count))))
            return {user_of(pid) for pid in sleepers(mark)}
        finally:
            await sandboxes.close()

    async def one(sandboxes: Sandboxes) -> None:
        sandbox = await sandboxes.open(Base(), LIMITS)
        await sandbox.spawn(["/bin/sleep", mark])

    assert name in ADAPTERS
    users = asyncio.run(scenario())
    assert len(users) == count
    assert not users & {0, 65534}
    until(lambda: not sleepers(mark))
