"""Greatest memory of a training step by the length of its one sequence, beside what `etude plan train` reckons.

Each length runs in a process of its own, on one thread; what Python, torch and DeepSpeed take by themselves is left out. SmolLM2
keeps a layer's inputs alone (activation checkpointing); the model of 30M parameters also keeps everything, for comparison.

python -m benchmarks.train_memory [--quick] [--json FILE] [--only smollm2|30m|long]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.policies import ROOT, SMOLLM, THIRTY_MILLION, is_here, random_policy
from benchmarks.records import Bench, record
from etude.plan_train import Plan, Ranks, Work, plan
from shared.model import ModelConfig, save_checkpoint

MIB = 1 << 20
LONG = 32_768
SMALL = THIRTY_MILLION | {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_hidden_layers": 6,
                          "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": LONG}  # fmt: skip


def measured(checkpoint: Path, tokens: int, recompute: bool) -> tuple[float, float]:
    """Return (MiB, seconds) of a step. Raises RuntimeError with the end of what the process said."""
    command = [sys.executable, "-m", "benchmarks.trainers.memory", str(checkpoint), str(tokens)]
    # What is freed goes back to the system at once: else the greatest memory counts what malloc keeps for later, too.
    malloc = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
    environment = {**os.environ, **malloc, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command += ["--recompute"] if recompute else []
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"benchmarks.trainers.memory: {done.stderr.strip()[-800:]}")
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found["peak"] - found["process"], found["seconds"]


def planned(checkpoint: Path, tokens: int, recompute: bool) -> float:
    """MiB, without what a version's encoding takes: nothing is published here."""
    found: Plan = plan(ModelConfig.load(checkpoint), Ranks(), Work(tokens=tokens, recompute=recompute, fused=False))
    versions = next(size for what, size in found.host.items() if what.startswith("versions"))
    return (found.peak + versions) / MIB


def case(bench: Bench, name: str, checkpoint: Path, tokens: int, recompute: bool) -> float:
    """Add one length. Return by how much the plan is off, as a share."""
    found, seconds = measured(checkpoint, tokens, recompute)
    wanted = planned(checkpoint, tokens, recompute)
    off = wanted / found - 1
    how = "inputs of layers kept" if recompute else "everything kept"
    bench.add(
        record(
            f"train.memory.{name}.{tokens}{'' if recompute else '.kept'}",
            f"{name}, one sequence of {tokens:,} tokens, {how}, {seconds:,.0f} s",
            [found],
            "MiB",
            f"plan {wanted:,.0f} MiB ({off:+.1%})",
        )
    )
    return abs(off)


def main() -> None:
    bench = Bench.start(__doc__, parts=("smollm2", "30m", "long"))
    off: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        thirty, small = Path(folder) / "30m", Path(folder) / "small"
        save_checkpoint(random_policy(THIRTY_MILLION), thirty)
        save_checkpoint(random_policy(SMALL), small)
        if bench.wants("30m"):
            for tokens in bench.pick((2048, 4096, 8192), (1024,)):
                off += [case(bench, "30m", thirty, tokens, recompute) for recompute in (True, False)]
        if bench.wants("smollm2") and is_here(SMOLLM) and not bench.quick:
            off += [case(bench, "smollm2", SMOLLM, tokens, True) for tokens in (2048, 4096, 8192, LONG)]
        if bench.wants("long"):
            off.append(case(bench, "small", small, bench.pick(LONG, 4096), True))
    bench.add(record("train.memory_plan_error", "greatest difference from the plan", [100 * max(off)], "%"))
    bench.end()


if __name__ == "__main__":
    main()
