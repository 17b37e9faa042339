"""rollouts.requested → the agent → rollouts.finished, for many attempts at a time in one process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import defaultdict
from dataclasses import replace

import structlog

from services.rollout import metrics
from services.rollout.agent import Agent
from services.rollout.attempt import AnyAgent, Held, Occupied, Work, finished, store
from services.rollout.config import RolloutSettings
from services.rollout.endpoint.foreign import ForeignAgent
from services.rollout.endpoint.server import Endpoint
from services.rollout.engine_client import EngineClient
from services.rollout.fleet import Wanted
from services.rollout.inference import PROBE_S, Inference, Session
from services.rollout.keeping import LEFT, SAVE_S, Keeper, decided
from services.rollout.outbox import Outbox
from services.rollout.runs import Run, Runs
from shared.bus import Bus, Delivery
from shared.contracts import topics
from shared.contracts.messages import (
    AttemptCancel,
    AttemptCheckpointed,
    AttemptClaimed,
    AttemptHeartbeat,
    PolicyApplied,
    RolloutFailed,
    RolloutRequested,
    RunStatus,
    StopReason,
)
from shared.contracts.run import Purpose, Ref
from shared.environments import Driven, InfrastructureError, Places, SandboxGone, Workspace
from shared.environments.registry import Environments
from shared.objects import ObjectMissing, Objects
from shared.problems import Problem
from shared.sandbox import SandboxUnavailable
from shared.telemetry import Health
from shared.telemetry_spans import Place, span, span_for

UNACKNOWLEDGED = 8  # requests that the bus may hand over ahead: more would keep them from idle workers
HELD_RETRY_S = 2.0  # requests of a paused run come back so often
UNREADY_RETRY_S = 1.0  # the run's objects could not be read
HEARTBEAT_ATTEMPTS = 500  # about 60 bytes each: well below the size of a message
HEARTBEAT_SILENT = 64  # names of replicas
REASON_CHARS = 2000
CANARY_EVERY_S = 5.0
TOO_EARLY = "told to submit before the agent had begun"
LEAVE_S = 3.0  # for the last messages, after the time to drain

log = structlog.get_logger()


def _count_tests(source: str, seconds: float) -> None:
    metrics.SANDBOX_RUNS.labels(source).inc()
    metrics.SANDBOX_SECONDS.inc(seconds)


async def serve(
    config: RolloutSettings, bus: Bus, objects: Objects, places: Places, health: Health, stop: asyncio.Event
) -> None:
    """Until `stop` is set: then takes nothing more, lets attempts in hand finish for `rollout_drain_s`, writes a checkpoint of
    each that is left, and leaves."""
    async with EngineClient(probe_s=PROBE_S) as client:
        worker = Worker(config, bus, objects, places, health, client)
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
        places: Places,
        health: Health,
        client: EngineClient,
    ) -> None:
        self.config = config
        self.bus = bus
        self.objects = objects
        self.health = health
        self.name = health.name
        self.runs = Runs(objects, config.formats)
        self.inference = Inference(
            client, health, pin_wait_s=config.rollout_pin_wait_s, generate_s=config.rollout_generate_s
        )
        self.environments = Environments(replace(places, counted=_count_tests))
        self.endpoint = Endpoint()
        self.outbox = Outbox(bus, health)
        self.held: dict[str, Held] = {}
        self._slots = asyncio.Semaphore(config.rollout_concurrency)
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """What everybody must hear: which replica serves what, cancels, runs."""
        heard = [topics.POLICIES_APPLIED, topics.RUNS_STATE, topics.ATTEMPTS_CANCEL]
        async for delivery in self.bus.deliveries(heard, None, 64):
            match delivery.message:
                case PolicyApplied() as message:
                    self.inference.apply(message)
                case RunStatus() as message:
                    self.runs.hear(message)
                case AttemptCancel() as message:
                    self.cancel(message)
            delivery.done()

    async def take(self, group: asyncio.TaskGroup) -> None:
        """Takes a request only when there is a place for it."""
        deliveries = aiter(self.bus.deliveries([topics.ROLLOUTS_REQUESTED], "rollout", UNACKNOWLEDGED))
        while True:
            await self.sandbox_ready()
            await self._slots.acquire()
            try:
                delivery = await anext(deliveries)
            except BaseException:
                self._slots.release()
                raise
            place = Occupied(self._slots)
            task = group.create_task(self.attempt(delivery, place))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(place.leave)

    async def sandbox_ready(self) -> None:
        """Return once a sandbox works; while none does, attempts must not be taken only to fail."""
        while True:
            try:
                await self.environments.ready()
                return self.health.clear("sandbox")
            except SandboxUnavailable as error:
                self.health.wait_on("sandbox")
                log.error("sandbox_unavailable", error=str(error))
                await asyncio.sleep(CANARY_EVERY_S)

    async def attempt(self, delivery: Delivery, place: Occupied) -> None:
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
                    await self._run(held, place, *prepared)
        finally:
            metrics.RUNNING.labels(request.run).dec()
            if self.held.get(key.attempt) is held:
                del self.held[key.attempt]

    async def _prepare(self, request: RolloutRequested, delivery: Delivery) -> tuple[Run, Problem] | None:
        """The run and the problem, or None: then the delivery is dealt with."""
        try:
            run, problem = await self.runs.run(request.run), await self._problem(request)
            await self.environments.ready(problem.kind)  # refused here where this worker does not know the kind
            return run, problem
        except SandboxUnavailable as error:  # of this kind alone, perhaps: attempts of others go on
            self.health.wait_on("sandbox")
            log.error("sandbox_unavailable", run=request.run, attempt=request.key.attempt, error=str(error))
            delivery.retry(CANARY_EVERY_S)
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

    async def _run(self, held: Held, place: Occupied, run: Run, problem: Problem) -> None:
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
            stop_tokens=run.renderer.stop_tokens,
            routing=run.routing,
            seed=request.seed,
            lend=place.lent,
        )
        held.running = asyncio.create_task(self._work(held, run, problem, session))
        try:
            agent, work = await held.running
            if agent.recorder.newest_version < 0:
                raise InfrastructureError(f"ended ({work.stop}) before the first token was sampled")
            with span("store trajectory"):
                trajectory = await self._store(request, agent, work)
        except InfrastructureError as error:
            if isinstance(error, SandboxGone):
                self.environments.failed(problem.kind)
                self.health.wait_on("sandbox")
            await self._failed(request, str(error), held.keeper)
            return
        except asyncio.CancelledError:
            held.running.cancel()
            if held.dropped and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                return  # the agent was cancelled, not this task: nobody wants the outcome
            raise
        except Exception as error:  # a defect of ours must not read as the agent's, nor take the other attempts along
            log.exception("attempt_failed", run=request.run, attempt=request.key.attempt)
            await self._failed(request, f"{type(error).__name__}: {error}", held.keeper)
            return
        assert held.keeper is not None, "_work has made it"
        seconds = held.keeper.spent_s + time.monotonic() - held.started
        grading_s = self.environments.of(problem).grading_s(problem)
        message = finished(
            request, agent, work.stop, trajectory, worker=self.name, seconds=seconds, grading_s=grading_s
        )
        await self.outbox.send(topics.ROLLOUTS_FINISHED, request.key.attempt, message)
        metrics.ATTEMPTS.labels(request.run, work.stop).inc()
        metrics.TOKENS.labels(request.run, "sampled").inc(message.effort.sampled_tokens)
        metrics.TOKENS.labels(request.run, "observed").inc(message.effort.tool_output_tokens)
        metrics.TOKENS.labels(request.run, "prompt").inc(message.effort.prompt_tokens)
        await held.keeper.forget()

    async def _work(self, held: Held, run: Run, problem: Problem, session: Session) -> tuple[AnyAgent, Work]:
        """Open the workspace, let the agent work in it, and return what is left. Raises InfrastructureError; Left where the
        worker leaves before the end."""
        request = held.request
        await session.served()  # before the workspace: many may wait
        keeper = held.keeper = Keeper(
            self.objects, request, self.name, self.config.rollout_checkpoint_s, self._checkpointed
        )
        environment = self.environments.of(problem)

        async def opened() -> Workspace:
            return await environment.open(problem, request.sampling)

        workspace = await opened()
        try:
            agent: AnyAgent
            if isinstance(workspace, Driven):
                agent = ForeignAgent.of(self.endpoint, run.renderer, session, workspace, request.sampling, request.run)
            else:
                agent = await keeper.begun(run.renderer, session, workspace, opened)
                workspace = agent.workspace
            held.agent = agent
            stop = StopReason.deadline
            if not isinstance(agent, Agent):
                if held.late:
                    raise InfrastructureError(TOO_EARLY)
                stop = await agent.run()
            elif not held.late:
                stop = await keeper.run(agent, session, lambda: held.leaving and not held.dropped)
            elif not agent.resumed:
                raise InfrastructureError(TOO_EARLY)
            held.over = True
            submission = await workspace.submission()  # which may add notes
            notes = {"worker": self.name, "replica": session.replica, **workspace.notes}
            decisions = (*keeper.decisions, *decided(workspace))
            return agent, Work(stop, submission, notes, decisions)
        finally:
            await workspace.close()

    async def _checkpointed(self, message: AttemptCheckpointed) -> None:
        await self.outbox.send(topics.ATTEMPTS_PROGRESS, message.key.attempt, message)

    async def _store(self, request: RolloutRequested, agent: Agent, work: Work) -> Ref:
        """The work is done and must not be lost: waits for the object store as long as it takes."""
        delay = 0.1
        while True:
            try:
                trajectory = await asyncio.to_thread(store, self.objects, request, agent, work)
            except (OSError, TimeoutError, ConnectionError) as error:
                if self.health.wait_on("objects"):  # else every attempt in hand says so, time and again
                    log.warning("objects_unavailable", error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(5.0, delay * 2)
            else:
                self.health.clear("objects")
                return trajectory

    async def _failed(self, request: RolloutRequested, reason: str, keeper: Keeper | None = None) -> None:
        """Say that the attempt is lost. `keeper`: what its next epoch can continue from."""
        log.warning("rollout_failed", run=request.run, attempt=request.key.attempt, reason=reason)
        metrics.ATTEMPTS.labels(request.run, StopReason.infrastructure).inc()
        saved = None if keeper is None else keeper.saved
        message = RolloutFailed(
            run=request.run,
            key=request.key,
            reason=reason[:REASON_CHARS],
            worker=self.name,
            checkpoint=None if saved is None else saved.ref,
            oldest_version=-1 if saved is None else saved.oldest_version,
        )
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
            silent = self.inference.fleet.silent(time.monotonic())
            silent = {run: names for run, names in silent.items() if self.runs.state(run) != "finished"}
            for run in {**by_run, **silent}:
                all_held, quiet = by_run[run], sorted(silent.get(run, []))[:HEARTBEAT_SILENT]
                for i in range(0, max(1, len(all_held)), HEARTBEAT_ATTEMPTS):
                    chunk = all_held[i : i + HEARTBEAT_ATTEMPTS]
                    attempts = {h.request.key.attempt: (h.epoch, h.oldest_version) for h in chunk}
                    message = AttemptHeartbeat(run=run, worker=self.name, attempts=attempts, silent=quiet)
                    await self.outbox.send(topics.ATTEMPTS_PROGRESS, self.name, message)

    async def drain(self) -> None:
        """Attempts in hand may finish for a while. Then each ends with a checkpoint, and is given back at once rather than after
        its lease."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.config.rollout_drain_s)
        for held in list(self.held.values()):
            held.leave()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SAVE_S)
        left = [held for held in self.held.values() if held.running is not None and not held.running.done()]
        for held in left:
            held.drop()
        reports = [self._failed(held.request, LEFT, held.keeper) for held in left]
        with contextlib.suppress(TimeoutError):  # while the bus is away, the lease must do
            async with asyncio.timeout(LEAVE_S):
                await asyncio.gather(*reports)
        for task in self._tasks:
            task.cancel()
