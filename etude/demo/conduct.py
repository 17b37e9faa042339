"""Speaks with the services through the bus, as any client would: starts and stops a run, asks for evaluations, listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.demo.progress import DEMO, Progress
from etude.status import collect
from shared.bus import Bus
from shared.contracts import topics as t
from shared.contracts.codec import sent_at
from shared.contracts.life import RunState
from shared.contracts.messages import EvalFinished, EvalRequested, RunCommand
from shared.contracts.run import Ref, RunConfig
from shared.objects import Objects
from shared.settings import Told

LISTENED = (
    t.RUNS_STATE,
    t.ROLLOUTS_REQUESTED,
    t.ROLLOUTS_FINISHED,
    t.ROLLOUTS_SCORED,
    t.GROUPS_READY,
    t.STEPS_COMMITTED,
    t.POLICIES_PUBLISHED,
    t.POLICIES_APPLIED,
    t.EVALS_FINISHED,
    t.ALERTS,
)


LOST_AT_MOST = 0.05  # of an evaluation's attempts, on the way
HEARD_WITHIN_S = 60.0
PAUSED_WITHIN_S = 5.0
ASLEEP_S = 30.0


class Stalled(RuntimeError):
    """Nothing has happened for long, or nothing can; the text says what was awaited."""


class NoVerdict(Told, RuntimeError):
    """Too many of an evaluation's attempts were lost."""


class TurnedDown(Told, RuntimeError):
    """The scheduler has refused the run; the text says why."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long silence is borne before the demo gives up."""

    give_up_s: float = 300.0


