"""A scripted agent repairs two files of a repository through every tool, and hidden tests decide."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shared.contracts.messages import StopReason, Verdict
from shared.contracts.run import Sampling
from shared.environments import Call, Grading, Result
from shared.environments.calling import checked
from shared.environments.registry import Environments
from tests.contract.sandboxes import NO_BWRAP
from tests.laboratory import CALC, SOLUTION, Laboratory, hidden

pytestmark = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)

TOOLS = ["read", "write", "edit", "list", "grep", "shell", "search", "todo", "web_search", "submit"]
TURNS: list[list[tuple[str, dict[str, Any]]]] = [
    [("list", {}), ("read", {"path": "calc.py"}), ("grep", {"pattern": "FACTORS"})],
    [("search", {"query": "scale by unit factors"}), ("web_search", {"query": "metres in a kilometre"})],
    [("todo", {"open": ["add", "km"]})],
    [
        ("edit", {"path": "calc.py", "old": "a - b", "new": "a + b"}),
        ("read", {"path": "calc.py", "start": 6, "end": 7}),
    ],
    [("raed", {"path": "units.py"}), ("read", {"path": "units.py"})],
    [("edit", {"path": "units.py", "old": "100", "new": "1000"})],
    [
        (
            "write",
            {
                "path": "tests/test_mine.py",
                "content": "from calc import scaled\n\ndef test_km():\n    assert scaled(2, 'km') == 2000\n",
            },
        )
    ],
    [("shell", {"command": "cd tests && pytest -q -p no:cacheprovider ."}), ("shell", {"command": "pwd"})],
    [("todo", {"open": [], "done": ["add", "km"]})],
    [("submit", {})],
]


@contextlib.asynccontextmanager
async def search_service() -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        assert request.query["q"] == "metres in a kilometre"
        return web.json_response({"results": [{"title": "Kilometre", "url": "http://x/km", "content": "1000 metres"}]})

    app = web.Application()
    app.router.add_get("/search", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/search"
    finally:
        await runner.cleanup()


def test_a_scripted_agent_solves_a_task_of_several_files_through_every_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Laboratory(tmp_path)
    problem = lab.problem(tools=TOOLS)
    environment = Environments(lab.places).of(problem)
    results: list[Result] = []

    async def attempt() -> Verdict:
        async with search_service() as url:
            monkeypatch.setenv("ETUDE_WEB_SEARCH", url)
            assert environment.objection(problem) is None
            workspace = await environment.open(problem, Sampling())
            try:
                offered = workspace.brief().tools
                for number, turn in enumerate(TURNS):
                    calls = [Call(f"{number}.{at}", name, given, 0, 0) for at, (name, given) in enumerate(turn)]
                    results.extend(await workspace.call(checked(calls, offered)))
                work = await workspace.submission()
            finally:
                await workspace.close()
            assert workspace.notes["todo"] == "- [x] add\n- [x] km"
        assert {path: work.changes[path] for path in SOLUTION} == SOLUTION
        assert sorted(work.changes) == ["calc.py", "tests/test_mine.py", "units.py"]
        verdict = (await environment.grade([Grading(problem, hidden(), work)]))[0]
        assert isinstance(verdict, Verdict)
        return verdict

    assert asyncio.run(attempt()) == Verdict(solved=True, passed=3, total=3)
    assert {result.tool for result in results} >= set(TOOLS)
    text = {result.call: result.text for result in results}
    assert [result.call for result in results if not result.ok] == ["4.0"]
    assert text["4.0"].startswith("tool 'raed': not offered; did you mean 'read'?")
    assert CALC.splitlines()[0] in text["0.1"]
    assert text["1.1"] == "Kilometre\nhttp://x/km\n1000 metres"
    assert text["3.1"].startswith("     6\tdef add(a, b):\n     7\t    return a + b")
    assert "2 passed" in text["7.0"]
    assert text["7.1"] == "/workspace/tests"
    assert results[-1].ends is StopReason.submitted
