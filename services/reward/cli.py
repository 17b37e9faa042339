"""`etude reward plot`, `etude reward habits` and `etude rescore`: what a reward does to attempts that are recorded."""

from __future__ import annotations

import json
import sys
import time
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from services.reward import records
from services.reward.config import RewardSettings
from services.reward.formats import Formats
from services.reward.habits import Habits, buckets, habits
from services.reward.plot import Spent, plot_length
from services.reward.rescore import BadConfig, Change, Summary, merged, rescored, summary
from services.reward.term_workers import TermWorkers
from shared import ledger
from shared import objects as stores
from shared.contracts.run import RewardConfig
from shared.json_once import loads_once
from shared.length import effort_units
from shared.settings import ServiceSettings, read
from shared.visible import visible

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Look at a reward: the curve of its length penalty, and what the policy takes to under it.",
    pretty_exceptions_enable=False,
)
State = Annotated[Path, typer.Option("--state", help="Directory for everything local.", envvar="ETUDE_STATE")]


def refuse(text: str) -> typer.Exit:
    typer.echo(text, err=True)
    return typer.Exit(2)


def open_ledger(settings: ServiceSettings) -> Engine:
    try:
        return ledger.readable(settings.ledger_url)
    except (ledger.LedgerMissing, ledger.LedgerOutdated, ledger.LedgerUnavailable, ValueError) as error:
        raise refuse(str(error)) from None