class Conductor:
    """One run, seen from outside. Use `async with`. `refused`: services that are not started again, for their settings are
    bad; nothing is waited for without them."""

    def __init__(
        self,
        bus: Bus,
        objects: Objects,
        run: str,
        patience: Patience = Patience(),
        refused: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.bus, self.objects, self.run, self.refused = bus, objects, run, refused
        self.progress = Progress()
        self.patience = patience
        self._news = asyncio.Event()
        self._last_news = time.monotonic()
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Conductor:
        self._deliveries = self.bus.deliveries(LISTENED, None, 4096)
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._listener:
            self._listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listener

    async def heard(self) -> None:
        """What was there at the beginning, if it is not too much: what is not heard is asked for twice at worst."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARD_WITHIN_S):
                await self._deliveries.caught_up()

    async def _listen(self) -> None:
        async for delivery in self._deliveries:
            if delivery.message.run == self.run:
                self.progress.see(delivery.message, sent_at(delivery.headers) or time.time())
                self._last_news = time.monotonic()
                self._news.set()
            delivery.done()

    async def _until(self, there: Callable[[], bool], what: str, held: Callable[[], bool] = lambda: False) -> None:
        """Waits for a fact. Raises Stalled after a long silence of the whole run, and at once where a service is refused, or
        TurnedDown where the run is; while it is `held`, silence is what was asked for, and its clock begins again when the run goes
        on."""
        self._last_news = time.monotonic()
        while True:
            if why := self.progress.turned_down:
                raise TurnedDown(f"{self.run} has ended before its first attempt: {why}")
            if there():
                return
            self._news.clear()
            began = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._news.wait()
            if time.monotonic() - began > ASLEEP_S:  # by Ctrl-Z or a closed lid: what came meanwhile is not read yet
                self._last_news = time.monotonic()
            if names := ", ".join(self.refused()):
                raise Stalled(f"bad settings of {names} while waiting for {what}; `etude logs NAME` says which")
            if held():
                self._last_news = time.monotonic()
            silent = time.monotonic() - self._last_news
            if silent > self.patience.give_up_s:
                raise Stalled(f"no message for {silent:.0f} s while waiting for {what}")

    async def control(self, *actions: str, config: Ref | None = None) -> None:
        """Published together and in order, so that `start` and `pause` leave no gap between them."""
        words = [RunCommand(run=self.run, action=a, config=config, by=DEMO) for a in actions]  # type: ignore[arg-type]
        await self.bus.publish_many([(t.RUNS_COMMANDS, self.run, word) for word in words])

    async def paused(self) -> None:
        """Asks for a pause, and returns when the scheduler has it, or after a while: services that are stopped meanwhile would
        find it only when they are started again, and the time in between would count as practice."""
        await self.control("pause")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PAUSED_WITHIN_S):
                while self.progress.state not in (RunState.paused, RunState.finished):
                    self._news.clear()
                    await self._news.wait()

    async def served(self, serial: int) -> None:
        """Until a replica serves this version or a newer one."""
        await self._until(
            lambda: any(a.ok and a.serial >= serial for a in self.progress.serving.values()),
            f"a replica that serves version {serial}",
        )

    async def evaluate(
        self, name: str, serial: int, config: RunConfig, *, problems: int, samples: int, greedy: bool = True
    ) -> dict[str, Any]:
        """The report of one evaluation (see services/evaluator). Asking twice for the same name asks once, unless it came to no
        verdict. `greedy`: with one more attempt per problem, at temperature 0. Raises NoVerdict."""
        await self.heard()
        ended = self.verdict(name)
        if ended is None:
            asked = _numbered(name, len(self._under(name)) + 1)
            await self._ask(asked, serial, config, problems=problems, samples=samples, greedy=greedy)
            ended = self.progress.evaluations[asked]
            if not came_to_a_verdict(ended):
                lost, told = ended.figures["infrastructure_errors"], ended.figures["attempts"]
                raise NoVerdict(
                    f"the evaluation of version {serial} came to no verdict: {lost:.0f} of {lost + told:.0f} attempts were lost "
                    "on the way, which is no fault of theirs (did its engine go on to another version?); the logs of rollout, "
                    "reward and grader say why"
                )
        report: dict[str, Any] = json.loads(self.objects.get(ended.report))
        return report

    def verdict(self, name: str) -> EvalFinished | None:
        """Of the evaluation of this name, or of one that was asked in its place."""
        return next(filter(came_to_a_verdict, self._under(name)), None)

    def _under(self, name: str) -> list[EvalFinished]:
        found: list[EvalFinished] = []
        while (known := self.progress.evaluations.get(_numbered(name, len(found) + 1))) is not None:
            found.append(known)
        return found

    async def _ask(
        self, name: str, serial: int, config: RunConfig, *, problems: int, samples: int, greedy: bool
    ) -> None:
        if not (config.eval_pack and config.eval_pack_hidden):
            raise ValueError("this run has no evaluation pack")
        request = EvalRequested(
            run=self.run,
            eval=name,
            serial=serial,
            pack=config.eval_pack,
            pack_hidden=config.eval_pack_hidden,
            samples=samples,
            greedy=greedy,
            problems=problems,
            sampling=config.sampling,
        )
        await self.bus.publish(t.EVALS_REQUESTED, self.run, request)
        await self._until(lambda: name in self.progress.evaluations, f"the evaluation of version {serial}")

    async def finished(self) -> None:
        """Until the run has ended, however long somebody pauses it."""
        await self._until(
            lambda: self.progress.state is RunState.finished, "the end of practice", held=lambda: self.progress.paused
        )


def _numbered(name: str, times: int) -> str:
    return name if times == 1 else f"{name}-{times}"


def came_to_a_verdict(evaluation: EvalFinished) -> bool:
    """Figures are of the attempts that were not lost: where many were, of those that were quick. Such are none."""
    return tell(evaluation.figures)


def tell(figures: Mapping[str, float]) -> bool:
    """Whether these figures of an evaluation are a verdict."""
    lost = figures.get("infrastructure_errors", 0.0)
    return "pass_at_1" in figures and lost <= LOST_AT_MOST * (lost + figures.get("attempts", 0.0))


@contextlib.asynccontextmanager
async def explained(state: Path, way_out: str = "") -> AsyncIterator[None]:
    """A stall is told with what each service of this state directory waits on, and with the way out. They are asked at once:
    whoever gives up stops them, and nobody can ask them afterwards."""
    try:
        yield
    except Stalled as stalled:
        stalled.add_note(waits(await asyncio.to_thread(collect, state)))
        if way_out:
            stalled.add_note(way_out)
        raise


def waits(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each service that is not ready, with what it waits on and since when (local time), and one for those that
    are. `rows`: of `etude.status.collect`. Pure."""
    lines = []
    for row in rows:
        again = f", started again {row['restarts']} times" if row["restarts"] else ""
        if row["waits"]:
            lines += [f"  {row['name']} waits on {_wait(wait)}{again}" for wait in row["waits"]]
        elif row["state"] != "ready" or again:
            lines.append(f"  {row['name']} is {row['state']}{again}")
    idle = [row["name"] for row in rows if row["state"] == "ready" and not row["restarts"]]
    if idle:
        lines.append(f"  ready, waiting on nothing: {', '.join(idle)}")
    return "\n".join(lines) or "  no service was running"


def _wait(wait: dict[str, Any]) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(wait["since"]))
    return f"{wait['waits_on']} since {since} ({wait['seconds']:.0f} s)"
