"""`etude tasks …`: problems made and looked at by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from services.curator import build, images, mutate, own, sources
from services.curator import check as checking
from services.curator.mutate import SandboxKind
from shared.environments import InfrastructureError
from shared.objects.directory import DirectoryObjects
from shared.output import require_folder, require_writable
from shared.problems import Hidden, Problem, ProblemError
from shared.problems.importing import STORE
from shared.problems.pack import Lines, PackError, export_line, file_name, splits_in
from shared.problems.splits import HELD_OUT, own_splits
from shared.renderers import Renderer
from shared.renderers.registry import UnknownFormat, load_renderer
from shared.sandbox import SandboxUnavailable
from shared.visible import visible

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Make problems from code, and look at them.")
console = Console(stderr=True)
_NO_SPLITS = "none: no *.public.jsonl.zst there"
T = TypeVar("T", Problem, Hidden)


app.command()(mutate.mutate)
app.command()(images.images)


@app.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|SOURCE",
            help="Problems of your own, one JSON object a line (docs/problems.md); or a source, then PATH is read: "
            f"{', '.join(sources.names())}.",
        ),
    ],
    path: Annotated[Path | None, typer.Argument(help="Of a source: its file of rows, or its folder of tasks.")] = None,
    *,
    out: Annotated[Path, typer.Option(help="Directory of the pack; it must not exist yet.")],
    repos: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Of a source: the folder of git clones, bundles or archives."),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Of a source: the file that `etude tasks images --out` wrote; each problem begins with its row's image.",
        ),
    ] = None,
    agent: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="Of a source: the shell command of an agent of others, which works in every problem (docs/agents.md); left out: "
            "the agent is ours.",
        ),
    ] = "",
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
        typer.Option(
            help="The policy whose chat format must fit the problems; left out: functions must fit the one that ships."
        ),
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
    if agent and path is None:
        raise typer.BadParameter(
            "found a file of your own; allowed: with a source. A line names its agent in field 'agent'",
            param_hint="--agent",
        )
    try:
        require_folder(out, "--out")
        found = own.from_source(str(file), path, repos, images, agent) if path else own.from_file(_no_source(file))
        share = HELD_OUT if held_out is None else held_out
        fitting = own.checked(
            path or file,
            found.lines,
            lambda: _format(checkpoint or mutate.shipped()),
            bool(checkpoint),
            sandbox,
            lambda pairs: None if split else _require_both(pairs, share),
        )
    except (ValueError, SandboxUnavailable) as error:  # of the file: ProblemError; of the checkpoint: its format's
        _tell(f"tasks import: {error}")
        raise typer.Exit(2) from None
    if found.rows:
        console.print(found.table(fitting))
        if not fitting.lines:
            raise typer.Exit(1)
    for said in filter(None, (fitting.left_out(), fitting.doubt(), fitting.unproven())):
        _tell(f"{file}: {said}")
    passed = fitting.pairs
    total = f"{len(passed)} of {len(passed) + fitting.without} problems"
    splits: Mapping[str, list[tuple[Any, Any]]] = {split: passed} if split else _require_both(passed, share)
    try:
        build.write_own(out, splits, DirectoryObjects(STORE))
    except OSError as error:
        _tell(f"tasks import: --out {out}: cannot be written: {error.strerror}; give a new directory elsewhere")
        raise typer.Exit(2) from None
    _tell(f"{out}: {total}, " + ", ".join(f"{len(members)} in {name}" for name, members in splits.items()))


def _no_source(file: Path) -> Path:
    """Raises ValueError for the name of a source without its path."""
    if not file.exists() and str(file) in sources.names():
        raise ValueError(
            f"found the source {str(file)!r} without PATH; allowed: its file of rows, or its folder of tasks, behind it"
        )
    return file


def _format(checkpoint: Path) -> Renderer:
    """Raises ValueError."""
    try:
        return load_renderer(checkpoint)
    except UnknownFormat as error:
        raise ValueError(f"--checkpoint {error}") from None


def _require_both(pairs: list[tuple[Any, Any]], share: float) -> dict[str, list[tuple[Any, Any]]]:
    """Return rl and held_out. Says so and exits where one of them gets nothing."""
    splits = own_splits(pairs, share)
    empty = [name for name, members in splits.items() if not members]
    if not empty:
        return splits
    cells = len({problem.cell or problem.id for problem, _ in pairs})
    _tell(
        f"tasks import: nothing is left for {empty[0]}: --held-out {share:g} is the share of the cells that a hash of their names "
        f"picks, relatives together; found {cells} in field 'cell' (left out: the id) of {len(pairs)} problems; allowed: more "
        "of them, another --held-out, or all in one split (--split held_out: to measure on)"
    )
    raise typer.Exit(1)


def _tell(text: str) -> None:
    console.print(visible(text), markup=False, soft_wrap=True)


@app.command()
def check(
    path: Annotated[
        Path, typer.Argument(exists=True, help="Problems, one JSON object a line, or the folder of a pack.")
    ],
    quarantine: Annotated[
        Path | None, typer.Option(help="Write the refused problems and the evidence here, one JSON object a line.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
    sandbox: SandboxKind = "bubblewrap",
) -> None:
    """Grade what each problem's admission asks for: its solution, no change, and cheats, three times where results could differ.
    Exit code 1: a problem is quarantined; 2: none could be checked."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    try:
        if quarantine:
            require_writable(quarantine, "--quarantine")
        pairs = checking.read(path)
        with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
            bar = bars.add_task("problems", total=len(pairs))
            rows = asyncio.run(checking.checked(pairs, sandbox, lambda done: bars.update(bar, completed=done)))
    except KeyError as error:
        _tell(f"tasks check: {path}: problem {error.args[0]!r} has no hidden part; allowed: packs with both parts")
        raise typer.Exit(2) from None
    except (ProblemError, SandboxUnavailable, InfrastructureError, OSError, ValueError) as error:
        _tell(f"tasks check: {error}")
        raise typer.Exit(2) from None
    objects = [dataclasses.asdict(row) for row in rows]
    bad = [row for row in objects if row["outcome"] == "quarantined"]
    if quarantine:
        quarantine.write_text("".join(json.dumps(row) + "\n" for row in bad))
    if as_json:
        print(json.dumps(objects, indent=1))
    else:
        console.print(checking.table(rows))
    if bad:
        raise typer.Exit(1)


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
                print(_plain(_shown(pack, name, public[problem])))
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


def _shown(pack: Path, split: str, problem: Problem) -> str:
    """As a line; without its hidden part where the pack is here without it. Raises KeyError."""
    path = pack / file_name(split, "hidden")
    if path.exists():
        return export_line(problem, _lines(path, Hidden)[problem.id])
    console.print(f"{path}: not here; only the public part is shown", markup=False, soft_wrap=True)
    return msgspec.json.encode(problem).decode()


def _lines(path: Path, kind: type[T]) -> Lines[T]:
    """Raises OSError, and PackError with the name of the file."""
    try:
        return Lines(path.read_bytes(), kind)
    except PackError as error:
        raise PackError(f"{path}: {error}") from None


def _plain(line: str) -> str:
    """The same JSON, with what would steer a terminal or the order of reading as escapes."""
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line)


if __name__ == "__main__":
    app()
