"""One run in training: resume, step, publish, checkpoint. Blocking calls, no bus: `service` moves the messages.

Order, and why no crash loses anything:
1. incarnation claimed, masters restored; `opening` tells what a lost process may have failed to tell, then the new life;
2. a step: fenced and trained (`train`); then, perhaps while the next step computes (`publish`), the version's objects are put,
   then the manifest; only then the messages of the step;
3. a checkpoint, if due, before the step's version and commit are announced. With one every step, whatever was sampled was
   sampled by weights that survive; otherwise a death makes what the lost versions sampled older, and too old is dropped.
4. the versions of two steps are published one after the other: what is announced of a step is announced after all of the
   step before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np
import structlog
from torch import Tensor

from services.trainer import checkpoints, rollback, skipped
from services.trainer.engine import Engine
from services.trainer.groups import LoadedGroup
from services.trainer.persistence import insist
from services.trainer.publishing import Made, done
from services.trainer.ranks import Options, Rank, Ranks
from services.trainer.shares import Shares, shares
from services.trainer.step import Trained, Trainer
from services.trainer.versions import Versions, publication
from shared.contracts import lineage
from shared.contracts.messages import (
    Alert,
    GroupQuarantined,
    IncarnationStarted,
    PolicyPublished,
    Rollback,
    StepCommitted,
)
from shared.contracts.run import RunConfig
from shared.contracts.topics import ALERTS, GROUPS_QUARANTINED, POLICIES_PUBLISHED, STEPS_COMMITTED, Topic
from shared.objects import Objects
from shared.telemetry_spans import span

Announcement = tuple[Topic, msgspec.Struct]
LONGEST_REASON = 2000  # characters; what the ledger keeps of one
LOOKS = 3  # for what a trainer that still lives has made durable, before its run is taken
MEASURE_REPLAY_EVERY = 20  # steps between measurements of the mismatch without router replay: one extra forward

log = structlog.get_logger()


@dataclass(slots=True)
class Advance:
    """What a step leads to. `made`: what `publish` is to make durable. Then `published` and `committed` are to be announced."""

    made: Made | None = None
    published: PolicyPublished | None = None
    committed: StepCommitted | None = None
    others: list[Announcement] = field(default_factory=list)  # quarantines, alerts: any time
    skipped: str | None = None  # why the step was skipped (not_finite, spike); None: it was not


class TrainingRun:
    """One call at a time, but for `publish`: another thread may publish a step while this one trains the next. Opening it
    claims an incarnation."""

    def __init__(
        self,
        objects: Objects,
        config: RunConfig,
        *,
        trainer: str,
        cache: Path,
        ranks: Ranks | None = None,
        options: Options = Options(),
        back: Rollback | None = None,
    ) -> None:
        """`ranks`: those that train, this process first; None: this process alone, on the CPU. `back`: the run goes on from that
        version instead of the newest checkpoint. Raises rollback.Impossible, checkpoints.NoneUsable."""
        self.objects, self.config, self.cache = objects, config, cache
        self.run = config.run
        self.ranks = ranks or Ranks(Rank(objects, cache))
        seen = checkpoints.found(objects, self.run)
        resume = checkpoints.find(objects, self.run, cache) if back is None else self._back_to(back.serial)
        self.ranks.call("open", config, resume.weights, options)
        if resume.state is not None:
            self.ranks.call("load", resume.state)
        # All that took long, and a trainer that still lives may have gone on: what it made durable meanwhile is not left out. It
        # could go on for ever: what it makes durable after the last look is lost to it by the claim.
        for _ in range(LOOKS):
            newer = checkpoints.found(objects, self.run)
            if back is not None or newer == seen:
                break
            seen, resume = newer, checkpoints.find(objects, self.run, cache)
            if resume.state is not None:
                self.ranks.call("load", resume.state)
        self.step = resume.step
        self.trained = set(resume.trained)
        self.problems: dict[str, str] = {}  # that this process has trained -> by which group
        self.quarantined: set[str] = set()
        self._mtp_stands = False
        self._skipped = 0  # steps in a row
        self.mine = checkpoints.claim(objects, self.run, trainer, resume, back.id if back else "")
        self.forks = checkpoints.forks(checkpoints.read_incarnations(objects, self.run))
        self._checkpointed = self.step
        self._versions = Versions(
            objects, self.run, self.mine.incarnation, config.train.base_every, self.check_not_superseded
        )
        self._serial = -1
        self._in_flight: Made | None = None  # what the last step made
        self._waited = 0.0  # seconds, in the last step, until its optimiser could move
        self.engine.before_step = self._wait_for_readers
        self.shares = Shares()
        self.spent = self.shares.take()  # seconds by phase, from the end of the step before to the end of the last one
        self._last_committed: StepCommitted | None = resume.checkpoint.committed if resume.checkpoint else None
        if back is not None:
            self.checkpoint()  # before anything else: whoever starts again must not resume the branch that was left
        self._opening = self._open(resume)

    def _back_to(self, serial: int) -> checkpoints.Resume:
        return insist(lambda: rollback.resume(self.objects, self.run, serial, self.cache))

    @property
    def engine(self) -> Engine:
        return self.ranks.own.engine

    @property
    def trainer(self) -> Trainer:
        return self.ranks.own.trainer

    @property
    def serial(self) -> int:
        """The version of the present weights. It may still be on its way to the object store."""
        return self._serial

    @property
    def opening(self) -> list[Announcement]:
        """To be announced once, in this order, before the first step."""
        return self._opening

    def builds_on(self, serial: int) -> bool:
        """Whether the version is part of the chain that an engine must read to build the one published last."""
        return self._versions.builds_on(serial)

    def publish_again(self) -> PolicyPublished:
        """Put the present version into the store once more, as a full base under a new serial: engines that cannot read what
        lies there go on from it. Durable when it returns. No step is made, and none is repeated. Raises Superseded."""
        self._wait_for_last()
        return self._announced(self._versions.again(self.step))

    def _announced(self, published: PolicyPublished) -> PolicyPublished:
        self._serial = published.serial
        return published

    def knows(self, group: str) -> bool:
        """Trained in this lineage, or found untrainable."""
        return group in self.trained or group in self.quarantined

    def _open(self, resume: checkpoints.Resume) -> list[Announcement]:
        said: list[Announcement] = []
        if resume.checkpoint is not None:
            said.append((STEPS_COMMITTED, resume.checkpoint.committed))
        elif (first := self._versions.manifest(0)) is not None:
            said.append((POLICIES_PUBLISHED, publication(*first)))
        begun = IncarnationStarted(
            run=self.run, incarnation=self.mine.incarnation, step=self.step, parent=self.mine.parent
        )
        said.append((STEPS_COMMITTED, begun))
        bits = self._versions.copy(self.ranks.call("published"))
        published = self._versions.publish(self.step, bits, as_base=True)
        said.append((POLICIES_PUBLISHED, self._announced(published)))
        return said

    # -- steps -------------------------------------------------------------------------------------------------------

    def age(self, loaded: LoadedGroup) -> int | None:
        """Greatest age of a token of the group in the next step; None: it names a version that this run never had."""
        places = [self._versions.position(serial) for serial in loaded.versions]
        if any(place is None for place in places):
            return None
        return max(lineage.age(self.forks, self.mine.incarnation, self.step + 1, p) for p in places if p is not None)

    def advance(self, groups: Sequence[LoadedGroup]) -> Advance:
        """Do what `train` and `publish` do, one after the other. A checkpoint that is due is left to `checkpoint`."""
        result = self.train(groups, keep=False)
        if result.made is not None:
            result.published, result.committed = self.publish(result.made)
            self.shares.lap("publishing")
        return result

    def train(self, groups: Sequence[LoadedGroup], *, keep: bool = True) -> Advance:
        """Train one step on these groups, in the ledger's order, and take what `publish` needs to make it durable. `keep`: the
        step's checkpoint too, if one is due. Raises Superseded, and whatever the publication of the step before it failed with.

        Groups that cannot be trained, or are older than the bound, are quarantined and left out; if none is left, no step is made.
        """
        self.check_not_superseded()
        began = perf_counter()
        result = Advance()
        good = self._trainable(result, groups)
        self.shares.lap("packing")
        if not good:
            return result
        batch = [replace(s, group=i) for i, (loaded, _) in enumerate(good) for s in loaded.sequences]
        attempts = sum(len(loaded.ready.members) for loaded, _ in good if not loaded.left_out)
        measure = self.step % MEASURE_REPLAY_EVERY == 0
        progress = max(loaded.ready.progress for loaded, _ in good)
        with span("update", attempts=attempts, sequences=len(batch)):
            trained: Trained = self.ranks.call("train", batch, attempts, self.step + 1, progress, measure)
        self.shares.lap("computing")
        self.shares.move(trained.metrics.get("seconds_packing", 0.0), "computing", "packing")
        self.shares.move(self._waited, "computing", "checkpointing")
        if not trained.applied:
            norm = trained.metrics["grad_norm"]
            header = skipped.Header(
                run=self.run,
                incarnation=self.mine.incarnation,
                step=self.step + 1,
                serial=self.serial,
                attempts=attempts,
                progress=progress,
                train=self.trainer.config,
                groups=[loaded.ready.group for loaded, _ in good],
                grad_norm=norm if np.isfinite(norm) else None,
                limit=trained.spike,
                mtp_stride=self.trainer.mtp_stride,
            )
            self._skip(result, trained, skipped.Batch(header, batch))
            return result
        self._skipped = 0
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
        self.trained |= {loaded.ready.group for loaded, _ in kept}
        self.problems |= {loaded.ready.problem: loaded.ready.group for loaded, _ in kept}
        metrics = trained.metrics | self._describe(kept)
        result.made = self._take({loaded.ready.group: age for loaded, age in kept}, metrics, keep)
        result.made.metrics["seconds_step"] = perf_counter() - began
        return result

    # -- durability --------------------------------------------------------------------------------------------------

    def _take(self, ages: dict[str, int], metrics: dict[str, float], keep: bool) -> Made:
        """Take from the optimiser what the step's publication needs, once everything of the step before is durable."""
        self._wait_for_last()
        self._serial += 1
        made = Made(self.step, self._serial, ages, metrics, self._versions.copy(self.ranks.call("published")))
        self.shares.lap("publishing")
        if keep and self.checkpoint_due:
            made.state, made.trained = self.ranks.call("state", True), frozenset(self.trained)
            self.shares.lap("checkpointing")
        else:
            done(made.read)
        self._in_flight = made
        self.spent = self.shares.take()
        made.metrics |= shares(self.spent)
        return made

    def _wait_for_last(self) -> None:
        """Until everything of the last step is durable. Raises what its publication failed with."""
        if self._in_flight is not None:
            self._in_flight.put.result()
            self.shares.lap("publishing")
            self._in_flight.kept.result()
            self.shares.lap("checkpointing")

    def _wait_for_readers(self) -> None:
        """Before the optimiser moves what it has lent. Called by the engine."""
        began = perf_counter()
        if self._in_flight is not None:
            self._in_flight.read.result()
        self._waited = perf_counter() - began

    def publish(self, made: Made) -> tuple[PolicyPublished, StepCommitted]:
        """Put the step's version into the object store, then write its checkpoint, if due. Both are durable when it returns: what
        it returns may be announced. Raises Superseded. May run in another thread while the next step is trained."""
        try:
            began = perf_counter()
            with span("publish weights"):
                published = self._versions.publish(made.step, made.bits, made.ages)
            if published.serial != made.serial:
                raise RuntimeError(f"step {made.step}: published serial {published.serial}, expected {made.serial}")
            done(made.put)
            metrics = made.metrics | {"seconds_publish": perf_counter() - began}
            committed = StepCommitted(
                run=self.run,
                incarnation=self.mine.incarnation,
                step=made.step,
                serial=published.serial,
                groups=made.ages,
                metrics={name: float(value) for name, value in metrics.items() if np.isfinite(value)},
            )
            self._last_committed = committed
            if made.state is not None:
                with span("checkpoint"):
                    self._write(committed, made.state, made.trained, made)
            done(made.kept)
        except BaseException as error:
            made.fail(error)
            raise
        return published, committed

    def _trainable(self, result: Advance, groups: Sequence[LoadedGroup]) -> list[tuple[LoadedGroup, int]]:
        """With their ages, in the ledger's order. The gate paces so that none is older than the bound: one that is all the same
        is a bug, said aloud, and no reason to break the promise."""
        bound = self.config.schedule.max_staleness
        good: list[tuple[LoadedGroup, int]] = []
        late: list[str] = []
        taken = dict(self.problems)
        for loaded in sorted(groups, key=lambda s: s.ready.sequence):
            age = self.age(loaded)
            if age is None or age < 0:
                self._quarantine(
                    result, loaded, f"sampled by versions {sorted(loaded.versions)}: not of this run's past"
                )
            elif age > bound:
                self._quarantine(result, loaded, f"{age} steps old; allowed: {bound} (schedule.max_staleness)")
                late.append(f"{loaded.ready.group}: {age} steps")
            elif (first := taken.setdefault(loaded.ready.problem, loaded.ready.group)) != loaded.ready.group:
                # A ledger that lost its last commits may draw a problem that it has drawn before.
                self._quarantine(result, loaded, f"its problem is trained by {first}")
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

    def _skip(self, result: Advance, trained: Trained, batch: skipped.Batch) -> None:
        """Nothing moved. Nobody can say which group it was, so all of them go. After three in a row the
        run pauses. After `etude resume` counting, and what a spike is measured against, begin again."""
        result.skipped, why, alert = skipped.say(batch.header, trained.metrics["grad_norm"], trained.spike)
        result.others += [self.set_aside(group, why) for group in batch.header.groups]
        result.others.append((ALERTS, alert))
        self._skipped += 1
        if self._skipped == skipped.MOST:
            self._skipped = 0
            self.ranks.call("forget_norms")
            key = insist(lambda: skipped.keep(self.objects, batch))
            result.others.append((ALERTS, skipped.stop(batch.header, key)))

    @staticmethod
    def _describe(kept: Sequence[tuple[LoadedGroup, int]]) -> dict[str, float]:
        rewards = [loaded.rewards for loaded, _ in kept]
        attempts = sum(map(len, rewards))
        contexts = [s for loaded, _ in kept for s in loaded.sequences]  # of one attempt there may be many
        solved = [m.solved for loaded, _ in kept for m in loaded.ready.members if m.solved is not None]
        known = {"solved_share": float(np.mean(solved))} if solved else {}
        beyond = [
            m.solved - loaded.ready.expected
            for loaded, _ in kept
            if loaded.ready.expected is not None
            for m in loaded.ready.members
            if m.solved is not None
        ]
        if beyond:
            known["solved_gain"] = float(np.mean(beyond))
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
        """Write one of the present weights, once the last step is published. Durable when it returns. Raises Superseded."""
        self._wait_for_last()
        assert self._last_committed is not None
        self._write(self._last_committed, self.ranks.call("state", True), frozenset(self.trained))
        self.shares.lap("checkpointing")

    def _write(
        self, committed: StepCommitted, state: Mapping[str, Tensor], trained: frozenset[str], made: Made | None = None
    ) -> None:
        saved = (lambda: None) if made is None else (lambda: done(made.read))
        checkpoints.write(self.objects, self.mine, committed, state, trained, self.cache, saved)
        self._checkpointed = committed.step
        log.info("checkpoint", run=self.run, step=committed.step, incarnation=self.mine.incarnation)
