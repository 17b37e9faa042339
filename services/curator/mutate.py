"""`etude tasks mutate`: problems made of code, with hidden tests of their own."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import shared
from services.curator import build
from services.curator.sources import python as makers
from services.curator.sources.python.contamination import Evaluations
from services.curator.sources.python.making import SAMPLE, Made
from services.curator.sources.python.opened import made as make
from services.curator.sources.python.project import UNKNOWN, Project, read_project
from shared.environments import InfrastructureError
from shared.objects.directory import DirectoryObjects
from shared.output import require_folder
from shared.problems import ProblemError
from shared.problems.importing import STORE
from shared.sandbox import SandboxUnavailable
from shared.visible import visible

FUNCTIONS = "functions"
REJECTED = "rejected.jsonl"  # in the folder of a pack: one candidate a line, with its reason
console = Console(stderr=True)

SandboxKind = Annotated[
    str, typer.Option(envvar="ETUDE_SANDBOX", help="bubblewrap, or process for code that you trust.")
]
OF_FUNCTIONS, OF_PROJECTS = "Of functions", "Of repository problems"


def mutate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="[PATH|PACKAGE]",
            help="A Python project with tests: a folder, a source archive, a git repository, or the name of an installed "
            "distribution. Left out: functions of the standard library and of all installed distributions.",
        ),
    ] = "",
    *,
    out: Annotated[Path, typer.Option(help="Directory of the pack; made or replaced as a whole.")],
    kind: Annotated[
        str,
        typer.Option(
            help="mutations: bugs that the project's tests notice. deletions: a tested feature is taken out. commits: changes of "
            "the git history. functions: repair of single functions. Left out: mutations of a project, else functions."
        ),
    ] = "",
    sandbox: SandboxKind = "bubblewrap",
    most: Annotated[
        int, typer.Option(min=0, help="Stop after so many problems; 0: take all.", rich_help_panel=OF_PROJECTS)
    ] = 200,
    split: Annotated[
        str,
        typer.Option(
            help="train, rl, dev or held_out. All problems of a project go into one: each shows the code that another hides.",
            rich_help_panel=OF_PROJECTS,
        ),
    ] = "rl",
    tests: Annotated[
        list[str] | None,
        typer.Option(
            help="File or folder of tests to use; may be repeated. Left out: all.", rich_help_panel=OF_PROJECTS
        ),
    ] = None,
    libraries: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="What the tests import: a folder that `pip install --target FOLDER NAMES` made.",
            rich_help_panel=OF_PROJECTS,
        ),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            help="Evaluation set: a pack, a file of problems, or rows of the SWE-bench family; may be repeated. Problems that "
            "share code with one are dropped.",
            rich_help_panel=OF_PROJECTS,
        ),
    ] = None,
    gate: Annotated[
        str,
        typer.Option(
            help=f"short: the solution and no change, once each, for every mutation; cheats and repeats for one in {SAMPLE}. "
            "whole: everything for every problem. Deletions and commits always get the whole gate.",
            rich_help_panel=OF_PROJECTS,
        ),
    ] = "short",
    processes: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that work at a time.", rich_help_panel=OF_FUNCTIONS)
    ] = 2,
    exclude_signatures: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Functions that the base policy was trained on; they leave rl, dev and held_out. Default: those that "
            "ship with the base policy.",
            rich_help_panel=OF_FUNCTIONS,
        ),
    ] = None,
    include_seen: Annotated[
        bool,
        typer.Option(help="Keep functions that the base policy was trained on.", rich_help_panel=OF_FUNCTIONS),
    ] = False,
    also: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Distributions beside the installed ones (make corpus).",
            rich_help_panel=OF_FUNCTIONS,
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Read so many files only; 0: all.", rich_help_panel=OF_FUNCTIONS)
    ] = 0,
) -> None:
    """Make problems of code: bugs to repair, features to write, commits to repeat. Their tests decide; all code runs in sandboxes.

    The pack holds the problems and rejected.jsonl, the reason for every candidate that makes none.

    Examples:

      etude tasks mutate --out .cache/pack

      etude tasks mutate toolz-1.0.0.tar.gz --out toolz-bugs

      etude tasks mutate ./my-project --kind deletions --against held-out-pack --out features

      etude tasks mutate ./my-project --kind functions --out functions
    """
    kind = kind or ("mutations" if source else FUNCTIONS)
    try:
        if kind == FUNCTIONS:
            _functions(source, out, sandbox, processes, exclude_signatures, include_seen, also, limit)
        else:
            maker = makers.named(kind) if kind in makers.names() else None
            _require(kind, maker is not None, source, out, split, gate)
            assert maker is not None
            require_folder(out, "--out")
            project = read_project(source, tests or (), libraries)
            _project(maker, project, out, sandbox, most, split, tuple(against or ()), gate == "whole")
    except BrokenProcessPool:
        _tell("tasks mutate: a worker process was killed, probably for memory: try --processes 1")
        raise typer.Exit(2) from None
    except KeyError as error:
        _tell(f"tasks mutate: --against: problem {error.args[0]!r} has no hidden part; allowed: packs with both parts")
        raise typer.Exit(2) from None
    except (SandboxUnavailable, InfrastructureError, ProblemError, ValueError, OSError) as error:
        _tell(f"tasks mutate: {error}")
        raise typer.Exit(2) from None


def _require(kind: str, known: bool, source: str, out: Path, split: str, gate: str) -> None:
    """Raise ValueError for options that cannot be."""
    if not known:
        raise ValueError(f"--kind: found {kind!r:.60}; allowed: {', '.join([*makers.names(), FUNCTIONS])}")
    if not source:
        raise ValueError(f"--kind {kind}: found no PATH|PACKAGE; allowed: a Python project with tests")
    if split not in ("train", "rl", "dev", "held_out"):
        raise ValueError(f"--split: found {split!r:.60}; allowed: train, rl, dev, held_out")
    if gate not in ("short", "whole"):
        raise ValueError(f"--gate: found {gate!r:.60}; allowed: short, whole")
    if out.exists():
        raise ValueError(f"--out: {out} exists; allowed: a new directory")


def _project(
    maker: makers.Source,
    project: Project,
    out: Path,
    sandbox: str,
    most: int,
    split: str,
    against: tuple[Path, ...],
    whole: bool,
) -> None:
    """Make a pack of one project. Raises what `make` raises, and typer.Exit where there is no problem."""
    notes: list[str] = []
    _tell(
        f"{project.label}: {len(project.sources)} modules, {len(project.tests)} files of tests, licence {project.licence}"
        + (": look whether you may train on it" if project.licence == UNKNOWN else "")
    )
    with _bar(most) as progress:
        found, evaluations = asyncio.run(
            make(
                maker,
                project,
                sandbox=sandbox,
                against=against,
                most=most,
                whole=whole,
                progress=progress,
                notes=notes,
            )
        )
    for note in notes:
        _tell(f"{project.label}: {note}")
    if found.rejected:
        console.print(_reasons(found))
    if not found.pairs:
        _tell(
            f"tasks mutate: {project.label}: none of {found.candidates} candidates makes a problem; nothing is written"
        )
        raise typer.Exit(1)
    rows = [{"place": one.place, "reason": one.reason} for one in found.rejected]
    facts = {
        "source": {
            "kind": maker.kind,
            "project": project.name,
            "version": project.version,
            "licence": project.licence,
            "candidates": found.candidates,
            "admitted": len(found.pairs),
            "rejected": dict(found.reasons.most_common()),
            "gates": {
                "whole (solution, no change, cheats, repeats)": found.gates["whole"],
                "short (solution and no change, once)": found.gates["short"],
            },
            "contamination": evaluations.report(),
            "notes": notes,
        }
    }
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    build.write_own(out, {split: found.pairs}, DirectoryObjects(STORE), {REJECTED: lines}, facts)
    _tell(_ending(out, split, found, evaluations))


def _ending(out: Path, split: str, found: Made, evaluations: Evaluations) -> str:
    against = f"; {evaluations.dropped} dropped for evaluation sets" if evaluations.sets else ""
    return (
        f"{out}: {len(found.pairs)} problems in {split}, of {found.candidates} candidates "
        f"({100 * len(found.pairs) / found.candidates:.0f} %), in {found.seconds:.0f} s. Gate: {found.gates['whole']} whole, "
        f"{found.gates['short']} short{against}. Reasons of the others: {out / REJECTED}"
    )


@contextmanager
def _bar(most: int) -> Iterator[Callable[[Made], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("running the tests as they are", total=None, said="")

        def progress(found: Made) -> None:
            said = f"{len(found.pairs)} admitted, {len(found.rejected)} rejected"
            bars.update(bar, description="problems", completed=len(found.pairs), total=most or None, said=said)

        yield progress


def _reasons(found: Made) -> Table:
    table = Table("rejected because", "candidates", "for example")
    for reason, count in found.reasons.most_common():
        example = next(one for one in found.rejected if one.reason.partition(":")[0] == reason)
        said = example.reason.partition(":")[2].strip()
        table.add_row(visible(reason), str(count), visible(f"{example.place}{f': {said}' if said else ''}"[:200]))
    return table


def _functions(
    source: str,
    out: Path,
    sandbox: str,
    processes: int,
    exclude_signatures: Path | None,
    include_seen: bool,
    also: Path | None,
    limit: int,
) -> None:
    """Make a pack of functions. Raises BrokenProcessPool, SandboxUnavailable, ValueError, OSError."""
    if also and not any(importlib.metadata.distributions(path=[str(also)])):
        raise typer.BadParameter(
            f"{also}: found no distribution (NAME.dist-info); allowed: a folder that `pip install --target` made. For plain source "
            "code: `etude tasks mutate FOLDER --kind functions`",
            param_hint="--also",
        )
    if source and not Path(source).is_dir():
        raise ValueError(f"--kind functions: found {source!r:.80}; allowed: a folder of Python code, or nothing")
    started = time.monotonic()
    columns = (TextColumn("{task.description:<40}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
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
            folder=Path(source) if source else None,
            limit=limit,
            progress=progress,
        )
    console.print(_summary(manifest))
    _tell(f"{out}: {time.monotonic() - started:.0f} s")


def shipped() -> Path:
    """Return the base policy that is part of the package."""
    return Path(shared.__file__).resolve().parent.parent / "etude" / "data" / "base"


def _shipped_signatures() -> Path | None:
    """None where no base policy is part of the package yet. Raises FileNotFoundError where its signatures alone are left out."""
    path = shipped() / "signatures.npz"
    if path.is_file():
        return path
    if (path.parent / "config.json").is_file():
        raise FileNotFoundError(
            f"{path}: missing, so nobody knows what the base policy has seen; the image light goes without it: use worker or demo, "
            "or --exclude-signatures FILE, or --include-seen"
        )
    return None


def _summary(manifest: dict[str, Any]) -> Table:
    table = Table("split", "problems", "functions", "kinds")
    for split, counts in manifest["splits"].items():
        table.add_row(split, str(counts["problems"]), str(counts["functions"]), str(len(counts["kinds"])))
    table.add_row("pretrain", "", str(manifest["functions"]["pretrain"]), "")
    return table


def _tell(text: str) -> None:
    console.print(visible(text), markup=False, soft_wrap=True)
