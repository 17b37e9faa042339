"""Starts the training processes, one thread each, and runs phases in them."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from services.trainer.base.checkpoint import write_checkpoint
from services.trainer.base.samples import Samples
from services.trainer.base.settings import MODEL, TOKENS_PER_RANK, Phase
from services.trainer.base.train import Report, Trainer, by_the_clock
from shared.model import ModelConfig, Transformer, load_checkpoint


@dataclass(frozen=True, slots=True)
class Stage:
    """A phase, its minutes and its samples (files of shared arrays). `out`: where its checkpoint goes."""

    phase: Phase
    minutes: float
    samples: Path
    validation: Path
    out: Path


@dataclass(frozen=True, slots=True)
class Job:
    """Stages one after the other, each from the one before. `start`: a checkpoint, or None for random weights.

    A stage whose checkpoint is there already is skipped; one that was interrupted continues from `work`.
    """

    stages: tuple[Stage, ...]
    work: Path
    tokenizer: Path
    seed: int
    start: Path | None = None
    processes: int = 2
    tokens_per_rank: int = TOKENS_PER_RANK


def run(job: Job) -> None:
    """Blocks until all stages are done. An error in one process ends all."""
    job.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{directory}/rendezvous"
        if job.processes == 1:
            _worker(0, job, rendezvous)
            return
        multiprocessing.spawn(_worker, args=(job, rendezvous), nprocs=job.processes, join=True)


def _worker(rank: int, job: Job, rendezvous: str) -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if job.processes > 1:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=job.processes)
    try:
        previous = job.start
        for number, stage in enumerate(job.stages):
            if not (stage.out / "etude.json").is_file():
                _stage(rank, job, stage, previous, job.seed + 101 * number)
            previous = stage.out
    finally:
        if job.processes > 1:
            dist.destroy_process_group()


def _end_with_parent() -> None:
    """A killed parent cannot end its processes; they would train on for nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _stage(rank: int, job: Job, stage: Stage, start: Path | None, seed: int) -> None:
    torch.manual_seed(seed)
    model = load_checkpoint(start) if start else Transformer(ModelConfig.from_dict(MODEL))
    log = job.work / "losses.jsonl"
    began = time.time()

    def report(line: Report) -> None:
        with log.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(line)) + "\n")
        left = max(0.0, stage.minutes - line.minutes)
        print(
            f"{line.phase}: step {line.step}, {line.minutes:.1f} of {stage.minutes:.1f} min ({left:.1f} left), "
            f"{line.tokens / 1e6:.2f}M tokens, {line.tokens_per_s:.0f} tokens/s, train {line.train:.3f}, "
            f"dev: action {line.action:.3f}, context {line.context:.3f}, exact {line.exact:.3f}, "
            f"{(time.time() - began) / 60:.1f} min by the clock",
            flush=True,
        )

    trainer = Trainer(
        model,
        stage.phase,
        by_the_clock(stage.minutes),
        Samples.load(stage.samples),
        Samples.load(stage.validation),
        job.work,
        report,
        seed,
        job.tokens_per_rank,
    )
    trainer.run()
    if rank == 0:
        parent = json.loads((start / "etude.json").read_text()).get("phase") if start else None
        write_checkpoint(
            model, job.tokenizer, stage.out, parent=parent, phase=stage.phase.name, steps=trainer.progress.step
        )
        (job.work / "state.safetensors").unlink(missing_ok=True)
    if job.processes > 1:
        dist.barrier()
