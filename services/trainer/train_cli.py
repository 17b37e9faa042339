"""`etude train …`: phases of training, and a step of the trainer looked at again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.trainer.phases.cli import register
from shared import objects as stores
from shared import weights
from shared.contracts.ids import policy_prefix
from shared.contracts.run import RunConfig
from shared.objects import ObjectMissing, Objects
from shared.settings import ServiceSettings, load

if TYPE_CHECKING:
    from services.trainer.replay_step import Part
    from services.trainer.skipped import Batch, Header
    from shared.model import Transformer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Train a checkpoint on data: pretraining, long context, SFT, MTP. Look at RL's steps.",
    pretty_exceptions_enable=False,
)
register(app)


@app.command("replay-step")
def replay_step(
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="A file, or the object's key that the alert names.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, the whole batch last.")] = False,
    state: Annotated[
        Path, typer.Option("--state", help="Directory for everything local.", envvar="ETUDE_STATE")
    ] = Path(".etude"),
) -> None:
    """Compute the gradient of a skipped step again, group by group. Nothing is trained.

    After three skipped steps in a row a run pauses (alert steps_skipped), and the trainer keeps the last batch. This command
    says which of its groups, and which of the policy's tensors, have a gradient that is not finite or unusually large. It
    reads the policy's version and the run's base from the object store.

    Example: etude train replay-step runs/RUN/checkpoints/skipped/0001-00000042

    Exit code 0: every gradient is finite; 1: one is not; 2: the batch or its version cannot be read.
    """
    from services.trainer.replay_step import replay
    from services.trainer.skipped import unpack

    settings = load(ServiceSettings, []).model_copy(update={"state": state})
    objects = stores.connect(settings.objects_url)
    try:
        found = unpack(_read(objects, batch))
        model, reference = _policies(objects, found.header, settings.state / "trainer" / "base")
    except (ValueError, OSError, ObjectMissing, weights.WeightsError) as error:
        typer.echo(f"{batch}: {error}", err=True)
        raise typer.Exit(2) from None
    parts = []
    for part in replay(model, found, reference):
        parts.append(part)
        if as_json:
            print(json.dumps(_plain(part)))
    if not as_json:
        _show(found, parts)
    raise typer.Exit(0 if all(math.isfinite(part.grad_norm) for part in parts) else 1)


def _read(objects: Objects, batch: str) -> bytes:
    path = Path(batch)
    if path.is_file():
        return path.read_bytes()
    try:
        return objects.get(objects.head(batch))
    except ObjectMissing:
        raise ValueError(
            "found neither a file nor an object of this name; the alert steps_skipped names the key"
        ) from None


def _policies(objects: Objects, header: Header, cache: Path) -> tuple[Transformer, Transformer | None]:
    """Return the version that the step began from, and the base policy if the step has a KL penalty."""
    import msgspec
    import torch

    from services.trainer.masters import load_published
    from shared.model import load_checkpoint
    from shared.weights.checkpoint_objects import download_directory

    config = msgspec.json.decode(objects.get(objects.head(f"runs/{header.run}/config.json")), type=RunConfig)
    manifest = objects.head(f"{policy_prefix(header.run, header.serial)}/manifest.json")
    tensors = weights.rebuild(objects, manifest)
    directory = download_directory(objects, config.base, cache / config.base.checksum)
    model = load_checkpoint(directory, dtype=torch.float32)
    load_published(model, tensors)
    reference = load_checkpoint(directory, dtype=torch.float32) if header.train.kl > 0 else None
    return model, reference


def _plain(part: Part) -> dict[str, Any]:
    """Return what JSON can hold: a number that is not finite becomes null."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "group": part.name or None,
        "sequences": part.sequences,
        "tokens": part.tokens,
        "grad_norm": number(part.grad_norm),
        "log_ratio_max": number(part.log_ratio),
        "largest": [{"tensor": name, "norm": number(norm)} for name, norm in part.largest],
    }


def _show(batch: Batch, parts: list[Part]) -> None:
    header, console = batch.header, Console()
    then = "not finite" if header.grad_norm is None else f"{header.grad_norm:.4g}"
    limit = f", allowed: {header.limit:.4g}" if header.limit else ""
    console.print(
        escape(
            f"run {header.run}, step {header.step}, from version {header.serial}: the gradient's norm was {then}{limit}"
        )
    )
    table = Table("group", "sequences", "sampled tokens", "gradient norm", "largest |log ratio|", "largest tensor")
    for part in parts:
        if not part.name:
            table.add_section()
        name, norm = part.largest[0] if part.largest else ("-", math.nan)
        table.add_row(
            escape(part.name or "all together"),
            str(part.sequences),
            str(part.tokens),
            f"{part.grad_norm:.4g}",
            f"{part.log_ratio:.4g}",
            f"{name} ({norm:.4g})",
        )
    console.print(table)
