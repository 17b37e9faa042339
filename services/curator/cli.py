"""`etude tasks …`: problems made and looked at by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from services.curator import build
from shared.sandbox import SandboxUnavailable

app = typer.Typer(no_args_is_help=True, help="Make problems from installed code, and look at them.")
console = Console(stderr=True)


@app.callback()
def _group() -> None:
    """Keeps `mutate` a command of its own."""


@app.command()
def mutate(
    out: Annotated[Path, typer.Option(help="Directory of the pack; made or replaced as a whole.")],
    sandbox: Annotated[str, typer.Option(help="bubblewrap, or process for code that you trust.")] = "bubblewrap",
    processes: Annotated[int, typer.Option(min=1, max=64, help="Processes that work at a time.")] = 2,
    exclude_signatures: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Functions that a base policy was trained on.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Read so many files only; 0: all.")] = 0,
) -> None:
    """Repair problems from the standard library and the installed distributions, with hidden tests of their own."""
    started = time.monotonic()
    columns = (TextColumn("{task.description:<40}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    try:
        with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
            tasks: dict[str, Any] = {}

            def show(stage: str, done: int, of: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(stage, total=of)
                bars.update(tasks[stage], completed=done, total=of)

            manifest = build.build(
                out, sandbox=sandbox, processes=processes, exclude=exclude_signatures, limit=limit, progress=show
            )
    except SandboxUnavailable as error:
        console.print(f"tasks mutate: no sandbox: {error}", markup=False)
        raise typer.Exit(2) from None
    console.print(_summary(manifest))
    console.print(f"{out}: {time.monotonic() - started:.0f} s", markup=False)


def _summary(manifest: dict[str, Any]) -> Table:
    table = Table("split", "problems", "functions", "kinds")
    for split, counts in manifest["splits"].items():
        table.add_row(split, str(counts["problems"]), str(counts["functions"]), str(len(counts["kinds"])))
    table.add_row("pretrain", "", str(manifest["functions"]["pretrain"]), "")
    return table


if __name__ == "__main__":
    app()
