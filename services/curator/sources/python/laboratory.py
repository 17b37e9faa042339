"""Runs the tests of a project in a sandbox: once, or again and again with other code in its functions."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.curator.sources.python import inside
from services.curator.sources.python.functions import Function
from services.curator.sources.python.project import SourceError
from shared.environments.repository import runtime
from shared.sandbox import SandboxUnavailable
from shared.sandbox.contract import WORKSPACE, Limits, Program, Sandbox, Sandboxes

COLLECT_S = 180.0
_PROGRAM = "runs.py"
_PLACE = "/tmp/.runs"
_LIFE_S = 6 * 3600.0
_SPARE_S = 60.0  # of an answer, over the limit that the program itself keeps: a busy machine
_LIMITS = Limits(memory_mb=3072, disk_mb=4096, processes=128, seconds=_LIFE_S)


@dataclass(frozen=True, slots=True)
class Ran:
    """What one test did. `outcome`: passed, failed or skipped. `phase`: of the failure: setup, call or teardown. `kinds`: names of
    the exception's class and its bases, nearest first. `functions`: (path, first line) of each function that it called."""

    name: str
    outcome: str
    phase: str = ""
    kinds: tuple[str, ...] = ()
    said: str = ""
    seconds: float = 0.0
    functions: frozenset[tuple[str, int]] = frozenset()

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


@dataclass(frozen=True, slots=True)
class Run:
    """`late`: the run was killed at its limit. `whole`: the run reached its end. `unpatchable`: why the code of a function could
    not be replaced; empty: it was. `lines`: path -> lines that ran, where they were asked for."""

    tests: tuple[Ran, ...]
    late: bool = False
    whole: bool = True
    unpatchable: str = ""
    lines: Mapping[str, frozenset[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Runs:
    """Tests that are collected and wait to be run. `collected`: their names. `errors`: (file, what was said) of each file that
    could not be collected."""

    collected: tuple[str, ...]
    errors: tuple[tuple[str, str], ...]
    _files: tuple[str, ...]
    _program: Program
    _tail: bytes = b""

    async def run(
        self,
        tests: Sequence[str],
        *,
        each_s: float | Sequence[float],
        time_s: float,
        edits: Sequence[tuple[Function, str]] = (),
        trace: bool = False,
        ends_at: Sequence[str] = (),
    ) -> Run:
        """Run tests in a fresh copy of the process. `each_s`: the limit of every test, or one for each. `edits`: functions and
        their other text. `ends_at`: kinds of errors after which no other test is run. Raises SandboxUnavailable."""
        request = {
            "tests": list(tests),
            "each_s": [each_s] * len(tests) if isinstance(each_s, int | float) else list(each_s),
            "time_s": time_s,
            "trace": trace,
            "ends_at": list(ends_at),
            "edits": [_edit(function, text) for function, text in edits],
        }
        await self._program.send(json.dumps(request).encode() + b"\n")
        found: list[Ran] = []
        unpatchable, whole = "", False
        lines: dict[str, frozenset[int]] = {}
        while True:
            answer = await self._answer(time_s + _SPARE_S)
            if "end" in answer:
                return Run(tuple(found), answer["end"] == "late", whole, unpatchable, lines)
            if "test" in answer:
                found.append(self._test(answer))
            elif "lines" in answer:
                lines = {self._files[int(key)]: frozenset(map(int, value)) for key, value in answer["lines"].items()}
            whole = whole or "whole" in answer
            unpatchable = str(answer.get("unpatchable", unpatchable))

    def _test(self, answer: dict[str, Any]) -> Ran:
        return Ran(
            str(answer["test"]),
            str(answer["outcome"]),
            str(answer["phase"]),
            tuple(map(str, answer["kinds"])),
            str(answer["said"]),
            float(answer["s"]),
            frozenset((self._files[file], line) for file, line in answer.get("functions", ())),
        )

    async def _answer(self, time_s: float) -> dict[str, Any]:
        """Return the next answer. Raises SandboxUnavailable where there is none: the program has ended."""
        try:
            async with asyncio.timeout(time_s):
                while b"\n" not in self._tail:
                    data = await self._program.receive(1 << 20)
                    if not data:
                        raise SandboxUnavailable("the program that runs the tests has ended")
                    self._tail += data
        except TimeoutError:
            raise SandboxUnavailable(f"the program that runs the tests said nothing for {time_s:g} s") from None
        line, _, self._tail = self._tail.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            raise SandboxUnavailable("the program that runs the tests answered with no JSON") from None
        if not isinstance(answer, dict):
            raise SandboxUnavailable("the program that runs the tests answered with no object")
        return answer


def _edit(function: Function, text: str) -> dict[str, Any]:
    source, above = function.alone(text)
    return {
        "file": f"{WORKSPACE}/{function.path}",
        "line": function.start,
        "name": function.name,
        "text": source,
        "shift": function.start - 1 - above,
        "flags": function.flags,
    }


@contextlib.asynccontextmanager
async def collected(
    sandboxes: Sandboxes, cache: Path, tree: Path, sources: Sequence[str], tests: Sequence[str]
) -> AsyncIterator[Runs]:
    """Collect tests in a sandbox of their own, which ends with the block. `tree`: the folder of the project. `sources`: its
    modules. `tests`: its files of tests. Raises SourceError where pytest cannot collect, SandboxUnavailable."""
    base = await asyncio.to_thread(runtime.base, cache, tree, ".")
    sandbox = await sandboxes.open(base, _LIMITS)
    try:
        await sandbox.put(_program())
        session = await sandbox.session()
        await session.run(f"mkdir -p {_PLACE} && mv {WORKSPACE}/{_PROGRAM} {_PLACE}/", time_s=60)
        await session.close()
        yield await _started(sandbox, tree, sources, tests)
    finally:
        await sandbox.close()


async def _started(sandbox: Sandbox, tree: Path, sources: Sequence[str], tests: Sequence[str]) -> Runs:
    program = await sandbox.spawn([runtime.python(), "-I", "-S", "-X", "utf8", f"{_PLACE}/{_PROGRAM}"])
    request = {
        "inside": f"{runtime.HOME}/inside",
        "site": runtime.SITE,
        "paths": runtime.import_paths("."),
        "own": runtime.own(tree, "."),
        "root": WORKSPACE,
        "tests": [f"{WORKSPACE}/{path}" for path in tests],
        "files": [f"{WORKSPACE}/{path}" for path in sources],
    }
    await program.send(json.dumps(request).encode() + b"\n")
    runs = Runs((), (), tuple(sources), program)
    try:
        answer = await runs._answer(COLLECT_S)
    except SandboxUnavailable as error:
        raise SourceError(f"the tests cannot be collected: {error}; {await _log(sandbox)}") from None
    if "failed" in answer:
        raise SourceError(f"the tests cannot be collected: {answer['failed']}; {await _log(sandbox)}")
    runs.collected = tuple(map(str, answer["collected"]))
    runs.errors = tuple((str(one["file"]), str(one["said"])) for one in answer["errors"])
    return runs


async def _log(sandbox: Sandbox) -> str:
    """Return the end of what pytest printed."""
    session = await sandbox.session()
    done = await session.run("tail -n 5 /tmp/.runs.log", time_s=20)
    return " | ".join(done.stdout.decode(errors="replace").strip().splitlines())[-500:]


def _program() -> bytes:
    data = (Path(inside.__file__).parent / _PROGRAM).read_bytes()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        info = tarfile.TarInfo(_PROGRAM)
        info.size, info.mode = len(data), 0o644
        tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()
