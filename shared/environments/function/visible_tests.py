"""The `test` tool: the visible tests of a problem on the present files, in a sandbox.

Runs of several attempts that come within a few milliseconds go to the sandbox together: starting it costs more than most
tests do. Expected values never enter the sandbox; they are compared here, type-exactly. The sandbox is deterministic, so
an answer is remembered per (problem, files); one that a limit cut short is not, for load may have caused it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import xxhash

from shared.environments import InfrastructureError, SandboxGone
from shared.environments.function.actions import Observation, Tool
from shared.environments.function.runs import FileGone, NotRunnable, got, passes, run_of
from shared.problems import FunctionProblem, values
from shared.sandbox import CallResult, FunctionRun, Functions, SandboxUnavailable
from shared.telemetry_spans import span

WINDOW_S = 0.002
REMEMBERED = 8192
LONGEST = 4096  # characters of a result that are kept; formats show far fewer
LOAD_ERRORS = frozenset({"Timeout", "CpuLimit", "MemoryError", "Died"})

Counted = Callable[[str, float], None]


class UnsupportedProblem(InfrastructureError):
    """This worker has no tool for such a problem; asking again does not help, but it is not the agent's doing either."""


class VisibleTests:
    """`counted`: called after each run with "sandbox" or "memory", where the answer came from, and the seconds it took."""

    def __init__(self, functions: Functions, counted: Counted | None = None) -> None:
        self._functions = functions
        self._counted = counted or (lambda source, seconds: None)
        self._remembered: OrderedDict[bytes, Observation] = OrderedDict()
        self._waiting: list[tuple[FunctionRun, asyncio.Future[list[CallResult]]]] = []
        self._flushes: set[asyncio.Task[None]] = set()

    async def run(self, problem: FunctionProblem, files: dict[str, str]) -> Observation:
        """Return the first failing visible test. Raises InfrastructureError where the sandbox cannot run."""
        try:
            wanted = run_of(problem, files, problem.visible, stop_at_error=True)
        except (NotRunnable, FileGone) as error:
            raise UnsupportedProblem(str(error)) from None
        facts = "\0".join((problem.id, wanted.entry, wanted.source, *map(str, problem.visible)))
        key = xxhash.xxh3_128_digest(facts.encode("utf-8", "surrogatepass"))
        if (known := self._remembered.get(key)) is not None:
            self._remembered.move_to_end(key)
            self._counted("memory", 0.0)
            return known
        started = time.monotonic()
        with span("visible tests", cases=len(wanted.args)):
            results = await self._submit(wanted)
        self._counted("sandbox", time.monotonic() - started)
        observation = first_failing(problem, results)
        if not any(result.error in LOAD_ERRORS for result in results):
            self._remembered[key] = observation
            if len(self._remembered) > REMEMBERED:
                self._remembered.popitem(last=False)
        return observation

    async def _submit(self, run: FunctionRun) -> list[CallResult]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[CallResult]] = loop.create_future()
        self._waiting.append((run, future))
        if len(self._waiting) == 1:
            loop.call_later(WINDOW_S, self._flush)
        return await future

    def _flush(self) -> None:
        batch, self._waiting = self._waiting, []
        task = asyncio.create_task(self._run_batch(batch))
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)

    async def _run_batch(self, batch: list[tuple[FunctionRun, asyncio.Future[list[CallResult]]]]) -> None:
        batch = [(run, future) for run, future in batch if not future.done()]  # its attempt ended meanwhile
        if not batch:
            return
        try:
            answers = await self._functions.run([run for run, _ in batch])
        except Exception as error:  # whatever broke, no attempt may hang on it
            kind = SandboxGone if isinstance(error, SandboxUnavailable) else InfrastructureError
            for _, future in batch:
                if not future.done():
                    future.set_exception(kind(f"sandbox: {type(error).__name__}: {error}"))
            return
        for (_, future), results in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(results)


def first_failing(problem: FunctionProblem, results: Sequence[CallResult]) -> Observation:
    """Return the first visible test that fails, comparing type-exactly. A missing result counts as failed."""
    for i, case in enumerate(problem.visible):
        result = results[i] if i < len(results) else CallResult(None, "Missing")
        if not passes(case, result):
            return Observation(Tool.test, failing=i, got=_kept(got(case, result)))
    return Observation(Tool.test)


def _kept(text: str) -> str:
    """Return a result, a long one cut to its beginning. It is cut as Python prints it: a tagged value cannot be read once cut."""
    if len(text) <= LONGEST:
        return text
    try:
        return values.show(text)[:LONGEST]
    except ValueError:
        return text[:LONGEST]
