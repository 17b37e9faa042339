"""A session in a shell that was started before it was asked for: like a new one, within the sandbox's own limits."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shared.sandbox.bubblewrap_sandboxes import BubblewrapSandbox, BubblewrapSandboxes
from shared.sandbox.contract import Base, Limits
from shared.sandbox.inside import tree
from tests.patience import eventually

TIME_S = 60.0
LIMITS = Limits(memory_mb=256, disk_mb=64, processes=20)
SHOW = 'pwd; env | sort; umask; ulimit -u; ulimit -f; ulimit -Hf; set -o; shopt; trap; alias; jobs; echo "$- $0"'

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bwrap is not installed")


async def _opened(sandboxes: BubblewrapSandboxes, base: Base, *, prepared: bool) -> tuple[BubblewrapSandbox, int]:
    """Open a sandbox whose shell is prepared, or one without. Return it and the pid of the prepared shell."""
    if not prepared:
        return await sandboxes.open(base, LIMITS), 0

    def shell() -> int:
        machines = [place.machine for places in sandboxes._warm.values() for place in places]
        for machine in machines:
            for keeper in tree.children(machine.pid) if machine is not None else ():
                for pid in tree.children(keeper):
                    if Path(f"/proc/{pid}/comm").read_text() == "bash\n":
                        return pid
        return 0

    pid = await eventually(shell, "a prepared shell")
    await asyncio.gather(*sandboxes._filling)
    return await sandboxes.open(base, LIMITS), pid


def _within(state: Path, scenario: Callable[[BubblewrapSandboxes], Awaitable[None]]) -> None:
    async def run() -> None:
        sandboxes = BubblewrapSandboxes(state, warm=1)
        try:
            first = await sandboxes.open(Base(), LIMITS)  # the pool fills for the next
            await first.close()
            await scenario(sandboxes)
        finally:
            await sandboxes.close()

    asyncio.run(run())


@pytest.mark.parametrize("environment", [{}, {"A": "it's", "PATH": "/usr/bin:/bin"}], ids=str)
def test_it_is_like_a_new_one(tmp_path: Path, environment: dict[str, str]) -> None:
    base = Base(environment=environment)

    async def scenario(sandboxes: BubblewrapSandboxes) -> None:
        sandbox, pid = await _opened(sandboxes, base, prepared=True)
        prepared = await sandbox.session()
        assert Path(f"/proc/{pid}/comm").exists(), "the prepared shell was not taken"
        new = await sandbox.session()
        texts = [(await session.run(SHOW, time_s=TIME_S)).stdout for session in (prepared, new)]
        assert texts[0] == texts[1]
        assert b"\n65536\n65536\n" in texts[0]  # KiB; before its session the shell had no limit
        children = tree.children(sandbox._place.machine.pid) if sandbox._place.machine else []
        assert len(children) == 2

    _within(tmp_path / "state", scenario)


def test_an_environment_that_only_a_new_shell_can_have_gets_a_new_shell(tmp_path: Path) -> None:
    base = Base(environment={"BASH_ENV": "/nothing"})

    async def scenario(sandboxes: BubblewrapSandboxes) -> None:
        sandbox, pid = await _opened(sandboxes, base, prepared=True)
        session = await sandbox.session()
        assert (await session.run("echo $BASH_ENV", time_s=TIME_S)).stdout == b"/nothing\n"
        await eventually(lambda: not Path(f"/proc/{pid}").exists(), "the prepared shell's end")

    _within(tmp_path / "state", scenario)


def test_a_prepared_shell_sees_a_tree_and_a_snapshot_that_came_later(tmp_path: Path) -> None:
    tree_of_host = tmp_path / "tree"
    tree_of_host.mkdir()
    (tree_of_host / "file").write_text("of the tree")

    async def scenario(sandboxes: BubblewrapSandboxes) -> None:
        first, _ = await _opened(sandboxes, Base(), prepared=True)
        session = await first.session()
        await session.run("echo kept > kept", time_s=TIME_S)
        kept = await first.snapshot()
        await _opened(sandboxes, Base(), prepared=True)  # takes the one that waits; its successor gets the snapshot
        await eventually(lambda: any(sandboxes._warm.values()), "the next machine")
        second = await sandboxes.open(Base(), LIMITS, snapshot=kept)
        assert (await (await second.session()).run("cat kept", time_s=TIME_S)).stdout == b"kept\n"
        await first.restore(kept)
        assert (await session.run("cat kept", time_s=TIME_S)).stdout == b"kept\n"
        third = await sandboxes.open(replace(Base(), tree=tree_of_host), LIMITS)
        assert (await (await third.session()).run("cat file", time_s=TIME_S)).stdout == b"of the tree"

    _within(tmp_path / "state", scenario)
