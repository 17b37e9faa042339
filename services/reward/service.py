"""rollouts.finished → grade → score → rollouts.scored."""

from __future__ import annotations

import asyncio
import time

import structlog

from services.reward import metrics
from services.reward.config import RewardSettings
from services.reward.graders import Graders, GradingFailed, Jobs
from services.reward.jobs import Item, Unreadable
from services.reward.runs import Runs, UnusableConfig
from services.reward.score import missing, score
from services.reward.watching import Watching
from shared.bus import Bus, Delivery
from shared.contracts import topics
from shared.contracts.graded import Graded
from shared.contracts.messages import Alert, RolloutFailed, RolloutFinished, RolloutScored
from shared.contracts.run import RewardConfig
from shared.objects import Objects
from shared.telemetry import Health
from shared.telemetry_spans import carry, span_for

UNKNOWN_CONFIG_RETRY_S = 1.0  # its announcement may still be on its way
UNKNOWN_CONFIG_TRIES = 60
AFTER_ERROR_RETRY_S = 2.0
REASON_CHARS = 2000
UNREADABLE = f"{Unreadable.__name__}: "  # how a grader says that the rollout itself cannot be read

log = structlog.get_logger()


async def serve(
    config: RewardSettings, bus: Bus, objects: Objects, jobs: Jobs, health: Health, stop: asyncio.Event
) -> None:
    """Until `stop` is set. What is unacknowledged then comes again, and finds its verdict written."""
    graders = Graders(
        jobs, objects, health,
        batch=config.reward_batch, linger_s=config.reward_linger_s, patience_s=config.reward_patience_s,
        tries=config.reward_tries,
    )  # fmt: skip
    service = RewardService(bus, objects, graders, health.name)
    async with graders, asyncio.TaskGroup() as group:
        listening = group.create_task(service.listen())
        watching = group.create_task(service.watching.run())
        taking = group.create_task(service.take(group, config.reward_in_flight))
        grading = group.create_task(graders.ended())
        await stop.wait()
        taking.cancel()
        listening.cancel()
        await service.drain(config.reward_linger_s + 5.0)
        watching.cancel()
        grading.cancel()


