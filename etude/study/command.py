"""The commands below `etude study`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from etude.study.scaling import Level

_LAST = 15  # lines of a command that failed

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Experiments over several trainings: what more pretraining is worth after RL.",
    pretty_exceptions_enable=False,
)


@app.callback()
def group() -> None:
    """Keep `scaling` a command below `study`, although it is the only one."""


@app.command()
def scaling(
    path: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="What the study is told (docs/phases.md).")],
    check: Annotated[
        bool, typer.Option("--check", help="Check the study and all its stages, and train nothing.")
    ] = False,
) -> None:
    """Several amounts of continued pretraining, the same SFT, the same RL: loss after SFT against reward after RL.

    Each level has a folder of its own below `out`, and a platform of its own for RL. The same command goes on after an
    interruption. `out` gets study.json, study.md (the table) and study.png (the picture).

    Example: etude study scaling docs/examples/phases/scaling.toml

    Exit code 1: a stage failed, and the text says which. 2: the configuration cannot be used, and nothing was written.
    """
    from etude.study.checks import require_possible
    from etude.study.config import BadStudy, read
    from etude.study.report import markdown, plot
    from etude.study.scaling import StudyStopped, finished, run
    from shared.output import NotWritable, require_folder, write_whole

    def say(text: str) -> None:
        typer.echo(f"study: {text}", err=True)

    try:
        config = read(path)
        out = Path(config.out)
        require_folder(out, "out")
        if check or not finished(config):
            say("checks its stages")
            require_possible(config, partial(etude, shown=False))
    except (BadStudy, NotWritable) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if check:
        targets = ", ".join(f"{tokens:,}" for tokens in config.levels)
        typer.echo(f"{len(config.levels)} levels of {targets} tokens, {config.rl.minutes:g} minutes of RL each")
        return
    try:
        levels = run(config, etude, say)
        write_whole(out / "study.json", _json(levels))
        write_whole(out / "study.md", markdown(levels))
        plot(levels).savefig(out / "study.png", dpi=110)
    except (StudyStopped, BadStudy, NotWritable, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("study: interrupted; the same command goes on", err=True)
        raise typer.Exit(130) from None
    typer.echo(markdown(levels))
    typer.echo(f"{out}/study.json, study.md, study.png")


def _json(levels: Sequence[Level]) -> str:
    return json.dumps({"levels": [asdict(one) for one in levels]}, indent=2) + "\n"


def etude(words: Sequence[str], state: Path, *, shown: bool = True) -> str:
    """Run one command of `etude` with a folder as its state, and return its standard output. `shown`: its progress goes to this
    terminal. Raises CommandFailed."""
    from etude.study.scaling import CommandFailed

    own = {name: value for name, value in os.environ.items() if not name.startswith("ETUDE_") or name in _KEPT}
    tty = shown and sys.stderr.isatty()  # then progress is drawn on it; else its lines are kept for the error
    process = subprocess.Popen(
        [sys.executable, "-m", "etude.cli", *words],
        env={**own, "ETUDE_STATE": str(state)},
        stdout=subprocess.PIPE,
        stderr=None if tty else subprocess.PIPE,
        text=True,
    )
    last: deque[str] = deque(maxlen=_LAST)
    reader = Thread(target=_keep, args=(process.stderr, last, shown)) if process.stderr is not None else None
    if reader is not None:
        reader.start()
    try:
        stdout = process.stdout.read() if process.stdout is not None else ""
        code = process.wait()
    finally:
        if process.poll() is None:  # Ctrl-C reaches it too: it ends what it began
            process.wait()
    if reader is not None:
        reader.join()
    if code:
        raise CommandFailed(words, state, code, "\n".join([*stdout.strip().splitlines()[-_LAST:], *last]))
    return stdout


def _keep(lines: IO[str], last: deque[str], shown: bool) -> None:
    for line in lines:
        last.append(line.rstrip("\n"))
        if shown:
            typer.echo(line, nl=False, err=True)


_KEPT = ("ETUDE_SANDBOX", "ETUDE_SANDBOX_IMAGE")  # of a machine; stores and servers are the study's own
