"""`etude tasks probe`: how often a checkpoint solves some of a pack's problems, so that a run does not begin blind.

The attempts are made as `etude eval` makes them. The file that is written is the first evidence of hardness of a run that is
started with it (`etude start --probe FILE`).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude.commands import Retry, require_machine

if TYPE_CHECKING:
    from rich.table import Table

    from shared.contracts.probe import Probe, Tried
    from shared.contracts.run import Retry as Retries
    from shared.problems import Problem

SPLIT = "rl"  # that runs practise on
ROWS = 12  # of a table's part; what more there is stands together in one row
OTHERS = "others"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Rate:
    """The solve rate over some problems, each as much as any other. `low`, `high`: its 95 % bootstrap interval over problems; None:
    one problem has none. `silent`: share of the problems whose attempts all ended alike."""

    name: str
    problems: int
    attempts: int
    mean: float
    low: float | None
    high: float | None
    silent: float


@app.command()
def probe(
    pack: Annotated[
        Path,
        typer.Argument(
            help="The folder of a pack, as `etude tasks import` or `etude tasks mutate` makes it: the one that the run will "
            "practise on."
        ),
    ],
    checkpoint: Annotated[
        Path,
        typer.Option(
            help="The checkpoint that tries them (Hugging Face layout + etude.json): best the run's own base."
        ),
    ],
    problems: Annotated[
        int, typer.Option(help="Try so many problems, chosen by a hash of their ids; 0: all.", min=0)
    ] = 160,
    samples: Annotated[int, typer.Option(help="Attempts per problem, at temperature 1.", min=1, max=10_000)] = 8,
    retry: Retry = "fresh",
    out: Annotated[Path, typer.Option(help="Where the solve rates go, by problem.")] = Path("probe.json"),
) -> None:
    """Measure how often a checkpoint solves some of the problems that a run will practise on: the run's first evidence of what is
    hard. Services of its own start for that and end with it; the cores should be free.

    \b
    etude tasks probe .cache/pack --checkpoint etude/data/base
    etude start --pack .cache/pack --probe probe.json

    A run without a probe draws nearly uniformly at first, to learn what is hard; that ends after ten steps.
    With one it ends earlier: after five steps with 160 problems at 8 attempts, at once with 320 at 8. An attempt
    of the probe counts half as much as one of the run, and fades as the policy learns. `etude problem why ID`
    says what the probe said.
    """
    require_machine(Path(tempfile.gettempdir()), "set TMPDIR to another folder")
    raise typer.Exit(run(pack, checkpoint, problems, samples, retry, out))


def run(
    pack: Path,
    checkpoint: Path,
    problems: int,
    samples: int,
    retry: Retries,
    out: Path,
) -> int:
    """Probe, write the file, print the table. Return the exit code: 0, 1 (it failed), 2 (the options cannot be used), 130."""
    from rich.console import Console

    from etude.demo.conduct import Stalled
    from etude.demo.prepare import DemoError, tell
    from etude.demo.watch import say_error
    from etude.evaluate import no_checkpoint, require_servable
    from shared.output import require_writable, write_whole
    from shared.settings import Told
    from shared.weights.checkpoint_objects import NotACheckpoint

    console = Console(stderr=True)
    try:
        if why := no_pack(pack) or no_checkpoint(checkpoint):
            tell(f"tasks probe: {why}")
            return 2
        require_writable(out, "--out")
        require_servable(checkpoint)
        report, tried = _measured(pack, checkpoint, problems, samples, retry, console)
        found = probe_of(report["problems"], str(checkpoint))
        if not found.problems:
            raise DemoError("no attempt came to a verdict; the lines above say why")
        write_whole(out, text(found))
    except (DemoError, Stalled, NotACheckpoint, Told) as error:
        say_error(console, error)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    Console().print(table(rates(found.problems, tried), samples))
    tell(f"{out}: {len(found.problems):,} problems. A run begins with it: `etude start --pack {pack} --probe {out}`")
    return 0


def no_pack(folder: Path) -> str:
    """Return why a path is no folder of a pack; empty: it may be one."""
    if folder.is_dir():
        return ""
    found = "is a file" if folder.exists() else "is not there"
    return f"{folder}: {found}; allowed: the folder of a pack (`etude tasks import FILE --out DIR` makes one of a file)"


def _measured(
    pack: Path,
    checkpoint: Path,
    problems: int,
    samples: int,
    retry: Retries,
    console: Any,
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the evaluator's report and the problems that could be tried. Raises DemoError, Stalled, NotACheckpoint, Told."""
    from etude.demo.prepare import fitting_split, tell, write_split
    from etude.evaluate import measure

    fitting = fitting_split(pack, SPLIT, checkpoint, leave_out=True)
    if fitting.without:
        tell(f"{pack}: {fitting.left_out()}")
    with tempfile.TemporaryDirectory(prefix="etude-probe-") as folder:
        source = write_split(Path(folder), SPLIT, fitting.pairs, pack) if fitting.without else pack
        report = asyncio.run(
            measure(
                checkpoint,
                source,
                SPLIT,
                samples=samples,
                limit=problems,
                console=console,
                retry=retry,
                title="probe",
                greedy=False,
            )
        )
    return report, [problem for problem, _ in fitting.pairs]


