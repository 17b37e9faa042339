"""One run in training: resume, step, publish, checkpoint. Blocking calls, no bus: `service` moves the messages.

Order, and why no crash loses anything:
1. incarnation claimed, masters restored; `opening` tells what a lost process may have failed to tell, then the new life;
2. a step: fenced, trained, the version's objects put, then the manifest; only then the messages of the step;
3. a checkpoint, if due, before the step's version and commit are announced. With one every step, whatever was sampled was
   sampled by weights that survive; otherwise a death makes what the lost versions sampled older, and too old is dropped.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import structlog
import torch

from services.trainer import checkpoints, rollback
from services.trainer.checkpoints import Superseded
from services.trainer.engine import Engine
from services.trainer.groups import LoadedGroup
from services.trainer.masters import load_published, published_bits
from services.trainer.step import Trainer
from shared import weights
from shared.contracts import lineage
from shared.contracts.ids import policy_prefix
from shared.contracts.messages import (
    Alert,
    GroupQuarantined,
    IncarnationStarted,
    PolicyPublished,
    StepCommitted,
)
from shared.contracts.run import Ref, RunConfig
from shared.contracts.topics import ALERTS, GROUPS_QUARANTINED, POLICIES_PUBLISHED, STEPS_COMMITTED, Topic
from shared.model import Transformer, load_checkpoint
from shared.objects import ObjectMissing, Objects
from shared.telemetry_spans import span
from shared.weights.checkpoint_objects import download_directory

Announcement = tuple[Topic, msgspec.Struct]
LONGEST_REASON = 2000  # characters; what the ledger keeps of one
LOOKS = 3  # for what a trainer that still lives has made durable, before its run is taken
MEASURE_REPLAY_EVERY = 20  # steps between measurements of the mismatch without router replay: one extra forward

FIRST_DELAY_S, LAST_DELAY_S = 0.5, 15.0  # between tries to reach an object store that is away
PATIENCE_S = 600.0  # then the process ends, and the supervisor starts another from the last checkpoint

T = TypeVar("T")
log = structlog.get_logger()


@dataclass(slots=True)
class Advance:
    """What a step leads to. A checkpoint, if due; then `published` and `committed` are to be announced."""

    published: PolicyPublished | None = None
    committed: StepCommitted | None = None
    others: list[Announcement] = field(default_factory=list)  # quarantines, alerts: any time


class TrainingRun:
    """Not thread-safe: one call at a time. Opening it claims an incarnation."""

    def __init__(
        self,
        objects: Objects,
        config: RunConfig,
        *,
        trainer: str,
        cache: Path,
        device: str = "cpu",
        zero_stage: int = 0,
        mtp_stride: int = 4,
        back: rollback.Wanted | None = None,
    ) -> None:
        """`back`: the run goes on from that version instead of the newest checkpoint. Raises rollback.Impossible,
        checkpoints.NoneUsable."""
        self.objects, self.config, self.cache = objects, config, cache
        self.run = config.run
        torch.manual_seed(config.seed)
        seen = checkpoints.found(objects, self.run)
        resume = checkpoints.find(objects, self.run, cache) if back is None else self._back_to(back.serial)
        directory = download_directory(objects, config.base, cache / "base" / config.base.checksum)
        model = load_checkpoint(directory, dtype=torch.float32).to(device)
        if resume.weights is not None:
            load_published(model, resume.weights)
        reference = _frozen(load_checkpoint(directory, dtype=torch.float32).to(device)) if config.train.kl > 0 else None
        self.engine = Engine(model, config.train, zero_stage=zero_stage)
        self.trainer = Trainer(self.engine, config.train, reference=reference, mtp_stride=mtp_stride)
        if resume.state is not None:
            self.engine.load(resume.state)
        # All that took long, and a trainer that still lives may have gone on: what it made durable meanwhile is not left out. It
        # could go on for ever: what it makes durable after the last look is lost to it by the claim.
        for _ in range(LOOKS):
            newer = checkpoints.found(objects, self.run)
            if back is not None or newer == seen:
                break
            seen, resume = newer, checkpoints.find(objects, self.run, cache)
            if resume.state is not None:
                self.engine.load(resume.state)
        self.step = resume.step
        self.trained = set(resume.trained)
        self.quarantined: set[str] = set()
        self._mtp_stands = False
        self.mine = checkpoints.claim(objects, self.run, trainer, resume, back.id if back else "")
        self.forks = checkpoints.forks(checkpoints.read_incarnations(objects, self.run))
        self._positions: dict[int, tuple[int, int]] = {}
        self._checkpointed = self.step
        self._version: weights.Version | None = None
        self._since_base = 0
        self._last_committed: StepCommitted | None = resume.checkpoint.committed if resume.checkpoint else None
        if back is not None:
            self.checkpoint()  # before anything else: whoever starts again must not resume the branch that was left
        self._opening = self._open(resume)

    def _back_to(self, serial: int) -> checkpoints.Resume:
        return insist(lambda: rollback.resume(self.objects, self.run, serial, self.cache))

    @property
    def serial(self) -> int:
        """The version last published by this incarnation."""
        assert self._version is not None
        return self._version.serial

    @property
    def opening(self) -> list[Announcement]:
        """To be announced once, in this order, before the first step."""
        return self._opening

    def knows(self, group: str) -> bool:
        """Trained in this lineage, or found untrainable."""
        return group in self.trained or group in self.quarantined

    def _open(self, resume: checkpoints.Resume) -> list[Announcement]:
        said: list[Announcement] = []
        if resume.checkpoint is not None:
            said.append((STEPS_COMMITTED, resume.checkpoint.committed))
        elif (first := self._manifest(0)) is not None:
            said.append((POLICIES_PUBLISHED, _publication(*first)))
        begun = IncarnationStarted(
            run=self.run, incarnation=self.mine.incarnation, step=self.step, parent=self.mine.parent
        )
        said.append((STEPS_COMMITTED, begun))
        published = self._publish(as_base=True)
        said.append((POLICIES_PUBLISHED, published))
        return said

    # -- versions ----------------------------------------------------------------------------------------------------

    def _publish(self, groups: Mapping[str, int] | None = None, *, as_base: bool = False) -> PolicyPublished:
        """Puts the version of the present masters into the object store; durable when it returns. `groups`: what its step
        trained, and how old; None: it is no step's."""
        bits = published_bits(self.engine.model)
        base = as_base or self._version is None or self._since_base + 1 >= self.config.train.base_every
        previous = None if base else self._version
        while True:
            self.check_not_superseded()
            serial = self._version.serial + 1 if self._version else weights.highest_serial(self.objects, self.run) + 1
            try:
                ref = self._put(serial, previous, bits, {} if groups is None else rollback.note(groups))
                break
            except weights.SerialTaken:
                # Only a process that has lost its claim takes a serial of ours after we looked, and only at our start.
                if self._version is not None:
                    raise Superseded(self.run, f"somebody else published serial {serial}") from None
        self._since_base = 0 if base else self._since_base + 1
        parent = -1 if previous is None else previous.serial
        self._version = weights.Version(serial, ref, bits)
        self._positions[serial] = (self.mine.incarnation, self.step)
        return PolicyPublished(
            run=self.run, serial=serial, incarnation=self.mine.incarnation, step=self.step, parent=parent, manifest=ref
        )

    def _put(self, serial: int, previous: weights.Version | None, bits: weights.Tensors, notes: dict[str, str]) -> Ref:
        tries, place = itertools.count(), (self.mine.incarnation, self.step)
        return insist(
            lambda: weights.publish(
                self.objects, self.run, serial, *place, previous, bits, notes, again=next(tries) > 0
            )
        )

    def _manifest(self, serial: int) -> tuple[weights.Manifest, Ref] | None:
        def read() -> tuple[weights.Manifest, Ref]:
            ref = self.objects.head(f"{policy_prefix(self.run, serial)}/manifest.json")
            return weights.read_manifest(self.objects, ref), ref

        try:
            return insist(read)
        except (ObjectMissing, weights.WeightsError):
            return None

    def _position(self, serial: int) -> tuple[int, int] | None:
        """(incarnation, step) of a version; None: no manifest of this run names it."""
        if serial not in self._positions:
            found = self._manifest(serial)
            if found is None:
                return None
            self._positions[serial] = (found[0].incarnation, found[0].step)
        return self._positions[serial]

    # -- steps -------------------------------------------------------------------------------------------------------

    def age(self, loaded: LoadedGroup) -> int | None:
        """Greatest age of a token of the group in the next step; None: it names a version that this run never had."""
        places = [self._position(serial) for serial in loaded.versions]
        if any(place is None for place in places):
            return None
        return max(lineage.age(self.forks, self.mine.incarnation, self.step + 1, p) for p in places if p is not None)

    def advance(self, groups: Sequence[LoadedGroup]) -> Advance:
        """Trains one step on these groups, in the ledger's order, and puts the new version. Raises Superseded.

        Groups that cannot be trained, or are older than the bound, are quarantined and left out; if none is left, no step is made.
        """
        self.check_not_superseded()
        began = time.perf_counter()
        result = Advance()
        good = self._trainable(result, groups)
        if not good:
            return result
        batch = [replace(s, group=i) for i, (loaded, _) in enumerate(good) for s in loaded.sequences]
        attempts = sum(len(loaded.ready.members) for loaded, _ in good)
        measure = self.step % MEASURE_REPLAY_EVERY == 0
        progress = max(loaded.ready.progress for loaded, _ in good)
        with span("update", attempts=attempts, sequences=len(batch)):
            trained = self.trainer.train(batch, attempts, self.step + 1, progress=progress, measure_replay=measure)
        if not trained.applied:
            self._refuse(result, [loaded for loaded, _ in good])
            return result
        if trained.mtp_applied:
            self._mtp_stands = False
        elif not self._mtp_stands:  # said once, until a step moves it again
            self._mtp_stands = True
            what = (
                f"step {self.step + 1}: the gradient of the speculation head was not finite; the head stays as it was"
            )
            alert = Alert(run=self.run, name="mtp_gradient_not_finite", severity="warning", what=what)
            result.others.append((ALERTS, alert))
        for index in trained.bad_groups:
            self._quarantine(result, good[index][0], "log-probabilities are not finite")
        kept = [pair for index, pair in enumerate(good) if index not in trained.bad_groups]
        if not kept:
            return result
        self.step += 1
        now = time.perf_counter()
        with span("publish weights"):
            result.published = self._publish({loaded.ready.group: age for loaded, age in kept})
        metrics = trained.metrics | self._describe(kept) | {"seconds_publish": time.perf_counter() - now}
        metrics["seconds_step"] = time.perf_counter() - began
        self.trained |= {loaded.ready.group for loaded, _ in kept}
        self._last_committed = result.committed = StepCommitted(
            run=self.run,
            incarnation=self.mine.incarnation,
            step=self.step,
            serial=self.serial,
            groups={loaded.ready.group: age for loaded, age in kept},
            metrics={name: float(value) for name, value in metrics.items() if np.isfinite(value)},
        )
        return result

    def _trainable(self, result: Advance, groups: Sequence[LoadedGroup]) -> list[tuple[LoadedGroup, int]]:
        """With their ages, in the ledger's order. The gate paces so that none is older than the bound: one that is all the same
        is a bug, said aloud, and no reason to break the promise."""
        bound = self.config.schedule.max_staleness
        good: list[tuple[LoadedGroup, int]] = []
        late: list[str] = []
        for loaded in sorted(groups, key=lambda s: s.ready.sequence):
            age = self.age(loaded)
            if age is None or age < 0:
                self._quarantine(
                    result, loaded, f"sampled by versions {sorted(loaded.versions)}: not of this run's past"
                )
            elif age > bound:
                self._quarantine(result, loaded, f"{age} steps old; allowed: {bound} (schedule.max_staleness)")
                late.append(f"{loaded.ready.group}: {age} steps")
            else:
                good.append((loaded, age))
        if late:
            what = f"step {self.step + 1}: {len(late)} groups are older than {bound} steps and are quarantined"
            alert = Alert(run=self.run, name="age_bound_breached", severity="critical", what=what, examples=late[:5])
            result.others.append((ALERTS, alert))
        return good

    def set_aside(self, group: str, reason: str) -> Announcement:
        """The group is not trained. `reason` may quote what others wrote: it is cut, so that the message fits the bus."""
        self.quarantined.add(group)
        word = GroupQuarantined(
            run=self.run, group=group, reason=reason[:LONGEST_REASON], incarnation=self.mine.incarnation
        )
        return GROUPS_QUARANTINED, word

    def _quarantine(self, result: Advance, loaded: LoadedGroup, reason: str) -> None:
        result.others.append(self.set_aside(loaded.ready.group, reason))

    def _refuse(self, result: Advance, groups: Sequence[LoadedGroup]) -> None:
        """The policy's gradient overflowed. Nothing moved; nobody can say which group it was, so all of them go."""
        for loaded in groups:
            self._quarantine(result, loaded, f"the gradient of step {self.step + 1} was not finite")
        examples = [loaded.ready.group for loaded in groups][:5]
        what = f"step {self.step + 1}: the gradient was not finite; {len(groups)} groups are quarantined"
        alert = Alert(run=self.run, name="gradient_not_finite", severity="critical", what=what, examples=examples)
        result.others.append((ALERTS, alert))

    @staticmethod
    def _describe(kept: Sequence[tuple[LoadedGroup, int]]) -> dict[str, float]:
        rewards = [loaded.rewards for loaded, _ in kept]
        attempts = sum(map(len, rewards))
        contexts = [s for loaded, _ in kept for s in loaded.sequences]  # of one attempt there may be many
        solved = [m.solved for loaded, _ in kept for m in loaded.ready.members if m.solved is not None]
        known = {"solved_share": float(np.mean(solved))} if solved else {}
        return known | {
            "reward_mean": float(np.mean([np.mean(r) for r in rewards])),
            "reward_best_mean": float(np.mean([max(r) for r in rewards])),
            "signal_share": float(np.mean([loaded.has_signal for loaded, _ in kept])),
            "age_mean": float(np.mean([age for _, age in kept])),
            "age_max": float(max(age for _, age in kept)),
            "length_mean": sum(len(s.tokens_T) for s in contexts) / attempts,
            "sampled_mean": sum(int(s.sampled_T.sum()) for s in contexts) / attempts,
            "attempts": float(attempts),
        }

    def check_not_superseded(self) -> None:
        """Raises Superseded."""
        insist(lambda: checkpoints.check_not_superseded(self.objects, self.mine, self.run))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def checkpoint_due(self) -> bool:
        return self.step - self._checkpointed >= self.config.train.checkpoint_every

    @property
    def has_uncheckpointed_steps(self) -> bool:
        return self.step > self._checkpointed

    def checkpoint(self) -> None:
        """Durable when it returns. Raises Superseded."""
        committed = self._last_committed
        assert committed is not None
        state = self.engine.state()
        insist(lambda: checkpoints.write(self.objects, self.mine, committed, state, self.trained, self.cache))
        self._checkpointed = self.step
        log.info("checkpoint", run=self.run, step=self.step, incarnation=self.mine.incarnation)


def insist(call: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """The call's result, however long the object store is away within `patience_s` seconds: to give up would cost every
    step since the last checkpoint. Blocking; the call may be repeated."""
    delay, deadline = FIRST_DELAY_S, time.monotonic() + patience_s
    while True:
        try:
            return call()
        except OSError as error:
            if time.monotonic() + delay > deadline:
                raise
            log.warning("objects_unavailable", error=f"{type(error).__name__}: {error}", again_in_s=delay)
            time.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(LAST_DELAY_S, 2 * delay)


def _frozen(model: Transformer) -> Transformer:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def _publication(manifest: weights.Manifest, ref: Ref) -> PolicyPublished:
    return PolicyPublished(
        run=manifest.run,
        serial=manifest.serial,
        incarnation=manifest.incarnation,
        step=manifest.step,
        parent=manifest.parent,
        manifest=ref,
    )