def _changes(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file of changes to a run's configuration."""
    try:
        data = path.read_bytes()
        found = loads_once(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except OSError as error:
        raise refuse(f"--config {path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise refuse(f"--config {path}: not {'JSON' if path.suffix == '.json' else 'TOML'} ({error})") from None
    if not isinstance(found, dict):
        raise refuse(f"--config {path}: found {type(found).__name__}; allowed: an object with reward")
    return found


def _merged(old: RewardConfig, path: Path) -> RewardConfig:
    try:
        return merged(old, _changes(path))
    except BadConfig as error:
        raise refuse("\n".join(f"--config {path}: {line}" for line in str(error).splitlines())) from None


@app.command()
def plot(
    target: Annotated[
        str, typer.Argument(metavar="RUN|CONFIG", help="A run's id, or a TOML or JSON file; left out: the newest run.")
    ] = "",
    out: Annotated[Path, typer.Option("--out", help="The picture; replaced as a whole.")] = Path("length.png"),
    state: State = Path(".etude"),
) -> None:
    """Draw the length penalty's curve and where a run's attempts lie on it; of a file, the curve alone."""
    spent: list[Spent] = []
    if target and Path(target).suffix in (".toml", ".json"):
        reward, title = _merged(RewardConfig(), Path(target)), target
    else:
        settings = read(RewardSettings, state=state)
        engine, objects = open_ledger(settings), stores.connect(settings.objects_url)
        try:
            run = records.named(engine, target)
            reward, title = records.config_of(engine, objects, run).reward, run
            found = records.read(engine, objects, run) if reward.length else []
        except (records.UnknownRun, OSError, ValueError, DBAPIError) as error:
            raise refuse(str(error)) from None
        if reward.length is not None:
            spent = [Spent(effort_units(one.effort, reward.length), one.verdict.solved) for one, _ in found]
    if reward.length is None:
        raise refuse(f"{title}: reward.length is null; there is no penalty to draw")
    try:
        plot_length(reward.length, spent, out, title=f"{title}: length penalty of {reward.id!r}, {len(spent)} attempts")
    except ImportError:
        raise refuse("matplotlib is not installed here (pip install 'etude[trainer]')") from None
    except (OSError, ValueError) as error:
        raise refuse(f"--out {out}: cannot be written ({error})") from None
    typer.echo(f"{out}: {len(spent)} attempts on the curve of reward configuration {reward.id!r}")


@app.command("habits")
def show_habits(
    run: Annotated[str, typer.Argument(help="The run's id; left out: the newest.")] = "",
    every: Annotated[int, typer.Option("--every", min=1, help="Versions that are taken together.")] = 10,
    attempts: Annotated[int, typer.Option("--attempts", min=0, help="Trajectories read for each row, at most.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    state: State = Path(".etude"),
) -> None:
    """Show what the policy takes to, by version and reward configuration: tools, lengths, errors, hack signatures, diversity.

    Everything comes from the ledger and the object store. Tools, comments and the share of different submissions need the
    trajectories, of which `--attempts` are read for each row. `--json` also names example attempts.
    """
    settings = read(RewardSettings, state=state)
    engine, objects = open_ledger(settings), stores.connect(settings.objects_url)
    try:
        run = records.named(engine, run)
        found = records.read(engine, objects, run)
        refs = {record.attempt: ref for record, ref in found}
        rows = []
        for (config, first), bucket in buckets((record for record, _ in found), every).items():
            known = records.contents(objects, [(record, refs[record.attempt]) for record in bucket[:attempts]])
            rows.append(habits(config, first, every, bucket, known))
    except (records.UnknownRun, OSError, ValueError, DBAPIError) as error:
        raise refuse(str(error)) from None
    if as_json:
        typer.echo(json.dumps({"run": run, "rows": msgspec.to_builtins(rows)}))
    else:
        _print_habits(run, rows)


def _print_habits(run: str, rows: list[Habits]) -> None:
    heads = (
        "versions",
        "reward",
        "attempts",
        "pass@1",
        "best of k",
        "k",
        "broken calls",
        "reply",
        "comments",
        "distinct",
        "tools",
    )
    table = Table(*heads, title=f"{run}: habits; shares of attempts, lengths in tokens and characters")
    for row in rows:
        tools = ", ".join(f"{tool} {share:.0%}" for tool, share in list(row.tools.items())[:4])
        cells = (
            f"{row.versions[0]}-{row.versions[1]}", row.config, str(row.attempts), f"{row.pass_at_1:.1%}",
            f"{row.best_of:.1%}", f"{row.k:.1f}", f"{row.broken_calls:.1%}", f"{row.reply_tokens:.0f}",
            f"{row.comment_characters:.0f}", "" if row.distinct is None else f"{row.distinct:.0%}", tools,
        )  # fmt: skip
        table.add_row(*(escape(visible(cell)) for cell in cells))
    console = Console(soft_wrap=not sys.stdout.isatty())
    console.print(table)
    for row in rows:
        shown = [
            f"{name} {share:.1%} ({', '.join(row.examples[name])})" for name, share in row.signatures.items() if share
        ]
        if shown:
            console.print(escape(visible(f"{row.versions[0]}-{row.versions[1]} {row.config}: {'; '.join(shown)}")))


def rescore(
    run: Annotated[str, typer.Argument(help="The run's id; left out: the newest.")] = "",
    config: Annotated[
        Path, typer.Option("--config", help="TOML or JSON with the changes to the run's reward.", show_default=False)
    ] = Path(),
    out: Annotated[
        Path | None, typer.Option("--out", help="A new file for one JSON line per attempt.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    state: State = Path(".etude"),
) -> None:
    """Score a run's recorded attempts under other terms and weights, and print what changes.

    Nothing recorded is changed. A term that the graders had computed needs a new weight only; any other is computed from the
    stored trajectories, which takes longer.

    Example: `etude rescore RUN --config new.toml` with `[reward.behaviour]` and `untested_submit = -0.2`
    """
    began = time.monotonic()
    if config == Path():
        raise refuse("--config: left out; allowed: a TOML or JSON file with the changes to the run's reward")
    if out is not None and out.exists():
        raise refuse(f"--out {out}: it exists; allowed: a new file, for nothing is overwritten")
    settings = read(RewardSettings, state=state)
    engine, objects = open_ledger(settings), stores.connect(settings.objects_url)
    workers = TermWorkers()
    try:
        run = records.named(engine, run)
        started = records.config_of(engine, objects, run)
        reward = _merged(started.reward, config)
        found = records.read(engine, objects, run)
        formats = Formats(objects, settings.state / "grader" / "formats")
        complete = records.completed(found, reward, objects=objects, run=started, workers=workers, formats=formats)
        changes = rescored(complete, reward)
    except (records.UnknownRun, OSError, ValueError, DBAPIError) as error:
        raise refuse(str(error)) from None
    finally:
        workers.close()
    result = summary(changes)
    if out is not None:
        _write(out, changes)
    seconds = time.monotonic() - began
    if as_json:
        typer.echo(json.dumps(_plain(run, result, seconds)))
    else:
        _print(run, result, seconds)


alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)  # `etude rescore`
alone.command()(rescore)


def _write(out: Path, changes: list[Change]) -> None:
    try:
        with out.open("x") as file:
            for change in changes:
                file.write(json.dumps(_row(change)) + "\n")
    except OSError as error:
        raise refuse(f"--out {out}: cannot be written ({error.strerror})") from None


def _row(change: Change) -> dict[str, Any]:
    record = change.record
    return {
        "attempt": record.attempt,
        "group": record.group,
        "problem": record.problem,
        "before": {"reward": record.reward, "terms": dict(record.terms), "reward_config": record.reward_config},
        "after": {"reward": change.reward, "terms": dict(change.terms)},
        "missing": dict(change.missing),
    }


def _plain(run: str, found: Summary, seconds: float) -> dict[str, Any]:
    plain = {name: getattr(found, name) for name in Summary.__slots__ if name != "examples"}
    plain["examples"] = [_row(change) for change in found.examples]
    return {"run": run, "seconds": seconds, **msgspec.to_builtins(plain)}


def _print(run: str, found: Summary, seconds: float) -> None:
    console = Console(soft_wrap=not sys.stdout.isatty())
    table = Table("term", "attempts before", "after", "mean before", "after", title=f"{run}: {found.attempts} attempts")
    for name, (before, after, was, now) in found.terms.items():
        table.add_row(escape(visible(name)), str(before), str(after), f"{was:+.4f}", f"{now:+.4f}")
    table.add_row("reward", "", "", f"{found.mean[0]:+.4f}", f"{found.mean[1]:+.4f}", style="bold")
    console.print(table)
    console.print(
        f"{found.changed} of {found.attempts} rewards change. {found.reordered} of {found.groups} groups rank their attempts "
        f"differently. Groups with a signal: {found.signal[0]} before, {found.signal[1]} after. {seconds:.1f} s; nothing was "
        "overwritten."
    )
    for name, (count, reason) in found.missing.items():
        console.print(escape(visible(f"{name}: no answer for {count} attempts, it adds nothing to them: {reason}")))
    for change in found.examples:
        record = change.record
        console.print(escape(visible(f"  {record.attempt}: {record.reward:+.4f} -> {change.reward:+.4f}")))


if __name__ == "__main__":
    app()