def probe_of(rows: Mapping[str, Mapping[str, Any]], checkpoint: str) -> Probe:
    """Make a probe of the rows of an evaluator's report. Problems of which no attempt has a verdict are left out."""
    from shared.contracts.probe import Probe, Tried

    problems = {
        name: Tried(attempts=row["samples"], solved=row["solved"]) for name, row in rows.items() if row["samples"]
    }
    return Probe(checkpoint=checkpoint, problems=problems)


def text(found: Probe) -> str:
    """Return the file: a line for each problem."""
    from shared.output import with_rows

    rows = {name: {"attempts": one.attempts, "solved": one.solved} for name, one in sorted(found.problems.items())}
    return with_rows({"version": found.version, "checkpoint": found.checkpoint}, "problems", rows)


def rates(tried: Mapping[str, Tried], problems: Iterable[Problem]) -> list[list[Rate]]:
    """Return the parts of the table: all problems; by category; by repository, where there are any. Most problems first."""
    known = {problem.id: problem for problem in problems}
    categories, repositories = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for name in sorted(tried):
        categories[known[name].category].append(name)
        if repository := known[name].repository:
            repositories[known[name].cell or repository].append(name)
    parts = [{"all": sorted(tried)}, categories, repositories]
    return [list(_rates(part, tried)) for part in parts if part]


def _rates(groups: Mapping[str, list[str]], tried: Mapping[str, Tried]) -> Iterator[Rate]:
    order = sorted(groups, key=lambda name: (-len(groups[name]), name))
    shown, rest = order[:ROWS], order[ROWS:]
    for name in shown:
        yield _rate(name, [tried[one] for one in groups[name]])
    if rest:
        yield _rate(f"{OTHERS} ({len(rest)})", [tried[one] for name in rest for one in groups[name]])


def _rate(name: str, some: list[Tried]) -> Rate:
    import numpy as np

    from shared.statistics import bootstrap_mean

    mean, low, high = bootstrap_mean(np.array([one.solved / one.attempts for one in some]))
    sure = len(some) > 1
    silent = sum(one.solved in (0, one.attempts) for one in some) / len(some)
    attempts = sum(one.attempts for one in some)
    return Rate(name, len(some), attempts, mean, low if sure else None, high if sure else None, silent)


def table(parts: list[list[Rate]], samples: int) -> Table:
    """Return the rates, a section for each part."""
    from rich.table import Table

    from shared.visible import visible

    made = Table(title=f"solve rates, {samples} attempts per problem", title_justify="left")
    for column in ("", "problems", "attempts", "solved", "95 % interval", "all alike"):
        made.add_column(column, justify="right" if column else "left")
    for part in parts:
        for one in part:
            sure = "–" if one.low is None else f"{one.low:.1%} to {one.high:.1%}"
            cells = (f"{one.problems:,}", f"{one.attempts:,}", f"{one.mean:.1%}", sure, f"{one.silent:.0%}")
            made.add_row(visible(one.name).replace("[", r"\["), *cells)
        made.add_section()
    return made
