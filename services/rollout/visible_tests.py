"""The `test` tool: the visible tests of a problem on the present files, in a sandbox.

Runs of several attempts that come within a few milliseconds go to the sandbox together: starting it costs more than most
tests do. Expected values never enter the sandbox; they are compared here, type-exactly. The sandbox is deterministic, so
an answer is remembered per (problem, files); one that a limit cut short is not, for load may have caused it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence

import structlog
import xxhash

from services.rollout import metrics
from services.rollout.ends import InfrastructureError
from shared.formats import Observation, Tool
from shared.problems import Problem, values
from shared.sandbox import CallResult, FunctionRun, Functions, SandboxUnavailable
from shared.sandbox.problems import FileGone, NotRunnable, run_of
from shared.telemetry import Health
from shared.telemetry_spans import span

WINDOW_S = 0.002
REMEMBERED = 8192
LONGEST = 4096  # characters of a result that are kept; formats show far fewer
CANARY = FunctionRun(source="def f(): return 1", entry="f", args=("[]",))
CANARY_EVERY_S = 5.0
LOAD_ERRORS = frozenset({"Timeout", "MemoryError", "Died"})

log = structlog.get_logger()


class UnsupportedProblem(InfrastructureError):
    """This worker has no tool for such a problem; asking again does not help, but it is not the agent's doing either."""


class VisibleTests:
    def __init__(self, functions: Functions, health: Health) -> None:
        self._functions = functions
        self._health = health
        self._works = False  # until a first run has shown it
        self._remembered: OrderedDict[bytes, Observation] = OrderedDict()
        self._waiting: list[tuple[FunctionRun, asyncio.Future[list[CallResult]]]] = []
        self._flushes: set[asyncio.Task[None]] = set()

    async def ready(self) -> None:
        """Returns once the sandbox works; while it does not, attempts must not be taken only to fail."""
        while not self._works:
            try:
                await self._functions.run([CANARY])
            except SandboxUnavailable as error:
                self._health.wait_on("sandbox")
                log.error("sandbox_unavailable", error=str(error))
                await asyncio.sleep(CANARY_EVERY_S)
            else:
                self._works = True
                self._health.clear("sandbox")

    async def run(self, problem: Problem, files: dict[str, str]) -> Observation:
        """The first failing visible test. Raises InfrastructureError where the sandbox cannot run."""
        try:
            wanted = run_of(problem, files, problem.visible, stop_at_error=True)
        except (NotRunnable, FileGone) as error:
            raise UnsupportedProblem(str(error)) from None
        facts = "\0".join((problem.id, wanted.entry, wanted.source, *(c.args + c.expected for c in problem.visible)))
        key = xxhash.xxh3_128_digest(facts.encode("utf-8", "surrogatepass"))
        if (known := self._remembered.get(key)) is not None:
            self._remembered.move_to_end(key)
            metrics.SANDBOX_RUNS.labels("memory").inc()
            return known
        started = time.monotonic()
        with span("visible tests", cases=len(wanted.args)):
            results = await self._submit(wanted)
        metrics.SANDBOX_RUNS.labels("sandbox").inc()
        metrics.SANDBOX_SECONDS.inc(time.monotonic() - started)
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
            if isinstance(error, SandboxUnavailable):
                self._works = False
                self._health.wait_on("sandbox")
            for _, future in batch:
                if not future.done():
                    future.set_exception(InfrastructureError(f"sandbox: {type(error).__name__}: {error}"))
            return
        for (_, future), results in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(results)


def first_failing(problem: Problem, results: Sequence[CallResult]) -> Observation:
    """Compares type-exactly. A result that is missing counts as failed."""
    for i, case in enumerate(problem.visible):
        result = results[i] if i < len(results) else CallResult(None, "Missing")
        if result.value is None or not values.equal(result.value, case.expected):
            return Observation(Tool.test, failing=i, got=_kept(result.error if result.value is None else result.value))
    return Observation(Tool.test)


def _kept(text: str) -> str:
    """Of a long value the beginning, as a person would read it: cut, it could not be read as a value any more."""
    if len(text) <= LONGEST:
        return text
    try:
        return values.show(text)[:LONGEST]
    except ValueError:
        return text[:LONGEST]
