"""One phase from its configuration to its checkpoint. Every rank runs the same loop; rank 0 alone writes.

The order, and why a kill at any place loses no result: everything is read and checked; the state is written every
`checkpoint_every` steps, and replaces the one before as a whole; the checkpoint appears in OUT as a whole, then OUT.work goes.
A restart reads the newest state, cuts losses.jsonl to the lines that belong to it, and makes the same steps again.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from services.trainer import schedule
from services.trainer.config import arithmetic_of
from services.trainer.engine import Engine
from services.trainer.packing import TrainSequence, whole
from services.trainer.phases import heldout, report, sources, start, state
from services.trainer.phases.config import BadPhase, Phase, PhaseConfig
from services.trainer.phases.data import Feed
from services.trainer.phases.heldout import Loss
from services.trainer.phases.sources import Sources
from services.trainer.phases.state import Progress
from services.trainer.step import Trained, Trainer
from shared.model import Transformer
from shared.output import require_folder
from shared.scratch import scratch

MOST_SKIPPED = 3  # steps in a row whose gradient is not finite; then the phase ends, as a run pauses


class Screen(Protocol):
    """Where a person sees how far the phase is."""

    def begins(self, phase: Phase, config: PhaseConfig, found: Sources, progress: Progress, budget: int) -> None: ...
    def step(self, progress: Progress, loss: float, tokens_per_s: float) -> None: ...
    def measures(self, name: str, windows: int) -> Callable[[int], None]: ...
    def measured(self, name: str, loss: Loss) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """`finished` False: it was asked to stop, and goes on with the same command. `held_out`: (before, after) by name."""

    finished: bool
    progress: Progress
    held_out: dict[str, tuple[float, float]]


def run(config: PhaseConfig, phase: Phase, screen: Screen, stop: Callable[[], bool] = lambda: False) -> Outcome:
    """Train one phase. `stop` is asked after every step. Raises BadPhase, before anything is written."""
    out = Path(config.out)
    require_folder(out, "out")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadPhase(f"out: found something in {out}; allowed: a new or an empty folder")
    shape = start.shape_of(config, phase)
    start.require_mesh(config, shape, int(os.environ.get("WORLD_SIZE", "1")))
    found = sources.open_all(config, phase, shape)
    work = out.with_name(f"{out.name}.work")
    progress = state.find(work, phase, config, found.checksums)
    torch.set_num_threads(config.machine.threads)
    return _Life(config, phase, start.load(config, shape, _device(config)), found, work, screen, stop).run(progress)


def _device(config: PhaseConfig) -> str:
    wanted = config.machine.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise BadPhase("machine.device: found 'cuda', and torch sees no such device; allowed: 'auto', 'cpu'")
    if wanted == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


class _Life:
    """A phase, as one rank lives it."""

    def __init__(
        self,
        config: PhaseConfig,
        phase: Phase,
        model: Transformer,
        found: Sources,
        work: Path,
        screen: Screen,
        stop: Callable[[], bool],
    ) -> None:
        self.config, self.phase, self.model, self.found = config, phase, model, found
        self.work, self.screen, self.stop = work, screen, stop
        own = config.train
        train = config.train_config(phase, start.learns_mtp(config, self.model.config, phase))
        share = functools.partial(schedule.share, own.schedule, floor=own.floor, decay=own.decay)
        self.arithmetic: torch.dtype = getattr(torch, arithmetic_of(config.machine.arithmetic, _device(config)))
        self.engine = Engine(
            self.model,
            train,
            zero_stage=config.machine.zero_stage,
            context_ranks=config.machine.context_ranks,
            expert_ranks=config.machine.expert_ranks,
            schedule=share,
            trains_trunk=phase != "mtp",
            arithmetic=self.arithmetic,
        )
        self.trainer = Trainer(self.engine, train, supervised=True, balance=own.balance)
        self.budget = own.tokens or max(1, int(own.epochs * found.train.targets))
        self.leads = self.engine.mesh.rank == 0

    def run(self, before: Progress | None) -> Outcome:
        self._agree(before)
        progress = before or Progress(phase=self.phase)
        if before is not None:
            self.engine.load(state.tensors(self.work))
        self.screen.begins(self.phase, self.config, self.found, progress, self.budget)
        self._open_losses(progress)
        if progress.measured < 0:
            progress = self._measure(progress)
        feed = Feed(self.found.train, self.config.seed, self.config.train.step_tokens, progress.place)
        while progress.targets < self.budget:
            progress = self._step(progress, feed)
            every = self.config.measure.every
            if every and progress.step % every == 0 and progress.targets < self.budget:
                progress = self._measure(progress)
            stopping = any(self.engine.from_all(self.stop()))
            if stopping or progress.step % self.config.train.checkpoint_every == 0:
                self._save(progress)
            if stopping:
                return Outcome(False, progress, {})
        if progress.measured != progress.step:
            progress = self._measure(progress)
        return Outcome(True, progress, self._finish(progress))

    def _agree(self, before: Progress | None) -> None:
        """Raise BadPhase on every rank unless all were told the same and found the same. Ranks on machines that do not share the
        folders would otherwise train on different data, or wait for each other."""
        own = {
            "the configuration": msgspec.json.encode(self.config),
            "the state in OUT.work": msgspec.json.encode(before),
            "the data": msgspec.json.encode(sorted(self.found.checksums.items())),
        }
        first, *others = self.engine.from_all(own)
        for rank, other in enumerate(others, start=1):
            if wrong := [name for name, found in other.items() if found != first[name]]:
                raise BadPhase(
                    f"rank {rank}: {' and '.join(wrong)}: found something else than rank 0; allowed: the same on all ranks. "
                    "Put the checkpoint, the data and OUT.work where every rank reads the same files"
                )

    def _step(self, progress: Progress, feed: Feed) -> Progress:
        began = time.perf_counter()
        batch = feed.batch()
        weights = sum(float(s.advantages_T[s.sampled_T].sum()) for s in batch)
        targets = sum(int(s.sampled_T.sum()) for s in batch)
        done = progress.targets / self.budget
        trained = self.trainer.train(batch, weights, progress.step + 1, progress=done)
        skipped = progress.skipped + 1 if self._is_skipped(trained) else 0
        progress = msgspec.structs.replace(
            progress,
            step=progress.step + 1,
            targets=progress.targets + targets,
            flops=progress.flops + self._flops(batch),
            place=feed.place,
            skipped=skipped,
        )
        seconds = time.perf_counter() - began
        figures = {
            name: trained.metrics[name]
            for name in ("loss", "grad_norm", "mtp_loss", "mtp_grad_norm")
            if name in trained.metrics
        }
        fed = int(trained.metrics["tokens_fed"])
        rate = self.config.train.learning_rate * schedule.share(
            self.config.train.schedule, done, floor=self.config.train.floor, decay=self.config.train.decay
        )
        progress = self._note(progress, rate=rate, tokens_fed=fed, skipped=bool(skipped), seconds=seconds, **figures)
        self.screen.step(progress, trained.metrics["loss"], fed / seconds)
        if skipped >= MOST_SKIPPED:
            raise BadPhase(
                f"step {progress.step}: {skipped} steps in a row had a gradient that is not finite; the phase ends. "
                f"{self.work} holds the state before; use a smaller train.learning_rate, or look at the data"
            )
        return progress

    def _is_skipped(self, trained: Trained) -> bool:
        return not (trained.applied if self.engine.trains_trunk else trained.mtp_applied) or bool(trained.bad_groups)

    def _flops(self, batch: list[TrainSequence]) -> float:
        """Forward, and twice as much backward; what the MTP layers compute counts as a part of the weights."""
        return 3.0 * sum(map(self.trainer.cost, whole(batch)))

    def _measure(self, progress: Progress) -> Progress:
        losses: dict[str, Loss] = {}
        own, most = self.config.measure, self.config.train.micro_batch_tokens
        for name, shards in self.found.held_out.items():
            windows = heldout.count(heldout.measured(shards, own.tokens), own.window, own.stride)
            losses[name] = heldout.codebase(
                self.model,
                shards,
                window=own.window,
                stride=own.stride,
                most=own.tokens,
                micro_batch_tokens=most,
                tell=self.screen.measures(name, windows),
                arithmetic=self.arithmetic,
            )
        for name, chats in self.found.held_out_chats.items():
            tell = self.screen.measures(name, len(chats))
            losses[name] = Loss(*heldout.measure(self.model, chats, most, tell, self.arithmetic))
        progress = msgspec.structs.replace(progress, measured=progress.step)
        if losses:
            for name, loss in losses.items():
                self.screen.measured(name, loss)
            progress = self._note(progress, held_out={name: loss.figures for name, loss in losses.items()})
        return progress

    # What is written

    def _open_losses(self, progress: Progress) -> None:
        if not self.leads:
            return
        self.work.mkdir(parents=True, exist_ok=True)
        path = self.work / report.LOSSES
        path.touch()
        kept = path.read_bytes().splitlines(keepends=True)[: progress.lines]
        os.truncate(path, sum(map(len, kept)))  # in place: a kill loses no line that belongs to the state

    def _note(self, progress: Progress, **facts: Any) -> Progress:
        line = report.entry(
            phase=self.phase, step=progress.step, tokens=progress.targets, flops=progress.flops, **facts
        )
        if self.leads:
            with (self.work / report.LOSSES).open("a") as file:
                file.write(line)
        return msgspec.structs.replace(progress, lines=progress.lines + 1)

    def _save(self, progress: Progress) -> None:
        tensors = self.engine.state()  # a collective under ZeRO
        if self.leads:
            with (self.work / report.LOSSES).open("rb") as file:
                os.fsync(file.fileno())
            state.write(self.work, progress, self.config, self.found.checksums, tensors)

    def _finish(self, progress: Progress) -> dict[str, tuple[float, float]]:
        """Write the checkpoint and its report; return the held-out losses before and after."""
        tensors = self.engine.published()  # a collective where experts are divided
        if not self.leads:
            return {}
        out = Path(self.config.out)
        points = report.points(self.work)
        change = {name: (found[0].nats, found[-1].nats) for name, found in points.items()}
        with scratch(out.parent, f".{out.name}.") as folder:
            facts = {"steps": progress.step, "tokens": progress.targets, "flops": progress.flops, "held_out": change}
            start.write(self.model, tensors, self.config, self.phase, folder, **facts)
            shutil.copyfile(self.work / report.LOSSES, folder / report.LOSSES)
            (folder / "report.md").write_text(report.markdown(points))
            folder.chmod(0o755)
            if out.is_dir():
                out.rmdir()
            folder.rename(out)
        shutil.rmtree(self.work, ignore_errors=True)
        return change
