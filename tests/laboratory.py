"""A small repository with a bug in two files, hidden tests, and the environment that runs it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from shared.contracts.run import Ref, Sampling
from shared.contracts.trajectory import Change
from shared.environments import Call, Places, Result
from shared.environments.repository import RepositoryEnvironment
from shared.environments.repository.problem import RepositoryHidden, RepositoryLimits, RepositoryProblem
from shared.environments.repository.trees import pack_tree, store_tree
from shared.environments.repository.workspace import RepositoryWorkspace
from shared.objects import connect
from shared.sandbox import connect_sandboxes
from tests.patience import patient

SANDBOXES = connect_sandboxes("bubblewrap")  # of the whole process: it ends them when it ends

CALC = '''"""Arithmetic."""

from units import scale


def add(a, b):
    return a - b


def scaled(a, unit):
    return scale(a, unit)
'''
UNITS = """FACTORS = {"km": 100, "m": 1}


def scale(value, unit):
    return value * FACTORS[unit]
"""
VISIBLE = "from calc import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n"
HIDDEN = f"""{VISIBLE}

def test_add():
    assert add(1, 2) == 3


def test_scaled():
    from calc import scaled

    assert scaled(2, "km") == 2000
"""
FILES = {
    "calc.py": CALC,
    "units.py": UNITS,
    "tests/test_calc.py": VISIBLE,
    "tests/conftest.py": "import pytest\n",
    "README.md": "Arithmetic with units of length.\n",
    "tools/run.sh": "#!/bin/sh\necho run\n",
}
SOLUTION = {
    "calc.py": Change(text=CALC.replace("a - b", "a + b")),
    "units.py": Change(text=UNITS.replace('"km": 100,', '"km": 1000,')),
}


class Laboratory:
    """An environment with an object store and a cache in a folder."""

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.objects = connect(f"file:{folder}/objects")
        self.folder = folder
        self.places = Places(sandboxes=SANDBOXES, objects=self.objects, cache=cache or folder / "cache")
        self.environment = RepositoryEnvironment(self.places)

    def tree(self, files: Mapping[str, str | bytes]) -> Ref:
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            for path, data in files.items():
                target = Path(name, path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data.encode() if isinstance(data, str) else data)
                target.chmod(0o755 if path.endswith(".sh") else 0o644)
            return store_tree(self.objects, pack_tree(Path(name)))

    def problem(self, files: Mapping[str, str | bytes] = FILES, **fields: Any) -> RepositoryProblem:
        limits = fields.pop("limits", RepositoryLimits(command_s=20.0, grading_s=60.0))
        prompt = "Adding numbers subtracts them, and a kilometre has 100 metres. Repair both."
        return RepositoryProblem(
            **{"id": "calc", "prompt": prompt, "tree": self.tree(files), "limits": limits, **fields}
        )

    @contextlib.asynccontextmanager
    async def attempt(self, problem: RepositoryProblem | None = None) -> AsyncIterator[RepositoryWorkspace]:
        workspace = await self.environment.open(problem or self.problem(), Sampling())
        assert isinstance(workspace, RepositoryWorkspace)
        try:
            yield workspace
        finally:
            await workspace.close()

    def within(
        self, scenario: Callable[[RepositoryWorkspace], Awaitable[None]], problem: RepositoryProblem | None = None
    ) -> None:
        async def run() -> None:
            async with asyncio.timeout(patient(120)), self.attempt(problem) as workspace:
                await scenario(workspace)

        asyncio.run(run())


def hidden(**fields: Any) -> RepositoryHidden:
    return RepositoryHidden(
        **{
            "id": "calc",
            "fail_to_pass": ["tests/test_calc.py::test_add", "tests/test_calc.py::test_scaled"],
            "pass_to_pass": ["tests/test_calc.py::test_zero"],
            "tests": {"tests/test_calc.py": Change(text=HIDDEN)},
            "solution": SOLUTION,
            **fields,
        }
    )


def called(*calls: tuple[str, dict[str, Any]]) -> list[Call]:
    return [Call(f"c{number}", name, arguments, 0, 0) for number, (name, arguments) in enumerate(calls)]


async def call(workspace: RepositoryWorkspace, name: str, **arguments: Any) -> Result:
    return (await workspace.call(called((name, arguments))))[0]
