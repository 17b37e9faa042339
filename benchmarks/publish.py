"""How long a trainer computes nothing between two steps: from the end of the optimiser to the next forward, as a share of a step.

The run trains SmolLM2 (the demo's base policy where that is absent) on one group of 8, one thread, a version and a checkpoint after
every step, into a directory. Every other step is published as it was before: the trainer waits until version and checkpoint are
durable. The others are published by a second thread while the next step computes, as the service does.

python -m benchmarks.publish [--quick] [--json FILE]
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.policies import BASE, SMOLLM, is_here, start
from benchmarks.records import Bench, record
from benchmarks.trainers.comparison import DEMO, draw
from benchmarks.trainers.ours import read
from services.trainer.groups import LoadedGroup
from services.trainer.training import TrainingRun
from shared.contracts.messages import GroupMember, GroupReady
from shared.contracts.run import Ref, RunConfig, ScheduleConfig, TrainConfig
from shared.model import save_checkpoint
from shared.objects import connect
from shared.weights.checkpoint_objects import upload_directory

NOTHING = Ref(key="nothing", size=0, checksum="")


class Watched:
    """When the engine's optimiser ended and its forwards began, in seconds."""

    def __init__(self, training: TrainingRun) -> None:
        self.began: list[float] = []
        self.ended: list[float] = []
        engine = training.engine
        step, forward = engine.step, engine.forward_weights

        def watched_step(*arguments: Any) -> Any:
            found = step(*arguments)
            self.ended.append(time.perf_counter())
            return found

        @contextlib.contextmanager
        def watched_forward() -> Iterator[None]:
            self.began.append(time.perf_counter())
            with forward():
                yield

        engine.step, engine.forward_weights = watched_step, watched_forward  # type: ignore[method-assign]


def begun(folder: Path, quick: bool) -> tuple[TrainingRun, str, Path]:
    """Return a run that has begun, the name of its policy, and its batch."""
    objects = connect(f"file:{folder / 'objects'}")
    checkpoint, name = (SMOLLM, "SmolLM2-135M") if is_here(SMOLLM) and not quick else (BASE, "demo")
    if not is_here(checkpoint):
        checkpoint = folder / "base"
        save_checkpoint(start(), checkpoint)
    schedule = ScheduleConfig(max_staleness=100)  # the batch is always the same one, sampled by version 0
    train = TrainConfig(mtp=False, router_replay=False, norm_tokens=100.0, learning_rate=1e-6, micro_batch_tokens=1024)
    base = upload_directory(objects, "runs/bench/base", checkpoint)
    config = RunConfig(run="bench", base=base, pack=NOTHING, pack_hidden=NOTHING, schedule=schedule, train=train)
    training = TrainingRun(objects, config, trainer="bench", cache=folder / "cache")
    draw(folder / "batch.npz", DEMO, 1, training.engine.model.config.vocab_size)
    return training, name, folder / "batch.npz"


def groups(path: Path, number: int) -> list[LoadedGroup]:
    """Return the batch as a group of its own: a run trains each once."""
    sequences = tuple(read(path))
    members = [
        GroupMember(attempt=f"a-{number}-{i}", epoch=0, trajectory=NOTHING, reward=float(i == 0), oldest_version=0)
        for i in range(len(sequences))
    ]
    ready = GroupReady(run="bench", group=f"g-{number}", problem=f"p-{number}", sequence=number, members=members)
    return [LoadedGroup(ready, sequences, frozenset({0}))]


def main() -> None:
    bench = Bench.start(__doc__)
    torch.set_num_threads(1)
    pairs = bench.pick(3, 2)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as publisher:
        training, name, path = begun(Path(folder), bench.quick)
        watched = Watched(training)
        waits: list[bool] = []
        job: Future[Any] | None = None
        for number in range(2 * pairs + 2):  # the first warms up, the last only ends the stall of the one before it
            made = training.train(groups(path, number)).made
            assert made is not None
            if number:
                spent = watched.began[-1] - watched.ended[-2]
                print(f"step {number}: {spent:.2f} s since the optimiser before it, {made.metrics}", file=sys.stderr)
            job = publisher.submit(training.publish, made)
            waits.append(number % 2 == 0)
            if waits[-1]:
                job.result()
                training.shares.lap("publishing")
        assert job is not None
        job.result()
    stall = np.array(watched.began[1:]) - np.array(watched.ended[:-1])
    step = np.diff(watched.began)
    waited = np.array(waits[:-1])
    measured = np.arange(len(step)) > 0
    percent = 100 * stall / step
    before, now = (percent[measured & which] for which in (waited, ~waited))
    seconds = f"{np.median(stall[~waited]):.3f} s of {np.median(step[~waited]):.1f} s"
    against = f"waiting for the publication {np.median(before):.3g} %"
    bench.add(
        record("train.publish_stall", f"{name}, {seconds} between two steps", map(float, now), "% of a step", against)
    )
    bench.add(record("train.publish_stall.waiting", f"{name}, as it was before", map(float, before), "% of a step"))
    overlap = step[measured & ~waited] - stall[measured & ~waited]
    bench.add(
        record(
            "train.publish_computing", f"{name}, a step's seconds up to its optimiser's end", map(float, overlap), "s"
        )
    )
    bench.end()


if __name__ == "__main__":
    main()
