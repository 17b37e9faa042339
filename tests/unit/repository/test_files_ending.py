"""The file server of a sandbox: what it writes is not trusted, and its end holds nobody up."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any

import pytest

from shared.environments import Brief, Call, InfrastructureError, Limits, SandboxGone, ToolSpec
from shared.environments.repository.files import Files
from shared.environments.repository.graders import pytest_runner
from shared.environments.repository.inside.files import MAX_ANSWER, encoded
from shared.environments.repository.shell import Shell
from shared.environments.repository.workspace import RepositoryWorkspace
from shared.environments.tools import Toolbox, load
from shared.sandbox import SandboxUnavailable
from shared.sandbox.contract import Cause, CommandResult

DEEP = b"[" * 100_000


class Server:
    """A program of a sandbox that answers each request with the same bytes, or with the same fields where there are none. Its
    output is slow to end."""

    alive = True

    def __init__(self, answer: bytes, ends_after_s: float, fields: Mapping[str, Any]) -> None:
        self._output: asyncio.Queue[bytes] = asyncio.Queue()
        self._answer, self._ends_after_s, self._fields = answer, ends_after_s, fields

    async def send(self, data: bytes) -> None:
        answer = self._answer or json.dumps({"id": json.loads(data[4:])["id"], **self._fields}).encode()
        await self._output.put(struct.pack(">I", len(answer)))
        await self._output.put(answer)

    async def receive(self, most: int) -> bytes:
        try:
            return await self._output.get()
        except asyncio.CancelledError:
            await asyncio.sleep(self._ends_after_s)
            raise

    async def kill(self) -> None:
        pass


class Servers:
    """The part of a sandbox that `Files` uses."""

    def __init__(self, answer: bytes = b"", ends_after_s: float = 0.0, **fields: Any) -> None:
        self._answer, self._ends_after_s, self._fields = answer, ends_after_s, fields

    async def spawn(self, argv: list[str]) -> Server:
        return Server(self._answer, self._ends_after_s, self._fields)

    async def close(self) -> None:
        pass


def workspace(sandbox: Any, *tools: ToolSpec) -> RepositoryWorkspace:
    box = Toolbox(Files(sandbox), Shell(sandbox, "/workspace"), "/workspace", 1.0)
    return RepositoryWorkspace(sandbox, box, Brief((), tools), Limits(turns=1, tokens=1), {})


def test_an_answer_that_is_nested_too_deeply_ends_the_server() -> None:
    sandbox: Any = Servers(DEEP)
    with pytest.raises(InfrastructureError, match="ended twice"):
        asyncio.run(Files(sandbox).ask("read"))


def test_closing_can_be_cancelled_while_the_server_ends() -> None:
    async def scenario() -> None:
        sandbox: Any = Servers(ends_after_s=0.2, data="", whole=True)
        files = Files(sandbox)
        await files.ask("read")
        async with asyncio.timeout(0.05):
            await files.close()

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())


def test_a_report_that_is_nested_too_deeply_is_forged() -> None:
    for forged in (DEEP, b'{"collected": [], "passed": [], "exit": ' + DEEP, b"[]", b"9" * 5000):
        done = CommandResult(0, Cause.exited, b"\nnonce " + forged, b"", 0.1)
        assert pytest_runner._read("nonce", ["good", "bad"], [done]).wrong == "Forged: the report cannot be read"


@pytest.mark.parametrize(
    "entries",
    [
        None,
        {"a": ["file", "x"]},
        {"a": ["file", "x", False, "12"]},
        {"a": ["file", "x", False, -1]},
        {"a": [[], "x", False, 1]},
        {"\ud800": ["file", "x", False, 1]},
        {"a": ["link", "\udcff", False, 0]},
        ["a"],
    ],
)
def test_a_scan_that_lies_submits_nothing_and_the_attempt_is_scored(entries: Any) -> None:
    fields = {} if entries is None else {"entries": entries}
    opened = workspace(Servers(**fields))
    assert asyncio.run(opened.submission()).changes == {}
    assert "invalid answer" in opened.notes["submission"]


@pytest.mark.parametrize(("tool", "arguments"), [("grep", {"pattern": "x"}), ("list", {}), ("read", {"path": "x"})])
@pytest.mark.parametrize("fields", [{}, {"matches": [3], "paths": 3, "data": "é", "whole": True, "more": 0}])
def test_a_lying_answer_fails_the_call_and_not_the_attempt(
    tool: str, arguments: dict[str, Any], fields: dict[str, Any]
) -> None:
    opened = workspace(Servers(**fields), load(tool).spec)
    (result,) = asyncio.run(opened.call([Call("1", tool, arguments, 0, 0)]))
    assert (result.ok, "invalid answer" in result.text) == (False, True)


def test_an_error_with_half_characters_can_be_kept_as_a_note() -> None:
    opened = workspace(Servers(error="\udcff"))
    asyncio.run(opened.submission())
    assert opened.notes["submission"].encode().endswith(b"?")


def test_an_answer_that_is_too_long_is_an_error_of_the_call() -> None:
    path = "x" * 3000
    data = encoded({"id": 7, "entries": {f"{path}{number}": [] for number in range(MAX_ANSWER // 3000)}})
    answer = json.loads(data)
    assert (len(data) < 1000, answer["id"]) == (True, 7)
    assert f"allowed: at most {MAX_ANSWER}" in answer["error"]


class Gone(Servers):
    """A sandbox that has ended."""

    async def spawn(self, argv: list[str]) -> Server:
        raise SandboxUnavailable("no sandbox works")


def test_a_sandbox_that_is_gone_is_the_machines_fault_wherever_the_attempt_meets_it() -> None:
    opened = workspace(Gone())
    for work in (
        lambda: opened.submission(),
        lambda: opened.box.files.ask("list"),
        lambda: opened.box.files.write("/x", b""),
    ):
        with pytest.raises(SandboxGone, match="no sandbox works"):
            asyncio.run(work())


class Stubborn(Servers):
    """A sandbox whose programs cannot be killed."""

    closed = False

    async def spawn(self, argv: list[str]) -> Server:
        server = await super().spawn(argv)

        async def kill() -> None:
            raise SandboxUnavailable("no answer")

        server.kill = kill  # type: ignore[method-assign]
        return server

    async def close(self) -> None:
        self.closed = True


def test_a_sandbox_is_closed_though_its_file_server_cannot_be() -> None:
    sandbox = Stubborn(paths=[], more=0)
    opened = workspace(sandbox)

    async def scenario() -> None:
        await opened.box.files.ask("list")
        await opened.close()

    with pytest.raises(SandboxUnavailable):
        asyncio.run(scenario())
    assert sandbox.closed
