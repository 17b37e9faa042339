"""rollouts.requested → the agent → rollouts.finished, for many attempts at a time in one process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import defaultdict

import structlog

from services.rollout import metrics
from services.rollout.agent import Agent
from services.rollout.attempt import Held, finished, store
from services.rollout.config import RolloutSettings
from services.rollout.ends import InfrastructureError
from services.rollout.engine_client import EngineClient
from services.rollout.fleet import Wanted
from services.rollout.inference import PROBE_S, Inference, Session
from services.rollout.outbox import Outbox
from services.rollout.runs import Run, Runs
from services.rollout.visible_tests import VisibleTests
from shared.bus import Bus, Delivery
from shared.contracts import topics
from shared.contracts.messages import (
    AttemptCancel,
    AttemptClaimed,
    AttemptHeartbeat,
    PolicyApplied,
    RolloutFailed,
    RolloutRequested,
    RunControl,
    StopReason,
)
from shared.contracts.run import Purpose, Ref
from shared.contracts.words import Words
from shared.objects import ObjectMissing, Objects
from shared.problems import Problem
from shared.sandbox import Functions
from shared.telemetry import Health
from shared.telemetry_spans import Place, span, span_for

UNACKNOWLEDGED = 8  # requests that the bus may hand over ahead: more would keep them from idle workers
HELD_RETRY_S = 2.0  # requests of a paused run come back so often
UNREADY_RETRY_S = 1.0  # the run's objects could not be read
HEARTBEAT_ATTEMPTS = 500  # about 60 bytes each: well below the size of a message
REASON_CHARS = 2000
LEAVE_S = 3.0  # for the last messages, after the time to drain

log = structlog.get_logger()


async def serve(
    config: RolloutSettings, bus: Bus, objects: Objects, functions: Functions, health: Health, stop: asyncio.Event
) -> None:
    """Until `stop` is set: then takes nothing more, lets attempts in hand finish for `rollout_drain_s`, and leaves."""
    async with EngineClient(probe_s=PROBE_S) as client:
        worker = Worker(config, bus, objects, functions, health, client)
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(worker.listen()),
                group.create_task(worker.inference.run()),
                group.create_task(worker.heartbeat()),
            ]
            taking = group.create_task(worker.take(group))
            await stop.wait()
            taking.cancel()
            await worker.drain()
            for task in background:
                task.cancel()


class Worker:
    """Invariants: a request is acknowledged only when its claim is durable; from then on an attempt in hand ends with
    exactly one durable message (finished or failed) unless the ledger itself dropped it or this process dies, and then
    the ledger's lease gives it to another worker under the next epoch. A request that is not claimed is acknowledged
    only if the ledger cannot want it any more, or when it was told durably that the attempt failed: nobody else would
    ask for it again."""

    def __init__(
        self,
        config: RolloutSettings,
        bus: Bus,
        objects: Objects,
        functions: Functions,
        health: Health,
        client: EngineClient,
    ) -> None:
        self.config = config
        self.bus = bus
        self.objects = objects
        self.health = health
        self.name = health.name
        self.runs = Runs(objects, config.formats)
        self.words = Words()
        self.inference = Inference(
            client, health, pin_wait_s=config.rollout_pin_wait_s, generate_s=config.rollout_generate_s
        )
        self.tests = VisibleTests(functions, health)
        self.outbox = Outbox(bus, health)
        self.held: dict[str, Held] = {}
        self._slots = asyncio.Semaphore(config.rollout_concurrency)
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """What everybody must hear: which replica serves what, cancels, runs."""
        heard = [topics.POLICIES_APPLIED, topics.RUNS_CONTROL, topics.ATTEMPTS_CANCEL]
        async for delivery in self.bus.deliveries(heard, None, 64):
            match delivery.message:
                case PolicyApplied() as message:
                    self.inference.apply(message)
                case RunControl() as message if self.words.count(message):
                    self.runs.control(message)
                case AttemptCancel() as message:
                    self.cancel(message)
            delivery.done()

    async def take(self, group: asyncio.TaskGroup) -> None:
        """Takes a request only when there is a place for it."""
        deliveries = aiter(self.bus.deliveries([topics.ROLLOUTS_REQUESTED], "rollout", UNACKNOWLEDGED))
        while True:
            await self.tests.ready()
            await self._slots.acquire()
            try:
                delivery = await anext(deliveries)
            except BaseException:
                self._slots.release()
                raise
            task = group.create_task(self.attempt(delivery))
            self._tasks.add(task)
            task.add_done_callback(self._attempt_ended)

    def _attempt_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()

    async def attempt(self, delivery: Delivery) -> None:
        """One request, from its delivery to the durable result."""
        request: RolloutRequested = delivery.message
        key = request.key
        if key.purpose is Purpose.train and (state := self.runs.state(request.run)) != "running":
            if state == "finished":
                # Most such requests are of no use to the ledger, but a run may be resumed, and what it asks for then may be
                # here before its word. Held for ever, those of finished runs would crowd out the others.
                await self._failed(request, "its run is finished, as far as this worker has heard")
                delivery.done()
            else:
                delivery.retry(HELD_RETRY_S)
            return
        known = self.held.get(key.attempt)
        if known is not None and known.epoch >= key.epoch:  # delivered again, or a zombie of an older epoch
            # Of the same epoch the delivery before this one counts no more, if the bus took it from us in between. So
            # this one stands for the request until the attempt is claimed (then it has an agent).
            over = known.epoch > key.epoch or known.dropped or known.agent is not None
            delivery.done() if over else delivery.retry(UNREADY_RETRY_S)
            return
        if known is not None:
            known.drop()
        held = self.held[key.attempt] = Held(request)
        metrics.RUNNING.labels(request.run).inc()
        metrics.ENGINE_RETRIES.labels(request.run)  # 0, not nothing, while none is needed
        try:
            prepared = await self._prepare(request, delivery)
            if prepared is None:
                return
            with span_for("attempt", delivery, place=Place.of(key.attempt, key.epoch), worker=self.name):
                claim = AttemptClaimed(run=request.run, key=key, worker=self.name)
                with span("claim"):
                    await self.outbox.send(topics.ATTEMPTS_PROGRESS, key.attempt, claim)
                delivery.done()
                if not held.dropped:
                    await self._run(held, *prepared)
        finally:
            metrics.RUNNING.labels(request.run).dec()
            if self.held.get(key.attempt) is held:
                del self.held[key.attempt]

    async def _prepare(self, request: RolloutRequested, delivery: Delivery) -> tuple[Run, Problem] | None:
        """The run and the problem, or None: then the delivery is dealt with."""
        try:
            return await self.runs.run(request.run), await self._problem(request)
        except InfrastructureError as error:
            await self._failed(request, str(error))
            delivery.done()
        except (ObjectMissing, OSError) as error:  # the object store is away, or the run's objects are not there yet
            log.warning(
                "not_ready", run=request.run, attempt=request.key.attempt, error=f"{type(error).__name__}: {error}"
            )
            delivery.retry(UNREADY_RETRY_S)
        except Exception as error:  # an unknown format, a damaged pack: asking again and again would hide it
            await self._failed(request, f"{type(error).__name__}: {error}")
            delivery.done()
        return None

    async def _problem(self, request: RolloutRequested) -> Problem:
        problems = await self.runs.pack(request.pack)
        try:
            return problems[request.key.problem]
        except KeyError:
            raise InfrastructureError(f"pack {request.pack.key} has no problem {request.key.problem!r}") from None

    async def _run(self, held: Held, run: Run, problem: Problem) -> None:
        request = held.request
        session = Session(
            inference=self.inference,
            attempt=f"{request.key.attempt}.{request.key.epoch}",
            wanted=Wanted(
                request.run,
                request.key.group,
                request.policy_floor,
                request.pinned,
                spare=self.runs.state(request.run) != "running",
            ),
            temperature=request.sampling.temperature,
            stop_tokens=run.format.stop_tokens,
            routing=run.routing,
            seed=request.seed,
        )
        agent = held.agent = Agent(problem, run.format, session, self.tests, request.sampling)
        held.running = asyncio.create_task(agent.run())
        try:
            stop = await held.running
            if agent.recorder.newest_version < 0:
                raise InfrastructureError(f"ended ({stop}) before the first token was sampled")
            with span("store trajectory"):
                trajectory = await self._store(request, agent, stop, {"worker": self.name, "replica": session.replica})
        except InfrastructureError as error:
            await self._failed(request, str(error))
            return
        except asyncio.CancelledError:
            held.running.cancel()
            if held.dropped and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                return  # the agent was cancelled, not this task: nobody wants the outcome
            raise
        except Exception as error:  # a defect of ours must not read as the agent's, nor take the other attempts along
            log.exception("attempt_failed", run=request.run, attempt=request.key.attempt)
            await self._failed(request, f"{type(error).__name__}: {error}")
            return
        seconds = time.monotonic() - held.started
        message = finished(request, agent, stop, trajectory, worker=self.name, seconds=seconds)
        await self.outbox.send(topics.ROLLOUTS_FINISHED, request.key.attempt, message)
        metrics.ATTEMPTS.labels(request.run, stop).inc()
        metrics.TOKENS.labels(request.run, "sampled").inc(message.effort.sampled_tokens)
        metrics.TOKENS.labels(request.run, "observed").inc(message.effort.tool_output_tokens)
        metrics.TOKENS.labels(request.run, "prompt").inc(message.effort.prompt_tokens)

    async def _store(self, request: RolloutRequested, agent: Agent, stop: StopReason, notes: dict[str, str]) -> Ref:
        """The work is done and must not be lost: waits for the object store as long as it takes."""
        delay = 0.1
        while True:
            try:
                trajectory = await asyncio.to_thread(store, self.objects, request, agent, stop, notes)
            except (OSError, TimeoutError, ConnectionError) as error:
                if self.health.wait_on("objects"):  # else every attempt in hand says so, time and again
                    log.warning("objects_unavailable", error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(5.0, delay * 2)
            else:
                self.health.clear("objects")
                return trajectory

    async def _failed(self, request: RolloutRequested, reason: str) -> None:
        log.warning("rollout_failed", run=request.run, attempt=request.key.attempt, reason=reason)
        metrics.ATTEMPTS.labels(request.run, StopReason.infrastructure).inc()
        message = RolloutFailed(run=request.run, key=request.key, reason=reason[:REASON_CHARS], worker=self.name)
        await self.outbox.send(topics.ROLLOUTS_FINISHED, request.key.attempt, message)

    def cancel(self, message: AttemptCancel) -> None:
        """Without an attempt: all training attempts of the run. Evaluations are not the scheduler's to cancel. What was
        said to an older epoch is not said to this one."""
        for held in list(self.held.values()):
            meant = message.epoch is None or held.epoch <= message.epoch
            named = held.request.key.attempt == message.attempt and meant
            whole_run = message.attempt is None and held.request.key.purpose is Purpose.train
            if held.request.run == message.run and (named or whole_run):
                held.drop() if message.mode == "drop" else held.submit()

    async def heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.config.rollout_heartbeat_s)
            by_run: defaultdict[str, list[Held]] = defaultdict(list)
            for held in self.held.values():
                by_run[held.request.run].append(held)
            for run, all_held in by_run.items():
                for i in range(0, len(all_held), HEARTBEAT_ATTEMPTS):
                    chunk = all_held[i : i + HEARTBEAT_ATTEMPTS]
                    attempts = {h.request.key.attempt: (h.epoch, h.oldest_version) for h in chunk}
                    message = AttemptHeartbeat(run=run, worker=self.name, attempts=attempts)
                    await self.outbox.send(topics.ATTEMPTS_PROGRESS, self.name, message)

    async def drain(self) -> None:
        """Attempts in hand may finish for a while; what is left is given back at once rather than after its lease."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.config.rollout_drain_s)
        left = [held for held in self.held.values() if held.running is not None and not held.running.done()]
        for held in left:
            held.drop()
        reports = [self._failed(held.request, "the worker left before the end") for held in left]
        with contextlib.suppress(TimeoutError):  # while the bus is away, the lease must do
            async with asyncio.timeout(LEAVE_S):
                await asyncio.gather(*reports)
        for task in self._tasks:
            task.cancel()
