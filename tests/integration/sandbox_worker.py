"""A worker process that opens sandboxes and is killed: `python -m tests.integration.sandbox_worker ADAPTER STATE COUNT MARK`.

In each sandbox a daemon, a program and a file are left. It prints `ready` and waits. On its standard error it says what went wrong:
what a script gave that failed, for which it ends before it is ready, and why a sandbox has ended meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shared.sandbox import SandboxUnavailable
from shared.sandbox.contract import Base, Capability, Cause, Limits, Program, Sandbox, Sandboxes
from tests.integration.naive_sandbox import NaiveSandboxes
from tests.integration.sandbox_attacks import ADAPTERS

AT_ONCE = 4
LIMITS = Limits(memory_mb=64, disk_mb=4096, processes=16, seconds=600.0)


def adapter(name: str, state: Path) -> Sandboxes:
    state.mkdir(exist_ok=True)
    if name == "naive":
        tempfile.tempdir = str(state)
        return NaiveSandboxes()
    return ADAPTERS[name].make(state)


async def occupy(sandboxes: Sandboxes, mark: str) -> tuple[Sandbox, Program]:
    sandbox = await sandboxes.open(Base(), LIMITS)
    program = await sandbox.spawn(["/bin/sleep", mark])
    session = await sandbox.session()
    script = f"echo x > file; env -i setsid -f /bin/sleep {mark} >/dev/null 2>&1 </dev/null"
    result = await session.run(script, time_s=60.0)
    if result.exit_code != 0 or result.cause is not Cause.exited:
        raise RuntimeError(f"a daemon was not left: {result}")
    if Capability.snapshot in sandboxes.capabilities:
        await sandbox.snapshot()
    return sandbox, program


async def tell_ends(occupied: Sequence[tuple[Sandbox, Program]]) -> None:
    """Say which programs have ended, and whether their sandboxes have: nothing here ends them."""
    told = set[int]()
    while True:
        await asyncio.sleep(0.1)
        for number, (sandbox, program) in enumerate(occupied):
            if not program.alive and number not in told:
                told.add(number)
                try:
                    await sandbox.session()
                    why = "its sandbox lives"
                except SandboxUnavailable as error:
                    why = f"its sandbox does not live: {error}"
                print(f"the program of sandbox {number} has ended; {why}", file=sys.stderr, flush=True)


async def main(name: str, state: str, count: str, mark: str) -> None:
    sandboxes = adapter(name, Path(state))
    occupied: list[tuple[Sandbox, Program]] = []
    for begin in range(0, int(count), AT_ONCE):
        several = (occupy(sandboxes, mark) for _ in range(begin, min(begin + AT_ONCE, int(count))))
        occupied += await asyncio.gather(*several)
    print("ready", flush=True)
    async with asyncio.timeout(600):
        await tell_ends(occupied)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
