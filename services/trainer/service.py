"""Wiring: runs.control and groups.ready in; versions, commits, quarantines and alerts out.

One run at a time, the one started last. Training runs in a thread of its own, so that health, metrics and fetching go on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
from collections import OrderedDict
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import structlog
import torch

from services.trainer import groups, metrics, rollback
from services.trainer.checkpoints import NoneUsable, Superseded
from services.trainer.config import TrainerSettings
from services.trainer.control import RunState
from services.trainer.hand import Hand
from services.trainer.rollback import Wanted
from services.trainer.training import FIRST_DELAY_S, LAST_DELAY_S, Advance, Announcement, TrainingRun, insist
from shared.bus import Bus, BusUnavailable
from shared.contracts.messages import Alert, GroupQuarantined, GroupReady, RunControl
from shared.contracts.run import RunConfig
from shared.contracts.topics import (
    ALERTS,
    GROUPS_READY,
    POLICIES_PUBLISHED,
    RUNS_CONTROL,
    STEPS_COMMITTED,
)
from shared.contracts.words import Words
from shared.objects import Objects
from shared.telemetry import Health
from shared.telemetry_spans import Place, Span, span, span_about

FENCE_EVERY_S = 5.0  # how often an idle trainer looks whether a newer incarnation has taken its run
A_RUN, GROUPS, THE_BUS = "a run to be started (runs.control)", "groups", "the bus"
TAKEN = "another trainer has the run: this one waits for the next run"
CHECKPOINTS = "a checkpoint that can be used (its log names them; etude rollback goes on from a published version)"
AGAIN_S = 60.0  # until it is looked whether checkpoints that could not be used can be now
log = structlog.get_logger()


class Service:
    def __init__(
        self, settings: TrainerSettings, bus: Bus, objects: Objects, health: Health, stop: asyncio.Event
    ) -> None:
        self.settings, self.bus, self.objects, self.health, self.stop = settings, bus, objects, health, stop
        self.runs: dict[str, RunState] = {}
        self.early: dict[str, OrderedDict[str, GroupReady]] = {}  # announced before the run is open here
        self.taken: set[str] = set()  # runs that another trainer has
        self.hand: Hand | None = None
        self.training: TrainingRun | None = None
        self.changed = asyncio.Event()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="train")

    async def serve(self) -> None:
        self.health.wait_on(A_RUN)
        torch.set_num_threads(self.settings.trainer_threads)
        self.control = self.bus.deliveries([RUNS_CONTROL], group=None, max_in_flight=64)
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
            await asyncio.to_thread(self.thread.shutdown)  # a step may be in hand

    def _let_go(self, run: str) -> None:
        """Nothing of a run that is over here, or that another has, stays in memory, nor turns announcements away from the next."""
        if self.hand is not None:
            self.hand.close()
        self.hand = self.training = None
        metrics.forget(run)

    # -- listening ---------------------------------------------------------------------------------------------------

    async def _listen_control(self) -> None:
        words = Words()
        async for delivery in self.control:
            message: RunControl = delivery.message
            if self.settings.trainer_run in ("", message.run) and words.count(message):
                state = self.runs.setdefault(message.run, RunState())
                if message.action == "start" and state.config is None:
                    self.runs[message.run] = self.runs.pop(message.run)  # the one started last is the last one
                state.apply(message)
            delivery.done()
            self._wake()

    async def _listen_groups(self) -> None:
        """Acknowledged at once: the ledger announces again what a dead trainer had in hand (see the package's docstring)."""
        own = self.settings.trainer_run
        group = f"trainer.{own}" if own else "trainer"  # of trainers that share a group, each would hear a part
        deliveries = self.bus.deliveries([GROUPS_READY], group=group, max_in_flight=256)
        try:
            async for delivery in deliveries:
                if not own or delivery.message.run == own:
                    self._announced(delivery.message)  # Superseded: not acknowledged, so that the heir hears of it
                delivery.done()
        finally:
            await deliveries.aclose()

    def _announced(self, ready: GroupReady) -> None:
        """Raises Superseded: it is meant for a trainer after this one."""
        if self.training is None or self.training.run != ready.run or self.hand is None:
            early = self.early.setdefault(ready.run, OrderedDict())
            early.pop(ready.group, None)  # said again, it has its place in what is said again
            early[ready.group] = ready
        elif ready.incarnation > self.training.mine.incarnation:
            raise Superseded(ready.run, f"groups are announced to incarnation {ready.incarnation}")
        elif 0 <= ready.incarnation < self.training.mine.incarnation:
            # Meant for a trainer before this one. What of it still holds is announced again for this incarnation;
            # trained now, it could come ahead of older groups and break the bound on age.
            metrics.REPEATED.labels(ready.run).inc()
        elif self.training.knows(ready.group) or ready.group in self.hand:
            metrics.REPEATED.labels(ready.run).inc()
        else:
            self.hand.add(ready)

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
        """The run to train: the one started last, unless it has ended or another trainer has it. The engines follow the same
        one."""
        run = next((r for r, s in reversed(self.runs.items()) if s.config is not None), None)
        return run if run is not None and run not in self.taken and self.runs[run].state != "finished" else None

    async def _settled(self) -> str | None:
        """`runs.control` is read from its beginning: only when its past has been read is what it says the present. To open a
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

    async def _in_thread(self, function: Any, *arguments: Any, **options: Any) -> Any:
        """In the one training thread: torch keeps its thread setting and autograd its graph there."""
        context = contextvars.copy_context()  # spans there hang below ours
        return await asyncio.get_running_loop().run_in_executor(
            self.thread, lambda: context.run(function, *arguments, **options)
        )

    async def _open(self, run: str) -> TrainingRun:
        ref = self.runs[run].config
        assert ref is not None
        config = msgspec.json.decode(await asyncio.to_thread(self.objects.get, ref), type=RunConfig)

        back = await self._wanted(run)

        def build() -> TrainingRun:
            torch.set_num_threads(self.settings.trainer_threads)
            return TrainingRun(
                self.objects,
                config,
                trainer=self.health.name,
                cache=self.settings.state / "trainer",
                device=self.settings.device,
                zero_stage=self.settings.trainer_zero_stage,
                mtp_stride=self.settings.trainer_mtp_stride,
                back=back,
            )

        training: TrainingRun = await self._in_thread(build)
        await self._announce(training.opening)
        metrics.begin(run, training.mine.incarnation, training.serial)
        log.info(
            "incarnation_started", incarnation=training.mine.incarnation, step=training.step, serial=training.serial
        )
        return training

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

    async def _wanted(self, run: str) -> Wanted | None:
        """The version that the run must go back to now. One that it cannot go back to is said aloud, and forgotten."""
        said = self.runs[run].rollbacks
        back = await self._in_thread(insist, lambda: rollback.pending(self.objects, run, said))
        if back is None:
            return None
        try:
            # Below the state, as a checkpoint on its way anywhere: /tmp may be memory, and too small for one.
            room = self.settings.state / "trainer"
            await self._in_thread(insist, lambda: rollback.resume(self.objects, run, back.serial, room))
        except rollback.Impossible as why:
            said.clear()
            what = f"the run does not go back: {why}"
            alert = Alert(run=run, name="rollback_refused", severity="critical", what=what)
            await self._announce([(ALERTS, alert)])
            return None
        return back

    async def _train(self, run: str) -> None:
        """From opening to the run's end or ours. A last checkpoint is written either way."""
        self.health.wait_on("weights")
        try:
            training = await self._opened(run)
        finally:
            self.health.clear("weights")
        if training is None:
            return
        self.training = training
        model, config = training.engine.model.config, training.config.train
        self.hand = hand = Hand(
            lambda ready: groups.load(self.objects, ready, model, config),
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
        said = len(self.runs[run].rollbacks)
        try:
            while not self.stop.is_set() and self._current() == run:
                hand.changed.clear()
                if len(self.runs[run].rollbacks) > said:
                    if await self._wanted(run) is not None:
                        return  # without a checkpoint: this branch ends here, and it would push older ones out
                    said = len(self.runs[run].rollbacks)
                batch = None if self.runs[run].state == "held" else hand.take(training.config.schedule.groups_per_step)
                metrics.IN_HAND.labels(run).set(len(hand))
                if batch is not None:
                    self.health.clear(GROUPS)
                    with _span(training, batch):
                        await self._step(training, batch)
                    continue
                if self.runs[run].state != "running":
                    await self._checkpoint(training)  # what comes now may still make a batch, but need not
                self.health.wait_on(GROUPS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FENCE_EVERY_S):
                        await hand.changed.wait()
                    continue
                await self._in_thread(training.check_not_superseded)
            await self._checkpoint(training)
        except BusUnavailable:  # told to stop while the bus is away
            await self._checkpoint(training)
            raise
        finally:
            self.health.clear(GROUPS)
            self._let_go(run)

    async def _step(self, training: TrainingRun, batch: list[groups.LoadedGroup]) -> None:
        result: Advance = await self._in_thread(training.advance, batch)
        await self._announce(result.others)
        if result.published is None or result.committed is None:
            return
        if training.checkpoint_due:  # before anybody samples with the version: nothing of it can be lost then
            await self._checkpoint(training)
        await self._announce([(POLICIES_PUBLISHED, result.published)])
        await self._announce([(STEPS_COMMITTED, result.committed)])
        metrics.note_step(result.committed)
        figures = result.committed.metrics
        log.info(
            "step",
            step=training.step,
            serial=training.serial,
            reward=round(figures["reward_mean"], 4),
            age=figures["age_max"],
            seconds=round(figures["seconds_step"], 2),
        )

    async def _checkpoint(self, training: TrainingRun) -> None:
        if training.has_uncheckpointed_steps:
            with span("checkpoint"):
                await self._in_thread(training.checkpoint)

    async def _announce(self, messages: list[Announcement]) -> None:
        """Durable when it returns. A bus that is away is waited for: to die of it would cost the steps since the last
        checkpoint. Raises BusUnavailable once we are told to stop; the next life says again what was not said."""
        delay = FIRST_DELAY_S
        while True:
            try:
                await self.bus.publish_many([(topic, message.run, message) for topic, message in messages])  # type: ignore[attr-defined]
                break
            except BusUnavailable as error:
                if self.stop.is_set():
                    raise
                self.health.wait_on(THE_BUS)
                log.warning("bus_unavailable", error=str(error), again_in_s=delay)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(LAST_DELAY_S, 2 * delay)
        self.health.clear(THE_BUS)
        for _, message in messages:
            if isinstance(message, GroupQuarantined):
                metrics.QUARANTINED.labels(message.run).inc()
                log.warning("group_quarantined", group=message.group, reason=message.reason)
            elif isinstance(message, Alert):
                log.error(message.name, what=message.what, examples=message.examples)


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
