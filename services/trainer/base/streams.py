"""From a pack to the training streams, cached: nothing here trains.

    tokenizer.json   BPE of the train split's functions
    code.npz         functions as they are
    denoise.npz      functions with bugs, several draws of each, most of them renamed
    traces.npz       SFT traces on the train split's problems
    validation.npz   perfect traces on dev problems: for figures, never trained on
    sources.json     every function used, for the signatures and the leak report

Deterministic for the same pack and seed: every draw has a seed of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import xxhash
from rich.progress import Progress

from services.trainer.base import pack as packs
from services.trainer.base import traces
from services.trainer.base.corrupt import code_sample, denoising_sample, renamed
from services.trainer.base.samples import Sample, Samples
from services.trainer.base.tokenizer import train
from shared.problems import FunctionHidden, FunctionProblem
from shared.problems.pack import PARTS, PRETRAIN, file_name
from shared.renderers.formats.compact_1 import Compact
from shared.sandbox import Limits, connect
from shared.sandbox.pool import FunctionPool

MAX_SAMPLE = 360  # tokens: a longer function costs more than it teaches
VALIDATION = 400  # dev problems
VERSION = "3"  # of how streams are made: part of the cache's key
CALLS = Limits(time_s=1.0, call_s=0.1, memory_mb=512)

T = TypeVar("T")
R = TypeVar("R")
Pair = tuple[FunctionProblem, FunctionHidden]


@dataclass(frozen=True, slots=True)
class Draws:
    """How many samples are drawn of each function (code as it is, with bugs) and of each problem."""

    code: int = 1
    denoise: int = 2
    traces: int = 1


def make(
    pack: Path, directory: Path, seed: int, processes: int, sandbox: str, draws: Draws, tokenizer: Path | None = None
) -> None:
    """Fills `directory` unless it is up to date already. `tokenizer`: an existing one; else one is trained."""
    names = (PRETRAIN, *(file_name(split, part) for split in ("train", "dev") for part in PARTS))
    given = xxhash.xxh3_64_hexdigest(tokenizer.read_bytes()) if tokenizer else ""
    key = f"{VERSION}-{seed}-{draws}-{given}-{packs.digest(pack, names)}"
    done = directory / "complete.json"
    if done.is_file() and json.loads(done.read_text()).get("key") == key:
        return
    directory.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    train_problems, dev = packs.problems(pack, "train"), packs.problems(pack, "dev")
    functions = sorted(
        {f.source.rstrip("\n") for f in packs.functions(pack)}
        | {packs.solution(hidden).rstrip("\n") for _, hidden in train_problems}
    )
    (directory / "sources.json").write_text(json.dumps(functions))
    if tokenizer:
        shutil.copyfile(tokenizer, directory / "tokenizer.json")
    else:
        train(_lines(functions), directory / "tokenizer.json")
    tokenizer = directory / "tokenizer.json"
    random.Random(seed).shuffle(dev)
    with Progress() as progress, multiprocessing.get_context("spawn").Pool(processes, _begin, (tokenizer,)) as pool:

        def over(what: str, work: Callable[[T], list[R]], items: Sequence[T]) -> list[R]:
            task = progress.add_task(what, total=len(items))
            found: list[R] = []
            for part in pool.imap(work, items, chunksize=32):
                found += part
                progress.advance(task)
            return found

        Samples.of(over("code", _code, functions * draws.code)).save(directory / "code.npz")
        items = [(source, f"{seed}-{i}", draws.denoise) for i, source in enumerate(functions)]
        Samples.of(over("bugs", _denoise, items)).save(directory / "denoise.npz")
        plans = over("plans", _plan, [(pair, f"{seed}-{i}", draws.traces) for i, pair in enumerate(train_problems)])
        Samples.of(over("validation", _perfect, dev[:VALIDATION])).save(directory / "validation.npz")
        task = progress.add_task("tests", total=len(plans))
        pool_of_sandboxes = connect(sandbox, processes)
        try:
            written = _executed(plans, pool_of_sandboxes, Compact(tokenizer), partial(progress.advance, task))
            Samples.of(s for s in written if len(s.ids) <= MAX_SAMPLE).save(directory / "traces.npz")
        finally:
            pool_of_sandboxes.close_sync()
    done.write_text(json.dumps({"key": key, "functions": len(functions), "problems": len(train_problems)}))


def _lines(sources: list[str]) -> Iterator[str]:
    """What the BPE learns from: lines of code without indentation."""
    for source in sources:
        yield from (line.strip() for line in source.split("\n"))


# Work of the pool's processes. A sample that cannot be made is left out: mined code holds every oddity of the language.

_format: Compact


def _begin(tokenizer: Path) -> None:
    global _format
    _format = Compact(tokenizer)


def _fitting(sample: Sample | None) -> list[Sample]:
    return [sample] if sample is not None and len(sample.ids) <= MAX_SAMPLE else []


def _code(source: str) -> list[Sample]:
    return _fitting(code_sample(source, _format))


def _denoise(item: tuple[str, str, int]) -> list[Sample]:
    source, seed, draws = item
    rng = random.Random(seed)
    samples = []
    for draw in range(draws):
        try:
            text = renamed(source, rng) if draw else source
            samples += _fitting(denoising_sample(text, _format, rng))
        except (SyntaxError, ValueError, RecursionError):
            continue
    return samples


def _plan(item: tuple[Pair, str, int]) -> list[traces.Plan]:
    (problem, hidden), seed, draws = item
    rng = random.Random(f"trace-{seed}")
    plans = (traces.plan(problem, hidden, _format, rng) for _ in range(draws))
    return [plan for plan in plans if plan is not None]


def _perfect(pair: Pair) -> list[Sample]:
    return traces.perfect(*pair, _format)


def _executed(
    plans: Sequence[traces.Plan], functions: FunctionPool, format: Compact, advance: Callable[[float], None]
) -> Iterator[Sample]:
    """Runs the wrong candidates of the plans, many at a time, and writes the traces."""
    for start in range(0, len(plans), 64):
        part = plans[start : start + 64]
        runs = [run for plan in part for run in traces.runs(plan, CALLS)]
        results = iter(functions.run_sync(runs))
        for plan in part:
            observations = [traces.verdict(plan.problem, next(results)) for _ in plan.tries]
            yield from traces.write(plan, observations, format)
        advance(len(part))
