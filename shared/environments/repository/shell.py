"""A shell that lives as long as the attempt: its folder, variables, functions and background processes stay from one
command to the next.

The command runs in a session of the sandbox (shared.sandbox.contract). A command past its time limit is interrupted, and what
it started is killed. If the shell does not come back from that, its session ends; the next command begins a new one in the
last known folder. Errors go to the output, in the order in which they were written.
"""

from __future__ import annotations

import re
import secrets
import shlex
from dataclasses import dataclass

from shared.sandbox.contract import Cause, Sandbox, Session

# A session that has just begun does not have the function: it goes to the folder of the one before. The function gives the
# script the command's exit code. `jobs -p` and `$!` say which processes the shell has put into the background.
_SCRIPT = (
    "command -v etude_ended >/dev/null || {{ etude_ended() {{ return $1; }}; cd -- {folder} 2>/dev/null; }}; "
    "eval {command} 2>&1; etude_status=$?; printf '%s' {mark} \"$PWD\" {mark} \"${{!-}}\" ' ' >&2; "
    "jobs -p >&2 2>/dev/null; etude_ended $etude_status"
)
_RENEWED = (
    b"[this is a new session on another machine: variables, background processes and files outside of the work directory "
    b"are gone]\n"
)
_JOB = re.compile(rb"^\[\d+\] (\d+)\n", re.MULTILINE)  # what an interactive shell says of a process in the background


@dataclass(frozen=True, slots=True)
class ShellResult:
    """`exit_code`: None where the command was killed at a limit. `cause`: why it ended. `lost_bytes`: left out of the middle of
    `output`, which held more than is kept. `ended`: the session is over, with all its variables and processes."""

    output: bytes
    exit_code: int | None
    cause: Cause = Cause.exited
    lost_bytes: int = 0
    ended: bool = False


class Shell:
    """One session; another one takes its place when it ends. Used by one call at a time."""

    def __init__(self, sandbox: Sandbox, folder: str) -> None:
        self._sandbox, self._folder = sandbox, folder
        self._session: Session | None = None
        self._notice = b""

    @property
    def folder(self) -> str:
        """Return the folder that the session was in last."""
        return self._folder

    def renew(self, folder: str) -> None:
        """Begin in another folder, in the place of a shell on another machine; the next output says so."""
        self._folder, self._notice = folder, _RENEWED

    async def run(self, command: str, time_s: float) -> ShellResult:
        """Run a command. Raises SandboxUnavailable."""
        if "\0" in command:
            return ShellResult(b"the command has a NUL character; a shell cannot hold one", 2)
        if self._session is None:
            self._session = await self._sandbox.session()
        mark = secrets.token_hex(16)
        text = command.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
        script = _SCRIPT.format(folder=shlex.quote(self._folder), command=shlex.quote(text), mark=mark)
        done = await self._session.run(script, time_s=time_s)
        said, *told = done.stderr.split(mark.encode())
        if len(told) == 2:
            self._folder = told[0].decode(errors="surrogateescape") or self._folder
        output = without_jobs(done.stdout, told[1].split() if len(told) == 2 else None)
        if done.fresh:  # the shell itself may have said that it ends
            output = output.removesuffix(b"exit\n")
        output, self._notice = self._notice + output, b""
        return ShellResult(output + said, done.exit_code, done.cause, done.lost_bytes, done.fresh)

    async def close(self) -> None:
        """End the session and everything that it started. The next command starts another."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


def without_jobs(output: bytes, pids: list[bytes] | None) -> bytes:
    """Return the output without the shell's remarks on processes that it put into the background. `pids`: theirs; None: not
    known, as a command was killed."""
    return _JOB.sub(lambda found: b"" if pids is None or found[1] in pids else found[0], output)
