"""`etude sandbox base …`: root file systems for the sandboxes that agents live in (docs/sandboxes.md, "Bases")."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from shared import namespaces
from shared import objects as stores
from shared.sandbox import SandboxUnavailable, bases
from shared.sandbox.bases import BaseRefused, Manifest, store
from shared.settings import ServiceSettings, Told, read
from shared.visible import visible

app = typer.Typer(
    no_args_is_help=True, help="Make and look at what sandboxes begin with.", pretty_exceptions_enable=False
)
base = typer.Typer(
    no_args_is_help=True,
    help="Root file systems for sandboxes: an agent sees one as its own machine.\n\nStart here: "
    "`etude sandbox base make py --debian bookworm --python 3.11 --packages git,build-essential`, then name it as "
    "`base:py`. Without Debian's tools: `docker save IMAGE -o image.tar`, then `--from-image image.tar`.",
)
app.add_typer(base, name="base")

State = Annotated[Path, typer.Option("--state", help="Directory for everything local.", envvar="ETUDE_STATE")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Wanted = Annotated[str, typer.Argument(metavar="NAME", help="The name of a base, or its digest.")]
out, told = Console(), Console(stderr=True)
_SHOWN = 12  # digits of a digest in a table


@base.command()
def make(
    name: Annotated[str, typer.Argument(help="Small letters, digits, '.', '_' and '-'. One that exists is replaced.")],
    debian: Annotated[str, typer.Option(help="A suite, as bookworm: made by mmdebstrap.", metavar="SUITE")] = "",
    packages: Annotated[
        str, typer.Option(help="With --debian: packages beside the essential ones, joined by commas.", metavar="A,B")
    ] = "",
    mirror: Annotated[
        str, typer.Option(help="With --debian: where packages come from; left out: Debian's own.", metavar="URL")
    ] = "",
    from_image: Annotated[
        Path | None,
        typer.Option(
            help="A tar of `docker save` or `docker export`, or an OCI layout (folder or tar).", metavar="PATH"
        ),
    ] = None,
    from_folder: Annotated[Path | None, typer.Option(help="A root file system in a folder.", metavar="FOLDER")] = None,
    python: Annotated[
        str,
        typer.Option(
            help="Have this Python, as 3.12: Debian's where the suite has it, else the one of --python-from, else uv's.",
            metavar="3.X",
        ),
    ] = "",
    python_from: Annotated[
        Path | None,
        typer.Option(help="A tar of python-build-standalone, or a folder with bin/python3.X.", metavar="PATH"),
    ] = None,
    state: State = Path(".etude"),
    as_json: Json = False,
) -> None:
    """Make a base, store it under its digest, and let NAME point to it.

    Say where it comes from with one of --debian, --from-image and --from-folder. Devices, sockets, setuid bits, host names and
    keys, logs and apt's lists are left out. Equal files give an equal digest.

    Examples:

      etude sandbox base make py311 --debian bookworm --python 3.11 --packages git,build-essential

      docker save node:22-slim -o node.tar && etude sandbox base make node --from-image node.tar
    """
    from shared.sandbox.bases.make import Source, listed
    from shared.sandbox.bases.make import make as made_of

    source = Source(debian, listed(packages), mirror, from_image, from_folder, python, python_from)
    started = time.monotonic()
    with _refusals("make"):
        settings = read(ServiceSettings, state=state)
        with _bars() as progress:
            made = made_of(stores.connect(settings.objects_url), name, source, settings.state / "cache", progress)
    seconds = time.monotonic() - started
    if as_json:
        facts = {"replaced": made.replaced, "left_out": made.left_out, "seconds": round(seconds, 1)}
        _print_json({**_facts(name, made.manifest), **facts})
        return
    out.print(f"base:{name} is {made.manifest.digest}", highlight=False, soft_wrap=True)
    out.print(f"{_size(made.manifest)}, {made.manifest.machine}, in {seconds:.0f} s", highlight=False)
    if made.replaced == made.manifest.digest:
        out.print("It is what it was: the same files.")
    elif made.replaced:
        out.print(f"Before, the name was {made.replaced}, which is still there.", highlight=False, soft_wrap=True)
    if made.left_out:
        path, why = next(iter(made.left_out.items()))
        first = f"{visible(path)!r:.100} {why}"
        out.print(
            f"Left out: {len(made.left_out)} (--json lists them); the first: {first}", markup=False, soft_wrap=True
        )


@base.command("list")
def list_(state: State = Path(".etude"), as_json: Json = False) -> None:
    """List the bases of the object store. `here`: this machine has it unpacked."""
    with _refusals("list"):
        settings = read(ServiceSettings, state=state)
        found = list(store.every(stores.connect(settings.objects_url)))
        here = {one.manifest.digest for one in bases.kept(settings.state / "cache")}
    if as_json:
        _print_json([_facts(name, one, here) for name, one in found])
        return
    if not found:
        told.print(f"No base yet; {store.MAKE} NAME --debian bookworm.")
        return
    table = Table("name", "digest", "machine", "size", "made", "here")
    for name, one in found:
        if isinstance(one, BaseRefused):
            table.add_row(escape(name[:40]), "", "", "", escape(f"damaged: {visible(str(one))}"), "")
            continue
        shown = "(none)" if store.is_digest(name) else name
        how = visible(" ".join(f"{option}={value}" for option, value in one.made.items()))
        digest = one.digest[:_SHOWN]
        table.add_row(shown, digest, escape(one.machine), _size(one), escape(how), "yes" if one.digest in here else "")
    out.print(table)


@base.command()
def show(name: Wanted, state: State = Path(".etude"), as_json: Json = False) -> None:
    """Print what is known of a base: digest, machine type, size, how and when it was made, its variables."""
    with _refusals("show"):
        settings = read(ServiceSettings, state=state)
        manifest = store.find(stores.connect(settings.objects_url), name)
        here = {one.manifest.digest for one in bases.kept(settings.state / "cache")}
    facts = _facts(name, manifest, here)
    if as_json:
        _print_json(facts)
        return
    for field, value in facts.items():
        lines = [f"{key}={of}" for key, of in value.items()] if isinstance(value, dict) else [str(value)]
        for line in lines:
            out.print(f"{field:<12}{visible(line)}", markup=False, highlight=False, soft_wrap=True)


@base.command()
def remove(
    name: Wanted,
    state: State = Path(".etude"),
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove a name, and its base unless another name points to it. Machines that have it unpacked keep it until they need room.
    What refers to it by digest (problems, recorded attempts) can no longer be run."""
    with _refusals("remove"):
        objects = stores.connect(read(ServiceSettings, state=state).objects_url)
        digest = store.resolve(objects, name)
        if not yes and not typer.confirm(f"Remove {name} ({digest[:_SHOWN]}…)?", err=True):
            raise typer.Exit(1)
        digest, gone = store.remove(objects, name)
    if as_json:
        _print_json({"name": name, "digest": digest, "removed": gone})
    else:
        out.print(
            f"{name}: {'removed' if gone else 'the name alone: another one points to the same base'}", highlight=False
        )


