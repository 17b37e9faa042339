"""`etude ledger`: audit and show what became of every attempt of a run."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sqlalchemy import Engine, func, select

from services.scheduler import audit as audits
from services.scheduler import sweep as sweeps
from services.scheduler import trace as traces
from services.scheduler.audit import Report, UnknownRun
from services.scheduler.config import SchedulerConfig
from shared import ledger
from shared import objects as stores
from shared.contracts.run import Ref, RunConfig
from shared.contracts.tracing import trace_id
from shared.ledger.models import Event, Group, Run, Step
from shared.objects import ObjectDamaged, ObjectMissing
from shared.settings import read
from shared.visible import visible

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Audit and show what became of every attempt.",
    pretty_exceptions_enable=False,
)

RunArgument = Annotated[str, typer.Argument(help="The run's id; left out: the newest.")]
State = Annotated[Path, typer.Option("--state", help="Directory for everything local.", envvar="ETUDE_STATE")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
SHOWN = 10  # rows of a finding that a table shows
REASONS_SHOWN = 5
GIVEN_UP = (
    "Dropped and failed attempts are accounted for, not lost: each ended for the reason given, none was trained. "
    "The problem of a dropped group may be drawn again."
)


def _settings(state: Path) -> SchedulerConfig:
    return read(SchedulerConfig, state=state)


def _open(settings: SchedulerConfig) -> Engine:
    try:
        return ledger.readable(settings.ledger_url)
    except (ledger.LedgerMissing, ledger.LedgerOutdated, ledger.LedgerUnavailable, ValueError) as error:
        raise _refuse(str(error)) from None


def _refuse(text: str) -> typer.Exit:
    typer.echo(text, err=True)
    return typer.Exit(2)


def _plain(text: str) -> str:
    """For a table: what others have written steers neither the terminal nor the table."""
    return escape(visible(text))


def _named(engine: Engine, run: str) -> str:
    try:
        return audits.named(engine, run)
    except UnknownRun as error:
        raise _refuse(str(error)) from None


def _bound(engine: Engine, run: str, settings: SchedulerConfig) -> int | None:
    """The run's staleness bound, from its configuration. None when that is gone."""
    with engine.begin() as connection:
        config = connection.execute(select(Run.config).where(Run.run_id == run)).scalar()
    if not isinstance(config, Ref):
        return None
    try:
        data = stores.connect(settings.objects_url).get(config)
        return msgspec.json.decode(data, type=RunConfig).schedule.max_staleness
    except (ObjectMissing, ObjectDamaged, msgspec.MsgspecError, OSError):
        return None


@app.command()
def audit(run: RunArgument = "", state: State = Path(".etude"), as_json: AsJson = False) -> None:
    """Check every promise about a run: nothing lost, nothing trained twice, nothing older than its bound.

    Exit code 0: all kept. 1: violations, printed with their rows. 2: the ledger or the run cannot be read.
    """
    settings = _settings(state)
    engine = _open(settings)
    name = _named(engine, run)
    bound = _bound(engine, name, settings)
    report = audits.audit(engine, name, max_staleness=bound)
    if as_json:
        typer.echo(json.dumps({**report.as_dict(), "max_staleness": bound}, indent=1))
    else:
        _print(report, bound)
    raise typer.Exit(0 if report.sound else 1)


def _print(report: Report, bound: int | None) -> None:
    console = Console()
    table = Table(title=f"{report.run} ({report.state})", title_justify="left")
    table.add_column("what")
    table.add_column("number", justify="right")
    for topic, number in report.counts.items():
        table.add_row(topic, f"{number:,}")
    for kind, numbers in (("groups", report.groups), ("attempts", report.attempts)):
        for word, number in numbers.items():
            table.add_row(f"{kind} {word}", f"{number:,}")
            reasons = list(report.reasons.get(f"{kind} {word}", {}).items())
            for reason, times in reasons[:REASONS_SHOWN]:
                table.add_row(f"  because: {_plain(reason)}", f"{times:,}")
            if len(reasons) > REASONS_SHOWN:
                rest = sum(times for _, times in reasons[REASONS_SHOWN:])
                table.add_row("  because of something else (--json prints all)", f"{rest:,}")
    allowed = "bound unknown: the run's configuration cannot be read" if bound is None else f"at most {bound} allowed"
    table.add_row(f"greatest age trained, in steps ({allowed})", str(report.oldest_age))
    console.print(table)
    if report.reasons:
        console.print(GIVEN_UP, highlight=False)
    for finding in report.findings:
        console.print(f"{finding.check}: {len(finding.rows)} {finding.what}", style="red", highlight=False)
        for row in finding.rows[:SHOWN]:
            console.print(f"  {_plain(row)}", highlight=False)
        if len(finding.rows) > SHOWN:
            console.print(f"  … and {len(finding.rows) - SHOWN} more (--json prints all)", highlight=False)
    console.print(report.summary(), style="green" if report.sound else "red", highlight=False)


