"""A worker process that opens sandboxes and is killed: `python -m tests.integration.sandbox_worker ADAPTER STATE COUNT MARK`.

In each sandbox a daemon, a program and a file are left. It prints `ready` and waits.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from shared.sandbox.contract import Base, Capability, Limits, Sandboxes
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


async def occupy(sandboxes: Sandboxes, mark: str) -> None:
    sandbox = await sandboxes.open(Base(), LIMITS)
    await sandbox.spawn(["/bin/sleep", mark])
    session = await sandbox.session()
    await session.run(f"echo x > file; env -i setsid -f /bin/sleep {mark} >/dev/null 2>&1 </dev/null", time_s=60.0)
    if Capability.snapshot in sandboxes.capabilities:
        await sandbox.snapshot()


async def main(name: str, state: str, count: str, mark: str) -> None:
    sandboxes = adapter(name, Path(state))
    for begin in range(0, int(count), AT_ONCE):
        await asyncio.gather(*(occupy(sandboxes, mark) for _ in range(begin, min(begin + AT_ONCE, int(count)))))
    print("ready", flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
