"""evals.requested → rollouts.requested (pinned) → rollouts.scored → a report → evals.finished."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog
from prometheus_client import Counter, Gauge

from services.evaluator.archive import Archive
from services.evaluator.config import EvaluatorSettings
from services.evaluator.figures import figures, rows
from services.evaluator.plan import Patience, Plan, Result, choose
from shared.bus import Bus, Delivery
from shared.contracts import topics
from shared.contracts.messages import (
    AttemptCheckpointed,
    AttemptClaimed,
    AttemptHeartbeat,
    AttemptKey,
    EvalFinished,
    EvalRequested,
    RolloutFailed,
    RolloutFinished,
    RolloutScored,
)
from shared.contracts.run import Purpose, Ref
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.telemetry import Health

LINGER_S = 0.3  # verdicts of so long go into one durable write
TICK_S = 1.0  # while evaluations are open: lost attempts, pauses that are over
NOT_READY_RETRY_S = 2.0

RESULTS = Counter("etude_evaluator_attempts_total", "Evaluation attempts with a result.", ["run", "outcome"])
OPEN = Gauge("etude_evaluator_open_evaluations", "Evaluations under way.")

log = structlog.get_logger()


async def serve(config: EvaluatorSettings, bus: Bus, objects: Objects, health: Health, stop: asyncio.Event) -> None:
    """Until `stop` is set. Nothing needs to be drained: all that counts is durable before it is acknowledged."""
    evaluator = Evaluator(config, bus, Archive(objects))
    health.wait_on("open evaluations")
    await evaluator.resume()
    health.clear("open evaluations")
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in (evaluator.accept(), evaluator.collect(), evaluator.drive())]
        await stop.wait()
        for task in tasks:
            task.cancel()


@dataclass(slots=True)
class Running:
    """An evaluation under way. `fresh`: results that are not durable yet, with the deliveries that wait for it."""

    plan: Plan
    started: float  # monotonic; of this process: an evaluation that was interrupted took longer
    fresh: list[tuple[Result, Delivery]] = field(default_factory=list)


class Evaluator:
    def __init__(self, config: EvaluatorSettings, bus: Bus, archive: Archive) -> None:
        self.config = config
        self.bus = bus
        self.archive = archive
        self.running: dict[tuple[str, str], Running] = {}
        self._news = asyncio.Event()

    async def resume(self) -> None:
        """Goes on with what was open when the last process ended."""
        for request in await asyncio.to_thread(self.archive.all_open):
            try:
                await self._start(request)
            except (ObjectMissing, ObjectDamaged, ValueError) as error:  # its pack is gone: the others must not suffer
                await self._abandon(request, error)

    async def accept(self) -> None:
        async for delivery in self.bus.deliveries([topics.EVALS_REQUESTED], "evaluator", 16):
            request: EvalRequested = delivery.message
            if (request.run, request.eval) in self.running:
                delivery.done()
                continue
            known = await asyncio.to_thread(self.archive.known_report, request)
            if known is not None:  # asked for twice: the answer is the same
                ref, report = known
                await self._announce(request, ref, report["figures"])
                delivery.done()
                continue
            try:
                await self._start(request)
            except ObjectMissing as error:  # a run and its packs are stored before anybody asks; give a slow store time
                log.warning("evaluation_not_ready", run=request.run, eval=request.eval, error=str(error))
                delivery.retry(NOT_READY_RETRY_S)
            except (ObjectDamaged, ValueError) as error:
                await self._abandon(request, error)
                delivery.bury(f"evaluation {request.eval}: {error}")
            else:
                delivery.done()

    async def _abandon(self, request: EvalRequested, error: Exception) -> None:
        """Who waits for it, and the engines that serve its version, hear of its end: a report without a verdict."""
        log.error("evaluation_abandoned", run=request.run, eval=request.eval, error=str(error))
        numbers = figures(request, {})
        report = {"run": request.run, "eval": request.eval, "serial": request.serial, "error": str(error)}
        ref = await asyncio.to_thread(self.archive.report, request, {**report, "figures": numbers, "problems": {}})
        await self._announce(request, ref, numbers)
        await asyncio.to_thread(self.archive.close, request)

    async def _start(self, request: EvalRequested) -> None:
        """Durable from here on. Raises what the object store raises, and ValueError for a pack without problems."""
        run = await asyncio.to_thread(self.archive.run, request.run)
        pack = await asyncio.to_thread(self.archive.pack, request.pack)
        ids = choose([problem.id for problem in pack], request.problems, salt=request.pack.checksum)
        if not ids:
            raise ValueError(f"pack {request.pack.key} holds no problem")
        patience = Patience(
            lease_s=self.config.evaluator_lease_s, lost_s=self.config.evaluator_lost_s, asks=self.config.evaluator_asks
        )
        plan = Plan(request, ids, run.reward.id, patience)
        plan.restore(await asyncio.to_thread(self.archive.results, request))
        await asyncio.to_thread(self.archive.open, request, time.time())
        self.running[request.run, request.eval] = Running(plan, time.monotonic())
        OPEN.set(len(self.running))
        log.info("evaluation_started", run=request.run, eval=request.eval, attempts=plan.total, known=len(plan.results))
        self._news.set()

    async def collect(self) -> None:
        """News of evaluation attempts; all others are somebody else's."""
        heard = [topics.ROLLOUTS_SCORED, topics.ROLLOUTS_FINISHED, topics.ATTEMPTS_PROGRESS]
        async for delivery in self.bus.deliveries(heard, "evaluator", 1024):
            message, now = delivery.message, time.monotonic()
            running, result = None, None
            if isinstance(message, AttemptHeartbeat):
                for attempt, (epoch, _) in message.attempts.items():
                    for each in self.running.values():
                        each.plan.progress(attempt, epoch, now, held=True)
            elif (running := self._of(message.key)) is not None:
                match message:
                    case AttemptClaimed(key=key) | AttemptCheckpointed(key=key):
                        running.plan.progress(key.attempt, key.epoch, now, held=True)
                    case RolloutFinished(key=key):
                        running.plan.progress(key.attempt, key.epoch, now, held=False)
                    case RolloutScored():
                        result = running.plan.scored(message)
                    case RolloutFailed(key=key, reason=reason):
                        result = running.plan.failed(key, reason, now)
                        self._news.set()
            if running is None or result is None:
                delivery.done()
            else:
                running.fresh.append((result, delivery))
                self._news.set()

    def _of(self, key: AttemptKey) -> Running | None:
        if key.purpose is not Purpose.evaluate:
            return None
        return next((r for r in self.running.values() if r.plan.knows(key.attempt)), None)

    async def drive(self) -> None:
        """Makes results durable, asks for what is due, ends what is complete."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S if self.running else None):
                    await self._news.wait()
            await asyncio.sleep(LINGER_S)
            self._news.clear()
            room = self.config.evaluator_in_flight
            # run -> the version that is asked for: an engine for evaluations serves one at a time
            turn: dict[str, int] = {}
            for running in list(self.running.values()):
                await self._keep(running)
                request = running.plan.request
                mine = turn.setdefault(request.run, request.serial) == request.serial
                asks = list(running.plan.due(time.monotonic(), room if mine else 0))
                await self.bus.publish_many([(topics.ROLLOUTS_REQUESTED, ask.key.attempt, ask) for ask in asks])
                room = max(0, room - running.plan.out)
                if running.plan.complete:
                    await self._finish(running)

    async def _keep(self, running: Running) -> None:
        fresh, running.fresh = running.fresh, []
        results = [result for result, _ in fresh]
        if results:
            await asyncio.to_thread(self.archive.keep, running.plan.request, results)
        for result in results:
            outcome = "error" if result.error else "solved" if result.solved else "unsolved"
            RESULTS.labels(running.plan.request.run, outcome).inc()
        for _, delivery in fresh:
            delivery.done()

    async def _finish(self, running: Running) -> None:
        request = running.plan.request
        table = rows(request, running.plan.results.values())
        numbers = await asyncio.to_thread(figures, request, table)
        numbers["seconds"] = time.monotonic() - running.started
        report = {
            "run": request.run,
            "eval": request.eval,
            "serial": request.serial,
            "seconds": numbers["seconds"],
            "figures": {"tokens_per_solved": None, "greedy": None, **numbers},
            "problems": table,
        }
        ref = await asyncio.to_thread(self.archive.report, request, report)
        # Before the answer is told: a client that hears it may ask again at once, and the report then answers.
        del self.running[request.run, request.eval]
        OPEN.set(len(self.running))
        await self._announce(request, ref, numbers)
        await asyncio.to_thread(self.archive.close, request)
        log.info("evaluation_finished", run=request.run, eval=request.eval, **numbers)

    async def _announce(self, request: EvalRequested, report: Ref, numbers: Mapping[str, float | None]) -> None:
        message = EvalFinished(
            run=request.run,
            eval=request.eval,
            serial=request.serial,
            report=report,
            figures={name: value for name, value in numbers.items() if value is not None},
        )
        await self.bus.publish(topics.EVALS_FINISHED, request.run, message)
