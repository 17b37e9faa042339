"""`etude problem`: why a problem was or was not drawn, and whether the estimates of hardness come true. Reads the ledger only."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from services.scheduler import calibration as calibrations
from services.scheduler.api import Snapshots, UnknownProblem
from services.scheduler.cli import AsJson, RunArgument, State, _named, _open, _plain, _refuse, _settings
from services.scheduler.store import Store
from services.scheduler.why import sentences

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Why a problem was or was not drawn, and how right the estimates of hardness are.",
    pretty_exceptions_enable=False,
)


@app.command()
def why(
    problem: str = typer.Argument(help="The problem's id."),
    run: RunArgument = "",
    state: State = Path(".etude"),
    as_json: AsJson = False,
) -> None:
    """Say why a problem was or was not drawn: what became of it, how likely an attempt succeeds, from what that follows, and
    how often it is drawn beside all others.

    Example: etude problem why trig/sin-3 r-20260101T120000-ab12
    """
    settings = _settings(state)
    name = _named(_open(settings), run)
    try:
        found = Snapshots(settings).problem(name, problem)
    except UnknownProblem as error:
        raise _refuse(str(error)) from None
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
        return
    for sentence in sentences(found):
        typer.echo(_plain(sentence))


@app.command()
def calibration(
    run: RunArgument = "",
    state: State = Path(".etude"),
    as_json: AsJson = False,
    picture: Path | None = typer.Option(None, help="Draw predicted against solved into this file (PNG)."),
) -> None:
    """Compare what was predicted of each group, before it was drawn, with what became of it. Good: an error of at most 0.05.

    A group whose attempts all end alike teaches nothing; how many of them were to be expected is said, too.
    """
    engine = _open(_settings(state))
    name = _named(engine, run)
    ws = Store(engine).load(name, time.time())
    if ws is None:
        raise _refuse(f"run {name!r}: the ledger has never heard of it")
    found = calibrations.report(ws.hardness.calibration.newest)
    if picture is not None:
        from services.scheduler.pictures import reliability

        picture.write_bytes(reliability(found, name))
    if as_json:
        typer.echo(msgspec.json.encode({"run": name, **asdict(found)}).decode())
        return
    table = Table("predicted", "solved", "attempts", "groups", title=f"{name}: chance of success", title_justify="left")
    for one in found.bins:
        table.add_row(f"{one.predicted:.3f}", f"{one.solved:.3f}", f"{one.attempts:,}", f"{one.groups:,}")
    console = Console()
    console.print(table)
    typer.echo(
        f"expected calibration error {found.error:.3f}, Brier score {found.brier:.3f}, over {found.groups:,} groups"
    )
    typer.echo(f"groups without a signal: predicted {found.silent_predicted:.1%}, came {found.silent:.1%}")