@app.command()
def show(
    run: RunArgument = "",
    state: State = Path(".etude"),
    events: Annotated[int, typer.Option(help="How many of the newest events to print.", min=0)] = 10,
) -> None:
    """Show a run: its life, its steps, its newest events."""
    settings = _settings(state)
    engine = _open(settings)
    name = _named(engine, run)
    console = Console()
    with engine.begin() as connection:
        row = connection.execute(select(Run.__table__).where(Run.run_id == name)).one()
        states = connection.execute(
            select(Group.state, func.count()).where(Group.run_id == name).group_by(Group.state).order_by(Group.state)
        ).all()
        steps = connection.execute(
            select(Step.__table__).where(Step.run_id == name).order_by(Step.committed_at.desc()).limit(10)
        ).all()
        newest = connection.execute(
            select(Event.__table__).where(Event.run_id == name).order_by(Event.sequence.desc()).limit(events)
        ).all()
    facts = Table(title=name, title_justify="left", show_header=False)
    for field, value in (
        ("state", f"{row.state} {row.reason}".strip()),
        ("code", row.code_version),
        ("configuration", f"{row.config.key} {row.config.checksum}" if row.config else "none yet"),
        ("pack", row.pack_hash or "none yet"),
        ("created", _when(row.created_at)),
        ("first request", _when(row.first_request_at)),
        ("finished", _when(row.finished_at)),
        ("incarnation", str(row.incarnation)),
        ("groups", ", ".join(f"{state} {count:,}" for state, count in states) or "none"),
    ):
        facts.add_row(field, _plain(value))
    console.print(facts)
    if steps:
        table = Table("incarnation", "step", "serial", "committed", title="newest steps", title_justify="left")
        for step in steps:
            table.add_row(str(step.incarnation), str(step.step), str(step.serial), _when(step.committed_at))
        console.print(table)
    if newest:
        table = Table("number", "at", "what", "of", "epoch", "data", title="newest events", title_justify="left")
        for event in reversed(newest):
            data, subject = _plain(json.dumps(event.data)[:80]), _plain(event.subject)
            table.add_row(str(event.sequence), _when(event.at), event.kind, subject, str(event.epoch), data)
        console.print(table)


@app.command()
def trace(
    attempt: Annotated[str, typer.Argument(help="The attempt's id.")],
    state: State = Path(".etude"),
    as_json: AsJson = False,
) -> None:
    """Print the whole life of one attempt: requested, claimed, finished, scored, its group, the step that trained it."""
    engine = _open(_settings(state))
    with engine.begin() as connection:
        lives = {run: traces.life(connection, run, attempt) for run in traces.runs_of(connection, attempt)}
    if not lives:
        raise _refuse(
            f"attempt {attempt!r}: not in this ledger; `etude ledger show` prints the newest events and whose they are"
        )
    for run, moments in lives.items():
        if as_json:
            found = {"run": run, "trace": trace_id(attempt), "moments": [asdict(moment) for moment in moments]}
            typer.echo(json.dumps(found))
            continue
        table = Table("number", "at", "after, s", "what", "of", "epoch", "data", title_justify="left")
        table.title = f"{run}, trace {trace_id(attempt)}"
        for moment in moments:
            after = f"{moment.at - moments[0].at:.3f}"
            data = ", ".join(f"{name} {value}" for name, value in moment.data.items())
            of, data = _plain(moment.of), _plain(data[:80])
            table.add_row(str(moment.sequence), _when(moment.at), after, moment.kind, of, str(moment.epoch), data)
        Console().print(table)


@app.command()
def sweep(
    run: RunArgument = "",
    state: State = Path(".etude"),
    delete: Annotated[bool, typer.Option("--delete", help="Delete them; without it they are only listed.")] = False,
    trained: Annotated[
        bool,
        typer.Option(
            "--trained", help="Also the routing of groups that every checkpoint has trained. Trajectories stay."
        ),
    ] = False,
    versions: Annotated[
        int | None,
        typer.Option(
            "--versions",
            metavar="N",
            min=1,
            help="Also the weights of all versions but the last N, those that are served or were promoted, and what these are "
            "built from. Nobody can go back to a version without weights, evaluate or export it.",
        ),
    ] = None,
) -> None:
    """List the objects that nobody needs: what attempts left behind that were given up, and more if asked for. Checkpoints,
    packs and trajectories that count are never touched."""
    settings = _settings(state)
    engine = _open(settings)
    name = _named(engine, run)
    patience_s, found = settings.replica_patience_s, 0
    try:
        store = stores.connect(settings.objects_url)
        for one in sweeps.sweep(
            engine, store, name, patience_s=patience_s, delete=delete, trained=trained, last=versions
        ):
            typer.echo(f"{one.key}: {one.why}")
            found += 1
    except OSError as error:
        raise _refuse(str(error)) from None
    typer.echo(f"{found} objects {'deleted' if delete else 'may go; --delete deletes them'}")


def _when(at: float | None) -> str:
    return "not yet" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)  # `etude trace` is `etude ledger trace`
alone.command()(trace)


if __name__ == "__main__":
    app()
