"""`python -m tests.integration.sandbox_once STATE [OPTIONS]`: open one sandbox for an agent, run a command, close it. Prints one
JSON object.

OPTIONS, a JSON object: `tree` and `image`, folders that the sandbox begins with; `profile`, a container's seccomp profile that
holds this process from its start; `without`, the system calls that are taken out of the profile.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from shared.sandbox import SandboxUnavailable
from shared.sandbox.bubblewrap_sandboxes import BubblewrapSandboxes
from shared.sandbox.contract import Base, Limits


async def agent(state: Path, options: dict[str, Any]) -> dict[str, Any]:
    image = options.get("image")
    sandboxes = BubblewrapSandboxes(state, (lambda name: Path(image)) if image else None, warm=0)
    said: dict[str, Any] = {"memory_by": sandboxes.memory_by}
    try:
        tree = Path(options["tree"]) if "tree" in options else None
        sandbox = await sandboxes.open(Base("base:it" if image else "", tree), Limits(memory_mb=256, disk_mb=64))
        session = await sandbox.session()
        said["output"] = (await session.run("echo well", time_s=60.0)).stdout.decode()
    except SandboxUnavailable as error:
        said["refused"] = str(error)
    finally:
        await sandboxes.close()
    return said


def main(state: Path, options: dict[str, Any]) -> None:
    if "profile" in options:
        from tests.integration.under_profile import hold

        hold(json.loads(Path(options["profile"]).read_text()), set(options.get("without", ())))
    said = asyncio.run(agent(state, options))
    print(json.dumps({**said, "left": sorted(str(path.relative_to(state)) for path in state.rglob("*"))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
