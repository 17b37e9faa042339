"""`etude regrade`: recorded submissions graded again, without sampling."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sqlalchemy.exc import DBAPIError

from services.reward import records
from services.reward.cli import State, open_ledger, refuse
from services.reward.config import GraderSettings
from services.reward.packs import Packs
from services.reward.regrade import Against, BadFile, GradingFile, Line, Regraded, Row, code_state, compared
from services.reward.regrading import Recorded, Regrader, packs_of
from shared import objects as stores
from shared import sandbox
from shared.contracts.run import Ref
from shared.environments.places import opened_places
from shared.environments.registry import Environments
from shared.objects import Objects
from shared.problems.pack import PackError, Part
from shared.settings import read
from shared.visible import visible

SHOWN = 20  # problems of the table; `--json` has all


def regrade(
    run: Annotated[str, typer.Argument(help="The run's id; left out: the newest.")] = "",
    hidden: Annotated[
        Path | None,
        typer.Option("--hidden", help="A pack's hidden part (.hidden.jsonl.zst) to grade against.", show_default=False),
    ] = None,
    pack: Annotated[
        Path | None,
        typer.Option("--pack", help="A pack's public part, where problems themselves changed.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File of the new verdicts; one that is there is continued.", show_default=False),
    ] = None,
    sandboxes: Annotated[int, typer.Option("--sandboxes", min=1, max=256, help="Functions graded at a time.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    state: State = Path(".etude"),
) -> None:
    """Grade a run's recorded submissions again, and print which verdicts change. No model is asked.

    Use it after hidden tests or an environment changed. The new verdicts go to a file of their own, one JSON line per attempt;
    the ledger and the recorded verdicts stay as they are. An interrupted command goes on where it stopped if it is given again;
    after a change of the code or of the sandboxes it begins a new file.

    A submission that infrastructure kept from being graded is tried four times, then named. It counts as nothing, not as 0; the
    next call tries it again.

    Examples:

      etude regrade RUN                                    after a change of the environment

      etude regrade RUN --hidden new/train.hidden.jsonl.zst    against other hidden tests

      etude regrade RUN --out again.jsonl                  once more, from the beginning

    Exit code: 0 all were graded, 1 some were not, 2 the command was refused.
    """
    began = time.monotonic()
    settings = read(GraderSettings, state=state)
    engine, objects = open_ledger(settings), stores.connect(settings.objects_url)
    packs = Packs(objects)
    tests = _held(packs, pack, "public", "--pack"), _held(packs, hidden, "hidden", "--hidden")
    try:
        run = records.named(engine, run)
        reward = records.config_of(engine, objects, run).reward
        submissions = [Recorded(record, ref) for record, ref in records.read(engine, objects, run)]
        refs = packs_of(engine, run)
        against = Against(run=run, pack=_checksum(tests[0]), pack_hidden=_checksum(tests[1]), code=_code(settings))
        file = out or settings.state / "regraded" / f"{_name(against)}.jsonl"
        with GradingFile(file, against) as kept, _sandboxes(settings, sandboxes, objects) as environments:
            known = len(kept.lines)
            reasons = _work(kept, submissions, Regrader(objects, environments, packs, refs, tests))
            after = {line.attempt: line.after for line in map(kept.lines.get, map(_key, submissions)) if line}
    except (records.UnknownRun, BadFile, OSError, ValueError, DBAPIError) as error:
        raise refuse(str(error)) from None
    except sandbox.SandboxUnavailable as error:
        raise refuse(f"no sandbox works here: {error}; what was graded is kept, the same command goes on") from None
    found = compared([one.record for one in submissions], after, reasons, reward)
    if as_json:
        facts = {"run": run, "file": str(file), "known_before": known, "seconds": time.monotonic() - began}
        typer.echo(json.dumps({**facts, **msgspec.to_builtins(found)}))
    else:
        _print(run, found, file, known, time.monotonic() - began)
    raise typer.Exit(1 if reasons else 0)


alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)  # `etude regrade`
alone.command()(regrade)


def _held(packs: Packs, path: Path | None, part: Part, option: str) -> Ref | None:
    if path is None:
        return None
    try:
        return packs.hold(path.read_bytes(), part)
    except OSError as error:
        raise refuse(f"{option} {path}: cannot be read ({error.strerror})") from None
    except PackError as error:
        raise refuse(f"{option} {path}: found no pack ({error}); allowed: the {part} part of one") from None


def _checksum(ref: Ref | None) -> str:
    return "" if ref is None else ref.checksum


def _code(settings: GraderSettings) -> str:
    """Return the state of what grades here: the code of the environments and of this service, Python, and the sandboxes."""
    folders = [Path(sandbox.__file__).parents[1], Path(__file__).parent]
    return code_state(folders, sys.version, settings.sandbox, settings.sandbox_image)


def _name(tests: Against) -> str:
    """Return the name of the file for a run, a set of tests and a state of the code."""
    return "-".join(part[:12] if part is not tests.run else part for part in msgspec.structs.astuple(tests) if part)


def _key(one: Recorded) -> tuple[str, str]:
    return one.record.attempt, _checksum(one.trajectory)


@contextlib.contextmanager
def _sandboxes(settings: GraderSettings, workers: int, objects: Objects) -> Iterator[Environments]:
    """Open what the graders open. The adapters serve any event loop, so one opens and closes them."""
    with asyncio.Runner() as runner:
        places = opened_places(settings, workers, objects, settings.sandbox)
        opened = runner.run(places.__aenter__())
        try:
            yield Environments(opened)
        finally:
            runner.run(places.__aexit__(None, None, None))


def _work(kept: GradingFile, submissions: list[Recorded], regrader: Regrader) -> dict[str, str]:
    """Grade what the file lacks, batch by batch. Return why attempts were not graded."""
    lacking = [one for one in submissions if _key(one) not in kept.lines]
    reasons: dict[str, str] = {}
    console = Console(stderr=True)
    columns = (TextColumn("graded again"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=len(submissions), completed=len(submissions) - len(lacking))
        for batch in regrader.graded(lacking):
            lines = []
            for one, answer in batch:
                if isinstance(answer, str):
                    reasons[one.record.attempt] = answer
                    continue
                attempt, trajectory = _key(one)
                record = one.record
                lines.append(
                    Line(
                        attempt=attempt,
                        trajectory=trajectory,
                        problem=record.problem,
                        before=record.verdict,
                        after=answer,
                    )
                )
            kept.add(lines)
            bar.advance(task, len(batch))
    return reasons


def _print(run: str, found: Regraded, file: Path, known: int, seconds: float) -> None:
    console = Console(soft_wrap=not sys.stdout.isatty())
    total = found.total
    heads = (
        "problem",
        "graded",
        "solved before",
        "after",
        "newly solved",
        "newly failed",
        "other verdict",
        "not graded",
    )
    table = Table(*heads, title=f"{run}: {total.graded} of {total.graded + total.not_graded} submissions graded again")
    most = sorted(found.problems.items(), key=lambda item: (-item[1].changed, -item[1].not_graded, item[0]))
    for name, row in most[:SHOWN]:
        table.add_row(escape(visible(name)), *_cells(row))
    if len(most) > SHOWN:
        table.add_row(f"and {len(most) - SHOWN} more (--json)")
    table.add_row("all", *_cells(total), style="bold")
    console.print(table)
    console.print(
        f"Mean reward {found.mean[0]:+.4f} -> {found.mean[1]:+.4f}. Groups with a signal: {found.signal[0]} before, "
        f"{found.signal[1]} after, of {found.groups}. {seconds:.1f} s."
    )
    if found.examples:
        console.print(escape(visible(f"Solved changes for {', '.join(found.examples)}")))
    for reason, count in sorted(_counted(found.reasons).items()):
        console.print(escape(visible(f"{count} not graded, and counted nowhere: {reason}")))
    before = f" {known} of them were there before; --out NEW grades from the beginning." if known else ""
    console.print(escape(visible(f"Verdicts: {file}.{before} Nothing recorded was changed.")))


def _cells(row: Row) -> Iterator[str]:
    values: tuple[Any, ...] = (row.graded, *row.solved, row.newly_solved, row.newly_failed, row.changed, row.not_graded)
    return map(str, values)


def _counted(reasons: dict[str, str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for reason in reasons.values():
        counts[reason[:300]] = counts.get(reason[:300], 0) + 1
    return counts
