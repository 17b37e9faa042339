"""Wiring: runs.state and groups.ready in; versions, commits, quarantines and alerts out.

One run at a time: the one that the settings name (`trainer_run`), else the one started last, but for those that were started
beside others. Training runs in a thread of its own, so that health, metrics and fetching go on meanwhile.
What a step made is published by another thread, and then announced, while the next step computes (see `publishing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
from collections import OrderedDict
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import structlog
import torch

from services.trainer import groups, metrics, rollback
from services.trainer.announcing import THE_BUS, Announce
from services.trainer.checkpoints import NoneUsable, Superseded
from services.trainer.config import TrainerSettings
from services.trainer.hand import Hand
from services.trainer.persistence import insist
from services.trainer.publishing import Made
from services.trainer.ranks import Options, Rank, Ranks
from services.trainer.rewards import Rewards
from services.trainer.training import Advance, TrainingRun
from shared.bus import Bus, BusUnavailable
from shared.contracts.life import RunState
from shared.contracts.messages import Alert, GroupReady, PolicyPublished, Rollback, RunStatus
from shared.contracts.run import RunConfig
from shared.contracts.statuses import Statuses
from shared.contracts.topics import (
    ALERTS,
    GROUPS_READY,
    POLICIES_PUBLISHED,
    RUNS_STATE,
    STEPS_COMMITTED,
)
from shared.objects import Objects
from shared.telemetry import Health
from shared.telemetry_spans import Place, Span, span, span_about

FENCE_EVERY_S = 5.0  # how often an idle trainer looks whether a newer incarnation has taken its run
SEVERAL_RANKS = int(os.environ.get("WORLD_SIZE", "1")) > 1
A_RUN, GROUPS = "a run to be started (runs.state)", "groups"
TAKEN = "another trainer has the run: this one waits for the next run"
CHECKPOINTS = "a checkpoint that can be used (its log names them; etude rollback goes on from a published version)"
AGAIN_S = 60.0  # until it is looked whether checkpoints that could not be used can be now
log = structlog.get_logger()


class Service:
    def __init__(
        self, settings: TrainerSettings, bus: Bus, objects: Objects, health: Health, stop: asyncio.Event
    ) -> None:
        self.settings, self.bus, self.objects, self.health, self.stop = settings, bus, objects, health, stop
        self._announce = Announce(bus, health, stop)
        self.statuses = Statuses()
        self.impossible: set[str] = set()  # ids of rollbacks to what cannot be gone back to
        self.early: dict[str, OrderedDict[str, GroupReady]] = {}  # announced before the run is open here
        self.taken: set[str] = set()  # runs that another trainer has
        self.hand: Hand | None = None
        self.training: TrainingRun | None = None
        self.changed = asyncio.Event()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self.publisher = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self.publication: asyncio.Task[None] | None = None  # of the last step, until it is announced
        self.ranks: Ranks | None = None  # torch.distributed starts in the training thread

    async def serve(self) -> None:
        self.health.wait_on(A_RUN)
        torch.set_num_threads(self.settings.trainer_threads)
        if SEVERAL_RANKS:
            await self._in_thread(self._ranks)  # the others wait for this one, and not for ever
        self.control = self.bus.deliveries([RUNS_STATE], group=None, max_in_flight=64)
        listening = asyncio.create_task(self._listen_control())
        stopping = asyncio.create_task(self.stop.wait())
        stopping.add_done_callback(lambda _: self._wake())
        try:
            while True:
                try:
                    return await _first(listening, self._listen_groups(), self._work())
                except Superseded as error:
                    self.taken.add(error.run)
                    log.error("superseded", run=error.run, reason=str(error))
                    self._let_go(error.run)
                self.health.clear(THE_BUS)
                self.health.wait_on(TAKEN)
                await _first(
                    listening, self._another()
                )  # nobody reads groups: the one who has the run is to hear of all
                self.health.clear(TAKEN)
        finally:
            listening.cancel()
            stopping.cancel()
            await asyncio.gather(listening, stopping, return_exceptions=True)
            await self.control.aclose()
            if self.ranks is not None:
                self.thread.submit(self.ranks.end)
            for thread in (self.publisher, self.thread):
                await asyncio.to_thread(thread.shutdown)  # a step may be in hand, or the publication of one

    def _let_go(self, run: str) -> None:
        """Nothing of a run that is over here, or that another has, stays in memory, nor turns announcements away from the next."""
        if self.hand is not None:
            self.hand.close()
        self.hand = self.training = None
        metrics.forget(run)

    # -- listening ---------------------------------------------------------------------------------------------------

    async def _listen_control(self) -> None:
        async for delivery in self.control:
            message: RunStatus = delivery.message
            if self.settings.trainer_run in ("", message.run):
                self.statuses.hear(message)
                log.debug("status_heard", run=message.run, state=message.state.value, drain=message.drain)
            delivery.done()
            self._wake()

    async def _listen_groups(self) -> None:
        """Acknowledged at once: the ledger announces again what a dead trainer had in hand (see the package's docstring)."""
        own = self.settings.trainer_run
        group = f"trainer.{own}" if own else "trainer"  # of trainers that share a group, each would hear a part
        deliveries = self.bus.deliveries([GROUPS_READY], group=group, max_in_flight=256)
        try:
            async for delivery in deliveries:
                if self._may_train(delivery.message.run):
                    self._announced(delivery.message)  # Superseded: not acknowledged, so that the heir hears of it
                    await self._say_aside_again(delivery.message)
                delivery.done()
        finally:
            await deliveries.aclose()

    def _may_train(self, run: str) -> bool:
        """Return whether this trainer may train the run: if it is bound to one, that one; else any not started beside others."""
        if self.settings.trainer_run:
            return run == self.settings.trainer_run
        status = self.statuses.of(run)
        return status is None or not status.beside

    def _announced(self, ready: GroupReady) -> None:
        """Raises Superseded: it is meant for a trainer after this one."""
        if self.training is None or self.training.run != ready.run or self.hand is None:
            early = self.early.setdefault(ready.run, OrderedDict())
            early.pop(ready.group, None)  # said again, it has its place in what is said again
            early[ready.group] = ready
        elif ready.incarnation > self.training.mine.incarnation:
            raise Superseded(ready.run, f"groups are announced to incarnation {ready.incarnation}")
        elif max(0, ready.incarnation) < self.training.mine.incarnation:
            # Meant for a trainer before this one. What of it still holds is announced again for this incarnation;
            # trained now, it could come ahead of older groups and break the bound on age.
            metrics.REPEATED.labels(ready.run).inc()
        elif self.training.knows(ready.group) or ready.group in self.hand:
            metrics.REPEATED.labels(ready.run).inc()
        else:
            self.hand.add(ready)

    async def _say_aside_again(self, ready: GroupReady) -> None:
        """A ledger that was put back waits for a group that we set aside: it has lost our message."""
        training = self.training
        if training is not None and training.run == ready.run and ready.group in training.quarantined:
            await self._announce([training.set_aside(ready.group, "set aside before, and announced again")])

    def _wake(self) -> None:
        self.changed.set()
        if self.hand is not None:
            self.hand.changed.set()

    async def _another(self) -> None:
        """Until there is a run that nobody has taken from us, or we are told to stop."""
        while not self.stop.is_set() and self._current() is None:
            self.changed.clear()
            await self.changed.wait()

    # -- work --------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while not self.stop.is_set():
            run = await self._settled()
            if run is None:
                self.health.clear(CHECKPOINTS)
                self.health.wait_on(A_RUN)
                await self.changed.wait()
                continue
            self.health.clear(A_RUN)
            with structlog.contextvars.bound_contextvars(run=run):
                await self._train(run)

    def _current(self) -> str | None:
        """The run to train: the one that the settings name, else the one started last but not beside others; none if it has ended
        or another trainer has it. The engines follow the same one."""
        bound = self.settings.trainer_run
        status = self.statuses.of(bound) if bound else self.statuses.followed
        if status is None or not status.configs or status.run in self.taken or status.state is RunState.finished:
            return None
        return status.run

    def _status(self, run: str) -> RunStatus:
        """How a run stands that was heard of."""
        status = self.statuses.of(run)
        assert status is not None
        return status

    async def _settled(self) -> str | None:
        """`runs.state` is read from its beginning: only when its past has been read is what it says the present. To open a
        run that ended long ago would claim an incarnation of it."""
        self.changed.clear()
        past, stopped = asyncio.ensure_future(self.control.caught_up()), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait((past, stopped), return_when=asyncio.FIRST_COMPLETED)
            if self.stop.is_set():
                return None
            past.result()
        finally:
            past.cancel()
            stopped.cancel()
        return self._current()

    async def _in_thread(self, function: Any, *arguments: Any, thread: ThreadPoolExecutor | None = None) -> Any:
        """In the one training thread, unless another is named: torch keeps its thread setting and autograd its graph there."""
        context = contextvars.copy_context()  # spans there hang below ours
        return await asyncio.get_running_loop().run_in_executor(
            thread or self.thread, lambda: context.run(function, *arguments)
        )

    async def _open(self, run: str) -> TrainingRun:
        ref = self._status(run).configs[0]  # what trains is fixed for the run; `reconfigure` is the scheduler's
        config = msgspec.json.decode(await asyncio.to_thread(self.objects.get, ref), type=RunConfig)

        back = await self._wanted(run)

        def build() -> TrainingRun:
            torch.set_num_threads(self.settings.trainer_threads)
            return TrainingRun(
                self.objects,
                config,
                trainer=self.health.name,
                cache=self.settings.state / "trainer",
                ranks=self._ranks(),
                options=Options(
                    zero_stage=self.settings.trainer_zero_stage,
                    context_ranks=self.settings.trainer_context_ranks,
                    expert_ranks=self.settings.trainer_expert_ranks,
                    recompute=self.settings.trainer_recompute,
                    arithmetic=self.settings.arithmetic,
                    mtp_stride=self.settings.trainer_mtp_stride,
                ),
                back=back,
            )

        training: TrainingRun = await self._in_thread(build)
        await self._announce(training.opening)
        metrics.begin(run, training.mine.incarnation, training.serial)
        log.info(
            "incarnation_started", incarnation=training.mine.incarnation, step=training.step, serial=training.serial
        )
        return training

    def _ranks(self) -> Ranks:
        if self.ranks is None:
            self.ranks = Ranks(Rank(self.objects, self.settings.state / "trainer", self.settings.device))
        return self.ranks

    async def _opened(self, run: str) -> TrainingRun | None:
        """None: none of the run's checkpoints can be used. What a person must do is said until it is done."""
        try:
            training = await self._open(run)
        except NoneUsable as error:
            log.error("no_checkpoint_usable", reason=str(error))
            self.health.wait_on(CHECKPOINTS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S):
                    await self.changed.wait()  # perhaps the word to go back
            return None
        self.health.clear(CHECKPOINTS)
        return training

    async def _wanted(self, run: str) -> Rollback | None:
        """Return where the run must go back to now; None: nowhere. Raise an alert where it cannot, once."""
        wanted = self._status(run).rollback
        if wanted is None or wanted.id in self.impossible:
            return None
        if not await self._in_thread(insist, lambda: rollback.is_pending(self.objects, run, wanted)):
            return None
        try:
            # Below the state, as a checkpoint on its way anywhere: /tmp may be memory, and too small for one.
            room = self.settings.state / "trainer"
            await self._in_thread(insist, lambda: rollback.resume(self.objects, run, wanted.serial, room))
        except rollback.Impossible as why:
            self.impossible.add(wanted.id)
            what = f"the run does not go back: {why}"
            alert = Alert(run=run, name="rollback_refused", severity="critical", what=what)
            await self._announce([(ALERTS, alert)])
            return None
        return wanted

    async def _train(self, run: str) -> None:
        """From opening to the run's end or ours. A last checkpoint is written either way."""
        self.health.wait_on("weights")
        told = self._status(run).rollback
        try:
            training = await self._opened(run)
        finally:
            self.health.clear("weights")
        if training is None:
            return
        self.training = training
        model, config = training.engine.model.config, training.config.train
        lengths = Rewards(self.objects, lambda: self._status(run).configs).length
        self.hand = hand = Hand(
            lambda ready: groups.load(self.objects, ready, model, config, lengths),
            lambda ready, reason: self._announce([training.set_aside(ready.group, reason)]),
            fetches=self.settings.trainer_fetches,
            ahead=2
            * training.config.schedule.groups_per_step,  # the next step's, and one more to fetch while it trains
        )
        early = self.early.pop(run, OrderedDict())
        if later := [ready for ready in early.values() if ready.incarnation > training.mine.incarnation]:
            # Acknowledged before we knew who we are: an heir that lives already waits for them.
            await self._announce([(GROUPS_READY, ready) for ready in later])
            raise Superseded(run, f"groups are announced to incarnation {later[0].incarnation}")
        for ready in early.values():
            self._announced(ready)
        try:
            while not self.stop.is_set() and self._current() == run:
                hand.changed.clear()
                if self.publication is not None and self.publication.done():
                    await self._published()
                if self._status(run).rollback != told:
                    await self._published()
                    if await self._wanted(run) is not None:
                        return  # without a checkpoint: this branch ends here, and it would push older ones out
                    told = self._status(run).rollback
                if training.builds_on(self._status(run).damaged):
                    await self._published()
                    if training.builds_on(self._status(run).damaged):  # the version that was on its way may be a base
                        await self._publish_again(training, self._status(run).damaged)
                batch = None if _held(self._status(run)) else hand.take(training.config.schedule.groups_per_step)
                metrics.IN_HAND.labels(run).set(len(hand))
                training.shares.lap("waiting")
                metrics.note_time(run, training.shares.report())
                if batch is not None:
                    self.health.clear(GROUPS)
                    with _span(training, batch):
                        await self._step(training, batch)
                    continue
                if self._status(run).state is not RunState.running:
                    await self._checkpoint(training)  # what comes now may still make a batch, but need not
                self.health.wait_on(GROUPS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FENCE_EVERY_S):
                        await hand.changed.wait()
                    continue
                await self._in_thread(training.check_not_superseded)
            await self._checkpoint(training)
        except BusUnavailable:  # told to stop while the bus is away
            await self._end_of_publication()
            await self._checkpoint(training)
            raise
        finally:
            await self._end_of_publication()  # before anybody opens the run again
            self.health.clear(GROUPS)
            self._let_go(run)

    async def _publish_again(self, training: TrainingRun, damaged: int) -> None:
        """No replica can read version `damaged`. Said again, or heard by a later life, it names no part of the chain any more."""
        published: PolicyPublished = await self._in_thread(training.publish_again)
        await self._announce([(POLICIES_PUBLISHED, published)])
        metrics.SERIAL.labels(training.run).set(published.serial)
        log.warning("published_again", damaged=damaged, serial=published.serial, step=training.step)

    async def _step(self, training: TrainingRun, batch: list[groups.LoadedGroup]) -> None:
        result: Advance = await self._in_thread(training.train, batch)
        if result.others:
            await self._announce(result.others)
        if result.skipped is not None:
            metrics.SKIPPED.labels(training.run, result.skipped).inc()
        if result.made is None:
            return
        before, publication = self.publication, self._publish(training, result.made, self.publication)
        self.publication = asyncio.create_task(publication)
        self.publication.add_done_callback(lambda _: self._wake())
        if before is not None:
            await before  # the next step waits until the step before this one is announced

    async def _publish(self, training: TrainingRun, made: Made, before: asyncio.Task[None] | None) -> None:
        """Make durable what a step made, its checkpoint too, if one is due: nothing of a version can be lost when somebody samples
        with it. Then announce it, after the step `before` it."""
        try:
            published, committed = await self._in_thread(training.publish, made, thread=self.publisher)
        except BaseException as error:
            made.fail(error)  # the training thread may wait for it
            raise
        if before is not None:
            await before
        await self._announce([(POLICIES_PUBLISHED, published)])
        await self._announce([(STEPS_COMMITTED, committed)])
        metrics.note_step(committed)
        figures = committed.metrics
        log.info(
            "step",
            step=committed.step,
            serial=committed.serial,
            reward=round(figures["reward_mean"], 4),
            age=figures["age_max"],
            seconds=round(figures["seconds_step"], 2),
        )

    async def _published(self) -> None:
        """Until the last step is published and announced. Raises what went wrong with it."""
        if self.publication is not None:
            await self.publication
            self.publication = None

    async def _end_of_publication(self) -> None:
        """Until the last step is published, or failed to be: what it raised was raised before, or is about the bus."""
        if self.publication is not None:
            await asyncio.gather(self.publication, return_exceptions=True)
            self.publication = None

    async def _checkpoint(self, training: TrainingRun) -> None:
        await self._published()
        if training.has_uncheckpointed_steps:
            with span("checkpoint"):
                await self._in_thread(training.checkpoint)


def _held(status: RunStatus) -> bool:
    """Whether not even what is complete is trained."""
    return status.state is RunState.paused and not status.drain


def _span(training: TrainingRun, batch: list[groups.LoadedGroup]) -> Span:
    """Of a step, linked to the attempts that it trains. Its version's publication hangs below, and what becomes of that."""
    run, incarnation, step = training.run, training.mine.incarnation, training.step + 1
    links = (Place.of(member.attempt, member.epoch) for loaded in batch for member in loaded.ready.members)
    subject = f"{run}/{incarnation}/{step}"
    return span_about(
        "training step", subject, links=links, run=run, incarnation=incarnation, step=step, groups=len(batch)
    )


async def _first(listening: asyncio.Task[None], *work: Coroutine[Any, Any, None]) -> None:
    """Until one of them is done or fails; the work, not the listening, is over then."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait([listening, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve(settings: TrainerSettings, bus: Bus, objects: Objects, health: Health, stop: asyncio.Event) -> None:
    """Until `stop`. While another trainer has the run, it waits for one that begins: started again, it would take it back."""
    with contextlib.suppress(asyncio.CancelledError):
        await Service(settings, bus, objects, health, stop).serve()
