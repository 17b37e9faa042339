"""The command line of `etude figures`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from etude.commands import State

RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's id; left out: the only one there is.")]
Target = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="TARGET",
        help="tensorboard:DIR, wandb:PROJECT, wandb:ENTITY/PROJECT, mlflow:URI or jsonl:FILE.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command()(figures)


def figures(
    to: Target,
    run: RunName = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run is finished; Ctrl-C ends it too.")
    ] = False,
    state: State = Path(".etude"),
) -> None:
    """Write a run's curves to TensorBoard, Weights & Biases, MLflow, or a file: every figure of every step, evaluations,
    changes of state. Called again it adds what is new (docs/figures.md).

    \b
    etude figures --to tensorboard:curves --follow
    etude figures RUN --to jsonl:figures.jsonl
    """
    from etude.figures.export import export
    from shared.settings import ServiceSettings, Told, read

    try:
        asyncio.run(export(read(ServiceSettings, state=state), run, to, follow=follow, say=_say))
    except (Told, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("What was written stays; called again it goes on.", err=True)
        raise typer.Exit(0 if follow else 130) from None


def _say(text: str) -> None:
    typer.echo(text)
