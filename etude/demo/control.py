"""The control: the same minutes spent on more supervised fine-tuning of the base policy, measured the same way."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

from rich.console import Console

from etude.demo import prepare, report
from etude.demo.background import call, ended_by_signals, in_thread
from etude.demo.options import DemoOptions
from etude.demo.prepare import DemoError
from shared.output import write_whole
from shared.problems import FunctionHidden, FunctionProblem
from shared.problems import pack as packs


async def run_control(options: DemoOptions, console: Console) -> int:
    """Writes report.json with the same keys, `"control": "sft"`, and no ledger: nothing was requested. Raises DemoError."""
    from etude.evaluate import measure

    ended_by_signals()
    refuse_what_is_ignored(options)
    report.require_place(options.report)
    pack, taught = await in_thread(packs_of, options)
    out = options.state.resolve() / "control-sft"
    measured = partial(
        measure,
        pack=pack,
        split="held_out",
        samples=options.eval_samples,
        limit=options.eval_problems,
        console=console,
        retry=options.retry,
    )
    before = await measured(prepare.BASE, title="held-out, before")
    shutil.rmtree(out, ignore_errors=True)  # of an earlier control
    code = await in_thread(
        call,
        "services.trainer.base", "sft", "--from", str(prepare.BASE), "--pack", str(taught),
        "--minutes", str(options.minutes), "--seed", str(options.seed), "--out", str(out),
    )  # fmt: skip
    if code:
        raise DemoError(f"fine-tuning ended with exit code {code}; the lines above say why")
    after = await measured(out, title="held-out, after")
    figures = {
        "control": "sft",
        "seed": options.seed,
        "minutes": options.minutes,
        "before": report.figures_of(before),
        "after": report.figures_of(after),
        "gain": {
            key: report.paired(before, after, field)
            for key, field in (("pass_at_1", "solved"), ("first_edit", "first_edit"))
        },
    }
    console.print(report.table(figures))
    write_whole(options.report, json.dumps(figures, indent=2) + "\n")
    return 0


def refuse_what_is_ignored(options: DemoOptions) -> None:
    """Raises DemoError naming the option."""
    if options.config:
        raise DemoError(
            f"--config: found {options.config} beside --control sft, where no run is started that it could change; leave it out"
        )
    if options.resume:
        raise DemoError(
            "--resume: found beside --control sft, which cannot be resumed; leave it out, and the control begins again"
        )


def packs_of(options: DemoOptions) -> tuple[Path, Path]:
    """The pack to measure on, and the one to fine-tune on: the same, but for problems of one's own. Raises DemoError."""
    if not options.problems:
        pack = options.pack or prepare.make_pack()
        return pack, pack
    state = options.state.resolve()
    own = prepare.own_pack(options.problems, state / "own-pack")
    return own, taught_by(own, state / "control-pack", options.problems)


def taught_by(own: Path, directory: Path, source: Path) -> Path:
    """What fine-tuning reads, made of the problems that a run would practise on: those with a solution, for it is what they
    teach. There are no others to spare, so the figures that fine-tuning prints of `dev` are of the same problems; held-out
    ones stay unseen. Raises DemoError."""
    public, hidden = ((own / packs.file_name("rl", part)).read_bytes() for part in packs.PARTS)
    solutions = {each.id: each for each in packs.read_hidden(hidden, FunctionHidden)}
    practice = packs.read_problems(public, FunctionProblem)
    solved = [(problem, solutions[problem.id]) for problem in practice if solutions[problem.id].solution]
    if not solved:
        raise DemoError(
            f"--control sft: {source}: found no field 'solution' in {len(practice)} practice problems; fine-tuning learns from "
            "solutions: give them (docs/problems.md), or leave --problems out"
        )
    for split in ("train", "dev"):
        prepare.write_split(directory, split, solved)
    (directory / packs.PRETRAIN).write_bytes(packs.write([]))
    return directory