class RewardService:
    def __init__(self, bus: Bus, objects: Objects, graders: Graders, name: str) -> None:
        self._bus = bus
        self._graders = graders
        self._name = name
        self._runs = Runs(objects)
        self.watching = Watching(bus)
        self._tasks: set[asyncio.Task[None]] = set()
        self._said_missing: set[tuple[str, str, str]] = set()  # (run, reward configuration, term)
        self._unknown: dict[str, int] = {}  # attempt -> how often its reward configuration was not to be found

    async def listen(self) -> None:
        async for delivery in self._bus.deliveries([topics.RUNS_STATE], None, 16):
            self._runs.hear(delivery.message)
            delivery.done()

    async def take(self, group: asyncio.TaskGroup, in_flight: int) -> None:
        async for delivery in self._bus.deliveries([topics.ROLLOUTS_FINISHED], "reward", in_flight):
            if isinstance(delivery.message, RolloutFailed):
                delivery.done()
                continue
            task = group.create_task(self._handle(delivery))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def drain(self, seconds: float) -> None:
        """Jobs in hand take a second or two; after that the rest is left to the next life."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in self._tasks:
            task.cancel()

    async def _handle(self, delivery: Delivery) -> None:
        message: RolloutFinished = delivery.message
        started = time.monotonic()
        metrics.IN_HAND.inc()
        try:
            reward = await self._runs.reward(message.run, message.reward_config)
            if reward is None and self._wait_for_config(message.key.attempt):
                delivery.retry(UNKNOWN_CONFIG_RETRY_S)
                return
            self._unknown.pop(message.key.attempt, None)
            if reward is None:
                raise GradingFailed(
                    f"reward configuration {message.reward_config!r} of {message.run} was never announced"
                )
            with span_for("grade", delivery) as said:
                graded = await self._grade(message)
                said.note(solved=graded.verdict.solved)
                await self._score(message, reward, graded)
        except (GradingFailed, UnusableConfig) as error:
            await self._fail(message, str(error), delivery)
        except Exception as error:  # bus or object store away; the verdict, if there is one, is kept
            log.warning(
                "not_scored", run=message.run, attempt=message.key.attempt, error=f"{type(error).__name__}: {error}"
            )
            delivery.retry(AFTER_ERROR_RETRY_S)
        else:
            metrics.note_graded(message.key.attempt, time.monotonic() - started)
            delivery.done()
        finally:
            metrics.IN_HAND.dec()

    def _wait_for_config(self, attempt: str) -> bool:
        self._unknown[attempt] = self._unknown.get(attempt, 0) + 1
        return self._unknown[attempt] < UNKNOWN_CONFIG_TRIES

    async def _grade(self, message: RolloutFinished) -> Graded:
        return await self._graders.grade(
            Item(
                run=message.run,
                key=message.key,
                trajectory=message.trajectory,
                pack=await self._runs.pack(message),
                pack_hidden=message.pack_hidden,
                seconds=message.grading_s,
                trace=carry(),
            )
        )

    async def _score(self, message: RolloutFinished, config: RewardConfig, graded: Graded) -> None:
        without = missing(config, graded)
        reward, terms = score(config, graded.verdict, message.effort, graded.findings, without)
        scored = RolloutScored(
            run=message.run,
            key=message.key,
            verdict=graded.verdict,
            reward=reward,
            terms=terms,
            reward_config=config.id,
            trajectory=message.trajectory,
            effort=message.effort,
            stop=message.stop,
            oldest_version=message.oldest_version,
            newest_version=message.newest_version,
            found=sorted(graded.findings),
        )
        self.watching.scored(message.key.attempt)
        await self._bus.publish(topics.ROLLOUTS_SCORED, message.key.attempt, scored)
        metrics.SCORED.labels(message.run, "solved" if graded.verdict.solved else "unsolved").inc()
        for name, value in terms.items():
            metrics.REWARD.labels(message.run, name).inc(abs(value))
        await self._say_missing(message, config.id, without)

    async def _say_missing(self, message: RolloutFinished, config: str, without: dict[str, str]) -> None:
        """Alert once for each term and configuration that a term with a weight could not be computed for an attempt."""
        for name, reason in without.items():
            log.warning("term_quarantined", run=message.run, attempt=message.key.attempt, term=name, reason=reason)
            if (message.run, config, name) in self._said_missing:
                continue
            self._said_missing.add((message.run, config, name))
            what = (
                f"the term {name!r} of reward configuration {config!r} adds nothing to attempts like this one: {reason}"
            )
            alert = Alert(
                run=message.run, name="term_quarantined", severity="warning", what=what, examples=[message.key.attempt]
            )
            await self._bus.publish(topics.ALERTS, message.run, alert)

    async def _fail(self, message: RolloutFinished, reason: str, delivery: Delivery) -> None:
        log.error("grading_given_up", run=message.run, attempt=message.key.attempt, reason=reason)
        failed = RolloutFailed(
            run=message.run,
            key=message.key,
            reason=f"grading: {reason}"[:REASON_CHARS],
            worker=self._name,
            trajectory=message.trajectory,
            # What cannot be read cannot be graded either, however often: only then is the attempt sampled again.
            again="sample" if reason.startswith(UNREADABLE) else "grade",
        )
        try:
            await self._bus.publish(topics.ROLLOUTS_SCORED, message.key.attempt, failed)
        except Exception as error:
            log.warning(
                "not_scored", run=message.run, attempt=message.key.attempt, error=f"{type(error).__name__}: {error}"
            )
            delivery.retry(AFTER_ERROR_RETRY_S)
            return
        metrics.SCORED.labels(message.run, "failed").inc()
        delivery.done()
