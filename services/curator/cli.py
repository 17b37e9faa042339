"""`etude tasks …`: problems made and looked at by hand."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import shared
from services.curator import build
from shared.formats import Format
from shared.formats.fitting import gated, read_fitting
from shared.formats.registry import UnknownFormat, load_format
from shared.problems import Hidden, Problem
from shared.problems.pack import Lines, PackError, export_line, file_name, splits_in
from shared.problems.splits import HELD_OUT, own_splits
from shared.sandbox import SandboxUnavailable, connect, gate
from shared.visible import visible

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Make problems from installed code, and look at them."
)
console = Console(stderr=True)
_NO_SPLITS = "none: no *.public.jsonl.zst there"
T = TypeVar("T", Problem, Hidden)
SandboxKind = Annotated[
    str, typer.Option(envvar="ETUDE_SANDBOX", help="bubblewrap, or process for code that you trust.")
]


@app.command()
def mutate(
    out: Annotated[Path, typer.Option(help="Directory of the pack; made or replaced as a whole.")],
    sandbox: SandboxKind = "bubblewrap",
    processes: Annotated[int, typer.Option(min=1, max=64, help="Processes that work at a time.")] = 2,
    exclude_signatures: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Functions that the base policy was trained on; they leave rl, dev and held_out. Default: those that "
            "ship with the base policy.",
        ),
    ] = None,
    include_seen: Annotated[bool, typer.Option(help="Keep functions that the base policy was trained on.")] = False,
    also: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Distributions beside the installed ones (make corpus)."),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Read so many files only; 0: all.")] = 0,
) -> None:
    """Repair problems from the standard library and the installed distributions, with hidden tests of their own."""
    started = time.monotonic()
    columns = (TextColumn("{task.description:<40}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    try:
        with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
            tasks: dict[str, Any] = {}

            def progress(stage: str, done: int, of: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(stage, total=of)
                bars.update(tasks[stage], completed=done, total=of)

            manifest = build.build(
                out,
                sandbox=sandbox,
                processes=processes,
                exclude=None if include_seen else exclude_signatures or _shipped_signatures(),
                also=also,
                limit=limit,
                progress=progress,
            )
    except BrokenProcessPool:
        console.print(
            "tasks mutate: a worker process was killed, probably for memory: try --processes 1", soft_wrap=True
        )
        raise typer.Exit(2) from None
    except (SandboxUnavailable, ValueError, OSError) as error:
        console.print(f"tasks mutate: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    console.print(_summary(manifest))
    console.print(f"{out}: {time.monotonic() - started:.0f} s", markup=False, soft_wrap=True)


def _shipped() -> Path:
    """The base policy that is part of the package."""
    return Path(shared.__file__).resolve().parent.parent / "etude" / "data" / "base"


def _shipped_signatures() -> Path | None:
    """None where no base policy is part of the package yet. Raises FileNotFoundError where its signatures alone are left out."""
    path = _shipped() / "signatures.npz"
    if path.is_file():
        return path
    if (path.parent / "config.json").is_file():
        raise FileNotFoundError(
            f"{path}: missing, so nobody knows what the base policy has seen; the image light goes without it: use worker or demo, "
            "or --exclude-signatures FILE, or --include-seen"
        )
    return None


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="Problems of your own, one JSON object a line (docs/problems.md).")],
    out: Annotated[Path, typer.Option(help="Directory of the pack; it must not exist yet.")],
    held_out: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=0.99, help=f"Share that goes into held_out, the rest into rl; {HELD_OUT} where left out."
        ),
    ] = None,
    split: Annotated[
        Literal["train", "rl", "dev", "held_out"] | None,
        typer.Option(help="All into this one instead: held_out or dev to measure on, without practice."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="The policy whose chat format must fit the problems; the one that ships where left out."),
    ] = None,
    sandbox: SandboxKind = "bubblewrap",
) -> None:
    """A pack of your own problems: what the policy's chat format cannot take is left out; each other one is run in the
    sandbox, and refused where its solution does not solve it."""
    if out.exists():
        raise typer.BadParameter(f"{out} exists; give a new directory", param_hint="--out")
    if split and held_out is not None:
        raise typer.BadParameter(
            f"found --held-out {held_out:g} and --split {split}; give one of them", param_hint="--held-out"
        )
    try:
        chat = _format(checkpoint or _shipped())
        fitting = read_fitting(file, chat)
        fitting = gated(file, fitting, asyncio.run(_gate(fitting.pairs, sandbox)), chat)
    except (ValueError, SandboxUnavailable) as error:  # of the file: ProblemError; of the checkpoint: its format's
        _tell(f"tasks import: {error}")
        raise typer.Exit(2) from None
    for said in filter(None, (fitting.left_out(), fitting.doubt(), fitting.unproven())):
        _tell(f"{file}: {said}")
    passed = fitting.pairs
    total = f"{len(passed)} of {len(passed) + fitting.without} problems"
    share = HELD_OUT if held_out is None else held_out
    splits: Mapping[str, list[tuple[Problem, Hidden]]] = {split: passed} if split else own_splits(passed, share)
    if empty := [name for name, members in splits.items() if not members]:
        _tell(_nothing_for(empty[0], passed, share))
        raise typer.Exit(1)
    try:
        build.write_own(out, splits)
    except OSError as error:
        _tell(f"tasks import: --out {out}: cannot be written: {error.strerror}; give a new directory elsewhere")
        raise typer.Exit(2) from None
    _tell(f"{out}: {total}, " + ", ".join(f"{len(members)} in {name}" for name, members in splits.items()))


def _format(checkpoint: Path) -> Format:
    """Raises ValueError."""
    try:
        return load_format(checkpoint)
    except UnknownFormat as error:
        raise ValueError(f"--checkpoint {error}") from None


def _nothing_for(split: str, passed: list[tuple[Problem, Hidden]], share: float) -> str:
    cells = len({problem.cell or problem.id for problem, _ in passed})
    return (
        f"tasks import: nothing is left for {split}: --held-out {share:g} is the share of the cells that a hash of their names "
        f"picks, relatives together; found {cells} in field 'cell' (left out: the id) of {len(passed)} problems; allowed: more "
        "of them, another --held-out, or all in one split (--split held_out: to measure on)"
    )


def _tell(text: str) -> None:
    console.print(visible(text), markup=False, soft_wrap=True)


async def _gate(pairs: list[tuple[Problem, Hidden]], sandbox: str) -> list[gate.Outcome]:
    functions = connect(sandbox, 2)
    try:
        return await gate.check(functions, pairs)
    finally:
        await functions.close()


@app.command()
def show(
    pack: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Directory of a pack.")],
    problem: Annotated[str, typer.Argument(help="Id of a problem; without it the ids are listed.")] = "",
    split: Annotated[str, typer.Option(help="train, rl, dev or held_out; left out: wherever it is.")] = "",
) -> None:
    """One problem as a line of JSON, hidden part inside where it lies beside it: the format of `tasks import`."""
    try:
        splits = [split] if split else splits_in(pack)
        for name in splits:
            public = _lines(pack / file_name(name, "public"), Problem)
            if not problem:
                print("\n".join(map(visible, public.ids)))
            elif problem in public:
                print(_plain(export_line(public[problem], _hidden(pack, name, problem))))
                console.print(f"{problem}: split {name}", markup=False, soft_wrap=True)
                return
    except FileNotFoundError:
        there = ", ".join(splits_in(pack)) or _NO_SPLITS
        console.print(f"tasks show: {pack}: no split {split!r}; found: {there}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except (OSError, PackError) as error:
        console.print(f"tasks show: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyError:
        console.print(f"tasks show: {problem!r} has no hidden part in {pack}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if problem or not splits:
        looked = ", ".join(splits) or _NO_SPLITS
        which = f"problem {problem!r}" if problem else "problems"
        console.print(f"tasks show: no {which} in {pack} (splits: {looked})", markup=False, soft_wrap=True)
        raise typer.Exit(2)


def _hidden(pack: Path, split: str, problem: str) -> Hidden:
    """An empty one where the pack is here without its hidden part. Raises KeyError."""
    path = pack / file_name(split, "hidden")
    if not path.exists():
        console.print(f"{path}: not here; only the public part is shown", markup=False, soft_wrap=True)
        return Hidden(id=problem, cases=[])
    return _lines(path, Hidden)[problem]


def _lines(path: Path, kind: type[T]) -> Lines[T]:
    """Raises OSError, and PackError with the name of the file."""
    try:
        return Lines(path.read_bytes(), kind)
    except PackError as error:
        raise PackError(f"{path}: {error}") from None


def _plain(line: str) -> str:
    """The same JSON, with what would steer a terminal or the order of reading as escapes."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


def _summary(manifest: dict[str, Any]) -> Table:
    table = Table("split", "problems", "functions", "kinds")
    for split, counts in manifest["splits"].items():
        table.add_row(split, str(counts["problems"]), str(counts["functions"]), str(len(counts["kinds"])))
    table.add_row("pretrain", "", str(manifest["functions"]["pretrain"]), "")
    return table


if __name__ == "__main__":
    app()
