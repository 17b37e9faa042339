"""The whole recipe, from a pack to a checkpoint that can be shipped; and more SFT from any checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from services.trainer.base import leak, streams
from services.trainer.base.card import write_card
from services.trainer.base.launch import Job, Stage, run
from services.trainer.base.plot import plot_losses
from services.trainer.base.probe import probe
from services.trainer.base.samples import Samples
from services.trainer.base.settings import MTP, PRETRAIN, SFT
from shared.problems.signatures import write_signatures
from shared.renderers.formats.compact_1 import Compact

RESTART = 0.2  # of the full learning rate, when SFT goes on from a finished checkpoint
# Functions with tests are few (a twentieth of all that is read): SFT on their traces alone learns them by heart. So many
# denoising samples a trace keep what was learned from the others.
DENOISING_IN_SFT = 0.5


def make(pack: Path, work: Path, out: Path, minutes: float, seed: int, processes: int, sandbox: str) -> None:
    """Pretraining -> SFT -> MTP in `minutes` of training; goes on where it was interrupted."""
    data = work / "streams"
    streams.make(pack, data, seed, processes, sandbox, streams.Draws())
    mixtures(data, seed)
    tokenizer = data / "tokenizer.json"
    stages = tuple(
        Stage(phase, minutes * phase.share, data / f"{phase.name}.npz", data / "validation.npz", work / phase.name)
        for phase in (PRETRAIN, SFT, MTP)
    )
    run(Job(stages, work, tokenizer, seed, processes=processes))
    ship(pack, work, out, seed, minutes, processes, sandbox)


def mixtures(data: Path, seed: int) -> None:
    """What each phase sees, drawn from the streams."""
    code, denoise, traces = (Samples.load(data / f"{name}.npz") for name in ("code", "denoise", "traces"))
    Samples.joined([code, denoise]).save(data / "pretrain.npz")
    sft = Samples.joined([traces, denoise.take(int(len(traces) * DENOISING_IN_SFT), seed)])
    sft.save(data / "sft.npz")
    sft.save(data / "mtp.npz")


def ship(pack: Path, work: Path, out: Path, seed: int, minutes: float, processes: int, sandbox: str) -> None:
    """The last phase's checkpoint with its card, curves and signatures. What it solves on dev is measured for the card."""
    data = work / "streams"
    out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "etude.json"):
        shutil.copyfile(work / MTP.name / name, out / name)
    plot_losses(work / "losses.jsonl", out / "losses.png")
    count = write_signatures(json.loads((data / "sources.json").read_text()), out / "signatures.npz")
    report = leak.of_streams(pack, data)
    figures = probe(out, pack, sandbox=sandbox)
    write_card(out, work, figures, report, count, seed=seed, minutes=minutes, processes=processes)


def more_sft(
    start: Path, pack: Path, out: Path, work: Path, minutes: float, seed: int, processes: int, sandbox: str
) -> None:
    """SFT that continues from a checkpoint for `minutes`: new draws of the traces, the checkpoint's own tokenizer. The
    learning rate begins where a restart from a finished checkpoint learns most, and falls to 0."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out: found something in {out}; allowed: a new or an empty directory")
    tokenizer = start / "tokenizer.json"
    Compact.load(start)  # a foreign format is refused before any work is done
    data = work / "streams"
    streams.make(pack, data, seed, processes, sandbox, streams.Draws(code=0, denoise=1, traces=2), tokenizer)
    mixtures(data, seed)
    phase = replace(SFT, start=RESTART)
    stage = Stage(phase, minutes, data / "sft.npz", data / "validation.npz", out)
    run(Job((stage,), work, tokenizer, seed, start=start, processes=processes))
