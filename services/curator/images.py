"""`etude tasks images`: the images that tasks need, built in a Docker engine from their Dockerfiles."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from services.curator.recipes import recipes
from shared.problems import ProblemError
from shared.sandbox import SandboxUnavailable
from shared.sandbox.containers import building, engine
from shared.sandbox.containers.building import BuildRefused, Recipe
from shared.visible import visible

console = Console(stderr=True)


def images(
    path: Annotated[
        Path,
        typer.Argument(
            exists=True,
            help="A Harbor task, a folder of such tasks, or a file of rows (SWE-bench, SWE-Gym, R2E-Gym, …).",
        ),
    ],
    dockerfiles: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="For rows: a folder with INSTANCE_ID/Dockerfile for each."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write {task: image} as JSON to this file.", dir_okay=False)] = None,
    only: Annotated[str, typer.Option(help="Only tasks whose name contains this.")] = "",
    pull: Annotated[bool, typer.Option("--pull", help="Let the engine fetch images that it does not have.")] = False,
    network: Annotated[
        Literal["default", "host", "none"],
        typer.Option(help="What RUN reaches during a build; attempts never have any."),
    ] = "default",
    minutes: Annotated[float, typer.Option(min=0.1, help="End a build that takes longer.")] = 60.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what each task needs, and build nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a task.")] = False,
) -> None:
    """Build the image of every task in the Docker engine, and print the name under which a sandbox opens it.

    A Harbor task has environment/Dockerfile, or names an image (environment.docker_image). A row has a field `dockerfile`, a
    Dockerfile in --dockerfiles, or names an image (`image_name`, `docker_image`).

    Equal contents are built once: an image is called etude-task:DIGEST after its Dockerfile, its files and the images that it
    begins with. Running the command again builds what has changed and nothing else. It ends with code 1 where a task has no image.

    The commands of a Dockerfile run as root in a container of the engine, with its network: build only what you trust so far. The
    engine is the one of DOCKER_HOST, else the usual socket.

    Examples:

      etude tasks images ./terminal-bench --dry-run

      etude tasks images ./terminal-bench --out images.json

      etude tasks images rows.jsonl --dockerfiles ./dockerfiles --only django --pull
    """
    done: dict[str, str] = {}
    failed = 0
    try:
        listed = [(name, one) for name, one in recipes(path, dockerfiles) if only in name]
        if not listed:
            raise ProblemError(f"{path}: found no task whose name contains {only!r}; leave out --only")
        with contextlib.closing(engine.connect()) if not dry_run else contextlib.nullcontext() as found:
            for name, recipe in listed:
                started = time.monotonic()
                try:
                    state, image = _one(found, name, recipe, pull, network, minutes)
                except BuildRefused as error:
                    state, image, failed = f"failed: {error}", "", failed + 1
                if image:
                    done[name] = image
                _tell(name, state, image, time.monotonic() - started, as_json)
        if out is not None:
            out.write_text(json.dumps(done, indent=2) + "\n")
    except (ProblemError, SandboxUnavailable, OSError) as error:
        console.print(f"tasks images: {visible(str(error))}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if not as_json:
        console.print(f"{len(listed)} tasks, {len(done)} with an image, {failed} without", highlight=False)
    raise typer.Exit(1 if failed else 0)


def _one(
    found: engine.Engine | None, name: str, recipe: Recipe | str, pull: bool, network: str, minutes: float
) -> tuple[str, str]:
    """Return what became of a task, and its image. Raises BuildRefused, SandboxUnavailable, OSError."""
    if isinstance(recipe, str):
        raise BuildRefused(recipe)
    if found is None:
        needs = [recipe.image] if recipe.image else [image for _, image in building.starts(recipe.dockerfile)]
        return f"{'uses' if recipe.image else 'is built from'} {', '.join(needs) or 'scratch'}", ""
    with console.status(f"{escape(visible(name))}: looking") as status:

        def progress(line: str) -> None:
            status.update(f"{escape(visible(name))}: {escape(visible(line))[:120]}")

        made = building.build(found, recipe, progress, pull=pull, network=network, seconds=minutes * 60)
    return "built" if made.new else "there already", made.image


def _tell(name: str, state: str, image: str, seconds: float, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"task": name, "state": state, "image": image or None, "seconds": round(seconds, 1)}))
    else:
        typer.echo(visible(f"{name}: {image + ' ' if image else ''}{state}"))
