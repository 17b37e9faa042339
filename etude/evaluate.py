"""`etude eval`: a checkpoint on problems, by the services, agent and graders of a run, without scheduler or trainer.

A platform of its own starts in a temporary state directory and ends with the measurement. Where that fails, the services'
logs stay, and the error names them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard
from rich.console import Console

from etude import compare, exchange, recognise
from etude.demo.background import ended_by_signals
from etude.demo.conduct import Conductor, Patience, Stalled, explained
from etude.demo.prepare import (
    DemoError,
    chat_format,
    configure,
    fitting_split,
    own_problems,
    speaks_chat,
    store_config,
    tell,
    upload_pack,
    write_split,
)
from etude.demo.report import figures_of
from etude.demo.watch import Evaluation, evaluation_end, say, say_error, watching
from etude.supervisor import ServiceSpec, Supervisor
from shared import bus as buses
from shared import objects as stores
from shared.contracts.ids import new_run_id
from shared.contracts.life import RunState
from shared.contracts.messages import RunStatus
from shared.contracts.run import Ref, Retry
from shared.contracts.topics import RUNS_STATE
from shared.output import require_writable, with_rows, write_whole
from shared.problems.importing import STORE
from shared.problems.pack import file_name
from shared.renderers.fitting import Fitting
from shared.renderers.registry import UnknownFormat, known, load_renderer
from shared.settings import Told, embedded
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
    return {f"ETUDE_{name.upper()}": url for name, url in embedded(state).items() if name != "ledger"}


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


def no_checkpoint(folder: Path) -> str:
    """Return why a folder is no checkpoint; empty: it may be one."""
    if (folder / "config.json").exists():
        return ""
    unknown = f"{folder}: no config.json there; expected a Hugging Face checkpoint directory with etude.json"
    return recognise.objection(folder) or unknown


def require_servable(checkpoint: Path) -> None:
    """An engine can serve it and the agent knows its chat format: by config.json, the tensors and the tokenizer, before
    anything starts. Raises DemoError, NotExchanged."""
    checked = exchange.check(checkpoint)
    try:
        chat = load_renderer(checkpoint)
    except UnknownFormat as error:
        raise DemoError(
            f"--checkpoint {checkpoint}: its chat format cannot be read: {error}; allowed: {', '.join(known())}. "
            f"One that speaks it: `etude import {checkpoint} --name NAME --format FORMAT`, then `etude export checkpoints/NAME "
            "--out DIR`, and measure DIR"
        ) from None
    except ValueError as error:
        raise DemoError(f"--checkpoint {checkpoint}: its chat format cannot be read: {error}") from None
    if chat.vocab_size > checked.vocabulary:
        raise DemoError(
            f"--checkpoint {checkpoint}: tokenizer.json has {chat.vocab_size} tokens; config.json has room for "
            f"{checked.vocabulary} (vocab_size): they are not of one model"
        )


@contextlib.contextmanager
def temporary_state() -> Iterator[Path]:
    """A state directory that is gone afterwards. Where something failed, what the services said stays, and the error names
    it; who presses Ctrl-C has seen enough."""
    state, kept = Path(tempfile.mkdtemp(prefix="etude-eval-")), False
    try:
        yield state
    except Exception as error:
        kept = (state / "logs").is_dir()
        if kept:
            error.add_note(f"The logs are kept: `etude logs --state {state}`, or one service's: `etude logs NAME …`")
        raise
    finally:
        gone = [path for path in state.iterdir() if path.name != "logs"] if kept else [state]
        for path in gone:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


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
    patience: Patience = Patience(),
    greedy: bool = True,
) -> dict[str, Any]:
    """The evaluator's report of `checkpoint`, one that is servable, on one split of a pack directory. `greedy`: with one more
    attempt per problem, at temperature 0. Raises DemoError and NotACheckpoint before a service starts, Stalled after."""
    ended_by_signals()
    checkpoint = checkpoint.resolve()
    with temporary_state() as state, Supervisor(state) as supervisor:
        own = stores_of(supervisor.state)
        objects = stores.connect(own["ETUDE_OBJECTS"])
        run = new_run_id()
        from etude.demo.options import DemoOptions

        refs = upload_pack(objects, pack, split)
        base = upload_directory(objects, f"runs/{run}/base", checkpoint, weights=False)  # the engines read the folder
        options = DemoOptions(retry=retry, chat=speaks_chat(chat_format(checkpoint)))
        config = configure(run, options, base, refs, refs)
        bus = buses.connect(own["ETUDE_BUS"], client="etude-eval")
        try:
            supervisor.start(services(checkpoint, own))
            say(console, title, f"services start; `etude status --state {state}` says what they wait on")
            async with explained(state), Conductor(bus, objects, run, patience, supervisor.refused) as conductor:
                await bus.publish(RUNS_STATE, run, _running(run, store_config(objects, config)))
                await conductor.served(0)
                there = count_problems(pack, split)
                total = (samples + greedy) * min(limit or there, there)
                started = time.monotonic()
                async with watching(console, title, total, Evaluation(conductor.progress, 0, total)):
                    report = await conductor.evaluate("eval", 0, config, problems=limit, samples=samples, greedy=greedy)
                say(console, title, evaluation_end(report, time.monotonic() - started))
                return report
        finally:
            await bus.close()


def _running(run: str, config: Ref) -> RunStatus:
    """Return what a scheduler would announce of the run: none runs here."""
    now = time.time()
    return RunStatus(
        run=run,
        state=RunState.running,
        number=int(1000 * now),
        configs=[config],
        started=now,
        since=now,
        by="etude eval",
    )


def count_problems(pack: Path, split: str) -> int:
    return _count_lines((pack / file_name(split, "public")).read_bytes())


def count_objects(objects: stores.Objects, pack: Ref) -> int:
    """Problems in a pack that lies in the object store."""
    return _count_lines(objects.get(pack))


def _count_lines(compressed: bytes) -> int:
    with zstandard.ZstdDecompressor().stream_reader(compressed) as lines:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: lines.read(1 << 20), b""))


def chosen(problems: Path | Split, checkpoint: Path, leave_out: bool) -> tuple[Path, Fitting]:
    """Where they are from, and those that can be measured on. Raises DemoError where some are left out that must not be."""
    if isinstance(problems, Path):
        return problems, own_problems(problems, checkpoint, leave_out=leave_out)
    return problems.pack, fitting_split(problems.pack, problems.name, checkpoint, leave_out=leave_out)


def run(
    checkpoint: Path,
    problems: Path | Split,
    samples: int,
    out: Path | None,
    limit: int,
    retry: Retry = "fresh",
    leave_out: bool = False,
) -> int:
    """`problems`: a user's JSONL file, or a split of a pack. `leave_out`: problems that the checkpoint's chat format cannot take,
    and those of the file that do not pass the check, are named and counted. Returns the exit code."""
    console = Console(stderr=True)
    if why := no_checkpoint(checkpoint):
        tell(f"--checkpoint {why}")
        return 2
    try:
        if out:
            require_writable(out, "--json")
        require_servable(checkpoint)
        with tempfile.TemporaryDirectory(prefix="etude-pack-") as folder:
            source, own = chosen(problems, checkpoint, leave_out)
            for said in filter(None, (own.left_out(), own.unproven())):
                tell(f"{source}: {said}")
            if isinstance(problems, Path) or own.without:
                name, trees = ("all", STORE) if isinstance(problems, Path) else (problems.name, problems.pack)
                problems = Split(write_split(Path(folder), name, own.pairs, trees), name)
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
    except (DemoError, Stalled, NotACheckpoint, Told) as error:
        say_error(console, error)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    figures = {**figures_of(report), "left_out": own.without}
    print(json.dumps(figures, indent=2), flush=True)
    if out:
        try:
            write_whole(out, with_rows(figures, compare.PER_PROBLEM, compare.rows(report, own.pairs)))
        except Told as error:  # the disk filled meanwhile; the figures are above
            say_error(console, error)
            return 1
    return 0
