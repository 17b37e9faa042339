"""`etude tasks …`: problems made and looked at by hand."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import shared
from services.curator import build, gate
from shared.problems import Hidden, Problem, ProblemError
from shared.problems.importing import import_jsonl
from shared.problems.pack import Lines, PackError, export_line, file_name
from shared.problems.splits import SPLITS
from shared.sandbox import SandboxUnavailable, connect

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Make problems from installed code, and look at them."
)
console = Console(stderr=True)
_PUBLIC = file_name("", "public")


@app.command()
def mutate(
    out: Annotated[Path, typer.Option(help="Directory of the pack; made or replaced as a whole.")],
    sandbox: Annotated[str, typer.Option(help="bubblewrap, or process for code that you trust.")] = "bubblewrap",
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


def _shipped_signatures() -> Path | None:
    path = Path(shared.__file__).resolve().parent.parent / "etude" / "data" / "base" / "signatures.npz"
    return path if path.is_file() else None


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="Problems of your own, one JSON object a line (docs/problems.md).")],
    out: Annotated[Path, typer.Option(help="Directory of the pack; it must not exist yet.")],
    split: Annotated[str, typer.Option(help="Name of the split: rl for practice, held_out for evaluation.")] = "rl",
    sandbox: Annotated[str, typer.Option(help="bubblewrap, or process for code that you trust.")] = "bubblewrap",
) -> None:
    """A pack of your own problems: each is run in the sandbox; what its solution does not solve is refused."""
    if out.exists():
        raise typer.BadParameter(f"{out} exists; give a new directory", param_hint="--out")
    try:
        outcomes = asyncio.run(_gate(import_jsonl(file), sandbox))
    except (ProblemError, SandboxUnavailable) as error:
        console.print(f"tasks import: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    passed = [outcome for outcome in outcomes if not outcome.reason]
    for outcome in outcomes:
        if outcome.reason:
            console.print(f"refused {outcome.problem.id}: {outcome.reason}", markup=False, soft_wrap=True)
    if passed:
        build.write_own(out, split, [(outcome.problem, outcome.hidden) for outcome in passed])
    console.print(f"{out}: {len(passed)} of {len(outcomes)} problems", markup=False, soft_wrap=True)
    raise typer.Exit(0 if passed else 1)


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
        splits = [split] if split else _splits(pack)
        for name in splits:
            public = Lines((pack / file_name(name, "public")).read_bytes(), Problem)
            if not problem:
                print("\n".join(public.ids))
            elif problem in public:
                print(export_line(public[problem], _hidden(pack, name, problem)))
                console.print(f"{problem}: split {name}", markup=False, soft_wrap=True)
                return
    except (OSError, PackError) as error:
        console.print(f"tasks show: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyError:
        console.print(f"tasks show: {problem!r} has no hidden part in {pack}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if problem:
        looked = ", ".join(splits) or "none: no *.public.jsonl.zst there"
        console.print(f"tasks show: no problem {problem!r} in {pack} (splits: {looked})", markup=False, soft_wrap=True)
        raise typer.Exit(2)


def _splits(pack: Path) -> list[str]:
    """Those that the pack has, the known ones first and in their order."""
    there = {path.name.removesuffix(_PUBLIC) for path in pack.glob(f"*{_PUBLIC}")}
    return [name for name in SPLITS if name in there] + sorted(there - set(SPLITS))


def _hidden(pack: Path, split: str, problem: str) -> Hidden:
    """An empty one where the pack is here without its hidden part. Raises KeyError."""
    path = pack / file_name(split, "hidden")
    if not path.exists():
        console.print(f"{path}: not here; only the public part is shown", markup=False, soft_wrap=True)
        return Hidden(id=problem, cases=[])
    return Lines(path.read_bytes(), Hidden)[problem]


def _summary(manifest: dict[str, Any]) -> Table:
    table = Table("split", "problems", "functions", "kinds")
    for split, counts in manifest["splits"].items():
        table.add_row(split, str(counts["problems"]), str(counts["functions"]), str(len(counts["kinds"])))
    table.add_row("pretrain", "", str(manifest["functions"]["pretrain"]), "")
    return table


if __name__ == "__main__":
    app()
