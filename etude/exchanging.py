"""`etude export` and `etude import`: policies as Hugging Face directories."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.commands import State

if TYPE_CHECKING:
    from shared.objects import Objects


def register(app: typer.Typer) -> None:
    app.command(name="export")(export_policy)
    app.command(name="import")(import_checkpoint)


def export_policy(
    source: Annotated[
        str,
        typer.Argument(
            help="A run, RUN@VERSION, RUN@best, an imported checkpoint (checkpoints/NAME), or a checkpoint directory."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where the Hugging Face directory goes; it must not hold anything yet.")],
    version: Annotated[
        str,
        typer.Option(
            metavar="N|best",
            help="Which version of the run; best: as `etude measure --best` says; the newest if left out.",
            show_default=False,
        ),
    ] = "",
    state: State = Path(".etude"),
) -> None:
    """Write a policy as a Hugging Face directory, bit for bit as it was published."""
    from etude import exchange

    with _told():
        if version and (Path(source).is_dir() or source.startswith(f"{exchange.STORED}/")):
            raise exchange.NotExchanged(
                f"--version {version}: {source} is no run; allowed: without it, or a run's version"
            )
        if Path(source).is_dir():
            typer.echo(f"{exchange.export_directory(Path(source), out)}: written from {source}")
            return
        objects = _objects(state)
        if source.startswith(f"{exchange.STORED}/"):
            typer.echo(f"{exchange.export_stored(objects, source, out)}: written from {source}")
            return
        run, at, number = source.partition("@")
        if at and (version or not number):
            raise exchange.NotExchanged(f"found {source!r} and --version {version!r}; allowed: one of them")
        from etude.best import named

        done = exchange.export_run(objects, run, out, named(objects, run, number or version, typer.echo))
        typer.echo(f"{out}: version {done.serial} (step {done.step}) of {done.run}, {done.tensors} tensors")


def import_checkpoint(
    source: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face directory (config.json, safetensors, tokenizer.json) or a GGUF file.",
            metavar="DIR|FILE.gguf",
        ),
    ],
    name: Annotated[str, typer.Option(help="Its name in the store; that of the directory or file if left out.")] = "",
    chat: Annotated[
        str, typer.Option("--format", help="Its chat format, where it has no etude.json and its tokens do not show it.")
    ] = "",
    context: Annotated[int, typer.Option(help="Tokens of a context; 0: as many as it has positions.", min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a checkpoint directory here and store nothing; it must not hold anything yet."),
    ] = None,
    state: State = Path(".etude"),
) -> None:
    """Check a checkpoint (a Hugging Face directory or a GGUF file) and store it as a base policy that runs can start from."""
    from etude import exchange

    with _told():
        if out is not None:
            parameters, notes = exchange.import_to(source, out, chat=chat, context=context)
            said = f"{out}: {parameters:,} parameters from {source}"
        else:
            done = exchange.import_checkpoint(_objects(state), source, name=name, chat=chat, context=context)
            was = "stored" if done.new else "was stored before"
            parameters, notes = done.parameters, done.notes
            said = f"{exchange.STORED}/{done.name} {was}: {parameters:,} parameters. etude start --base {done.name}"
        for note in notes:
            typer.echo(f"Note: {note}.", err=True)
        typer.echo(said)


def _objects(state: Path) -> Objects:
    from shared import objects as stores
    from shared.settings import ServiceSettings, read

    return stores.connect(read(ServiceSettings, state=state).objects_url)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Errors that say all that a person needs end the command with code 1 and nothing else."""
    from shared.objects import ObjectDamaged
    from shared.settings import Told

    try:
        yield
    except (Told, ObjectDamaged, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
