"""`etude eval`: a checkpoint on problems, by the services, agent and graders of a run, without scheduler or trainer.

A platform of its own starts in a temporary state directory and ends with the measurement.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard
from rich.console import Console

from etude.demo.conduct import Conductor, Stalled
from etude.demo.prepare import DemoError, configure, own_problems, store_config, upload_pack, write_split
from etude.demo.report import figures_of
from etude.demo.watch import Evaluation, evaluation_end, say, watching
from etude.supervisor import ServiceSpec, Supervisor
from shared import bus as buses
from shared import objects as stores
from shared.contracts.ids import new_run_id
from shared.contracts.run import Ref, Retry
from shared.problems.pack import file_name
from shared.weights.checkpoint_objects import NotACheckpoint, upload_directory


@dataclass(frozen=True, slots=True)
class Split:
    """One part of a pack."""

    pack: Path
    name: str


def replicas() -> int:
    """Engines that sample beside each other: one per core, one thread each."""
    return max(1, min(4, len(os.sched_getaffinity(0))))


def stores_of(state: Path) -> dict[str, str]:
    """Embedded adapters below `state`, whatever servers this machine's platform is configured to use."""
    return {
        "ETUDE_BUS": f"sqlite:{state / 'bus.db'}",
        "ETUDE_OBJECTS": f"file:{state / 'objects'}",
        "ETUDE_JOBS": f"sqla+sqlite:///{state / 'jobs.db'}",
    }


def services(checkpoint: Path, own: dict[str, str]) -> list[ServiceSpec]:
    engines = [
        ServiceSpec(
            f"inference-{i}",
            "services.inference",
            {"ETUDE_CHECKPOINT": str(checkpoint), "ETUDE_POOL": "evaluation", **own},
        )
        for i in range(replicas())
    ]
    others = [
        ServiceSpec(name, module, own)
        for name, module in (
            ("rollout", "services.rollout"),
            ("reward", "services.reward"),
            ("grader", "services.reward.grader"),
            ("evaluator", "services.evaluator"),
        )
    ]
    return engines + others


async def measure(
    checkpoint: Path,
    pack: Path,
    split: str,
    *,
    samples: int,
    limit: int,
    console: Console,
    retry: Retry = "fresh",
    title: str = "evaluation",
) -> dict[str, Any]:
    """The evaluator's report of `checkpoint` on one split of a pack directory."""
    checkpoint = checkpoint.resolve()
    with tempfile.TemporaryDirectory(prefix="etude-eval-") as folder:
        with Supervisor(Path(folder) / "state") as supervisor:
            own = stores_of(supervisor.state)
            objects = stores.connect(own["ETUDE_OBJECTS"])
            bus = buses.connect(own["ETUDE_BUS"], client="etude-eval")
            run = new_run_id()
            from etude.demo.options import DemoOptions

            refs = upload_pack(objects, pack, split)
            config = configure(
                run, DemoOptions(retry=retry), upload_directory(objects, f"runs/{run}/base", checkpoint), refs, refs
            )
            supervisor.start(services(checkpoint, own))
            async with Conductor(bus, objects, run) as conductor:
                await conductor.control("start", config=store_config(objects, config))
                await conductor.served(0)
                there = count_problems(pack, split)
                total = (samples + 1) * min(limit or there, there)
                started = time.monotonic()
                async with watching(console, title, total, Evaluation(conductor.progress, 0, total)):
                    report = await conductor.evaluate("eval", 0, config, problems=limit, samples=samples)
                say(console, title, evaluation_end(report, time.monotonic() - started))
            await bus.close()
            return report


def count_problems(pack: Path, split: str) -> int:
    return _count_lines((pack / file_name(split, "public")).read_bytes())


def count_objects(objects: stores.Objects, pack: Ref) -> int:
    """Problems in a pack that lies in the object store."""
    return _count_lines(objects.get(pack))


def _count_lines(compressed: bytes) -> int:
    with zstandard.ZstdDecompressor().stream_reader(compressed) as lines:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: lines.read(1 << 20), b""))


def run(
    checkpoint: Path,
    problems: Path | Split,
    samples: int,
    out: Path | None,
    limit: int,
    retry: Retry = "fresh",
) -> int:
    """`problems`: a user's JSONL file, or a split of a pack. Returns the exit code."""
    console = Console(stderr=True)
    if not (checkpoint / "config.json").exists():
        console.print(
            f"--checkpoint {checkpoint}: no config.json there; expected a Hugging Face checkpoint directory with etude.json"
        )
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="etude-pack-") as folder:
            if isinstance(problems, Path):
                problems = Split(write_split(Path(folder), "all", own_problems(problems)), "all")
            report = asyncio.run(
                measure(
                    checkpoint,
                    problems.pack,
                    problems.name,
                    samples=samples,
                    limit=limit,
                    console=console,
                    retry=retry,
                )
            )
    except (DemoError, Stalled, NotACheckpoint) as error:
        console.print(str(error), style="red")
        return 1
    except KeyboardInterrupt:
        return 130
    figures = figures_of(report)
    text = json.dumps(figures, indent=2)
    if out:
        out.write_text(text + "\n")
    print(text, file=sys.stdout)
    return 0
