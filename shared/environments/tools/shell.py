"""`shell`: a command in the attempt's session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.environments import ToolSpec
from shared.environments.tools import Toolbox, parameters

LIMITS = {
    "memory_limit": "out of memory",
    "disk_limit": "the disk is full",
    "process_limit": "too many processes",
}


class Tool:
    spec = ToolSpec(
        "shell",
        "Run a bash command. The session keeps its folder and variables.",
        parameters({"command": "string"}),
        "runs",
    )

    async def run(self, box: Toolbox, arguments: Mapping[str, Any]) -> str:
        done = await box.shell.run(arguments["command"], box.command_s)
        text = done.output.decode("utf-8", "replace").rstrip("\n")
        gone = "; a new session begins, its variables and processes are gone" if done.ended else ""
        if done.cause == "time_limit":
            note = f"[killed after {box.command_s:g} s{gone}]"
        elif done.cause in LIMITS:
            ending = "killed" if done.exit_code is None else f"exit code {done.exit_code}"
            note = f"[{ending}: {LIMITS[done.cause]}{gone}]"
        elif done.ended:
            note = "[the session ended; a new one begins with the next command]"
        elif done.exit_code:
            note = f"[exit code {done.exit_code}]"
        else:
            return text or "[no output]"
        return f"{text}\n{note}".lstrip("\n")