@base.command()
def unpack(name: Wanted, state: State = Path(".etude"), as_json: Json = False) -> None:
    """Unpack a base on this machine now, so that its first sandbox need not wait, and print the folder."""
    with _refusals("unpack"):
        settings = read(ServiceSettings, state=state)
        objects, most_bytes = stores.connect(settings.objects_url), int(settings.sandbox_bases_gb * 1e9)
        with told.status("unpacking"):
            root = bases.opened(objects, settings.state / "cache", f"base:{name}", most_bytes=most_bytes)
    if as_json:
        _print_json({"name": name, "digest": root.parent.name, "folder": str(root)})
    else:
        typer.echo(root)


def _facts(name: str, found: Manifest | BaseRefused, here: set[str] | None = None) -> dict[str, Any]:
    if isinstance(found, BaseRefused):
        return {"name": name, "damaged": str(found)}
    facts: dict[str, Any] = {**msgspec.to_builtins(found), "name": None if store.is_digest(name) else name}
    return facts if here is None else {**facts, "here": found.digest in here}


def _size(manifest: Manifest) -> str:
    return f"{manifest.size / 1e6:,.0f} MB ({manifest.archive.size / 1e6:,.0f} MB packed), {manifest.files:,} files"


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


@contextlib.contextmanager
def _refusals(command: str) -> Iterator[None]:
    """Print what a person must know, and end with code 2."""
    try:
        yield
    except (BaseRefused, SandboxUnavailable, Told, OSError) as error:
        way_out = namespaces.hint(str(error)) if isinstance(error, OSError) else ""
        text = f"{error}; {way_out}" if way_out else str(error)
        told.print(f"sandbox base {command}: {visible(text)}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


@contextlib.contextmanager
def _bars() -> Iterator[Any]:
    """Give a function that shows how far each part of the work is. Without a terminal it shows nothing."""
    columns = (TextColumn("{task.description:<40.40}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=told, disable=not told.is_terminal) as bars:
        known: dict[str, TaskID] = {}

        def progress(what: str, done: int, of: int) -> None:
            part = what.partition(":")[0]  # `mmdebstrap: extracting archives`: the rest says where that part is
            if part not in known:
                known[part] = bars.add_task("", total=of or 1)
            bars.update(known[part], description=escape(visible(what)), completed=done if of else 1, total=of or 1)

        yield progress
