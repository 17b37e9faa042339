"""`etude base …`, and `python -m services.trainer.base …`."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from shared.options import finite
from shared.output import require_writable, write_whole

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Make the base policy: pretraining, SFT, MTP self-distillation.",
)
DATA = Path(__file__).resolve().parents[3] / "etude" / "data" / "base"

Pack = Annotated[Path, typer.Option(help="A pack directory, made by `etude tasks mutate --out DIR`.")]
Seed = Annotated[int, typer.Option(help="Seed of data and training.", min=0, max=2**63 - 1)]
Processes = Annotated[int, typer.Option(help="Training processes of one thread each.", min=1, max=64)]
SandboxKind = Annotated[str, typer.Option(envvar="ETUDE_SANDBOX", help="bubblewrap, or process for trusted code.")]


@app.command()
def make(
    pack: Pack = Path(".cache/pack"),
    work: Annotated[Path, typer.Option(help="Streams, phases and losses; an interrupted run goes on there.")] = Path(
        ".cache/base/make"
    ),
    out: Annotated[
        Path, typer.Option(help="Where the finished checkpoint goes.", show_default="replaces the one that is shipped")
    ] = DATA,
    minutes: Annotated[
        float, typer.Option(help="Minutes of training, all phases together.", min=0.1, callback=finite)
    ] = 62.0,
    seed: Seed = 1,
    processes: Processes = 2,
    sandbox: SandboxKind = "bubblewrap",
) -> None:
    """The whole recipe: a tokenizer, the streams, three phases, a checkpoint with card, curves and signatures."""
    from services.trainer.base import recipe

    _plain_errors(lambda: recipe.make(pack, work, out, minutes, seed, processes, sandbox))
    typer.echo(f"{out}: finished")


@app.command()
def sft(
    start: Annotated[Path, typer.Option("--from", help="The checkpoint to go on from.")],
    out: Annotated[Path, typer.Option(help="Where the checkpoint goes; it must not hold anything yet.")],
    pack: Pack = Path(".cache/pack"),
    minutes: Annotated[float, typer.Option(help="Minutes of training.", min=0.01, callback=finite)] = 10.0,
    work: Annotated[Path | None, typer.Option(help="Streams and losses; a temporary directory unless named.")] = None,
    seed: Seed = 2,
    processes: Processes = 2,
    sandbox: SandboxKind = "bubblewrap",
) -> None:
    """More SFT from a checkpoint: the control that RL is compared with."""
    from services.trainer.base import recipe

    with tempfile.TemporaryDirectory() as temporary:
        place = work or Path(temporary)
        _plain_errors(lambda: recipe.more_sft(start, pack, out, place, minutes, seed, processes, sandbox))
    typer.echo(f"{out}: finished")


@app.command()
def probe(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint directory.", show_default="the shipped one")] = DATA,
    pack: Pack = Path(".cache/pack"),
    split: Annotated[str, typer.Option(help="dev, rl or train.")] = "dev",
    count: Annotated[int, typer.Option(help="Problems.", min=1)] = 256,
    samples: Annotated[int, typer.Option(help="Attempts per problem.", min=1)] = 4,
    temperature: Annotated[float, typer.Option(min=0.0, callback=finite)] = 1.0,
    seed: Seed = 1,
    kinds: Annotated[bool, typer.Option("--kinds", help="Success by kind of bug.")] = False,
    sandbox: SandboxKind = "bubblewrap",
    json_out: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Development figures: pass@1, first edits, testing and retrying. Held-out problems are refused."""
    from services.trainer.base.probe import probe as measure

    def work() -> None:
        by_kind: dict[str, list[float]] | None = {} if kinds else None
        if json_out:
            require_writable(json_out, "--json")
        figures = measure(
            checkpoint, pack, split=split, count=count, samples=samples, seed=seed, temperature=temperature,
            sandbox=sandbox, kinds=by_kind,
        )  # fmt: skip
        text = json.dumps(dataclasses.asdict(figures), indent=2)
        typer.echo(text)
        if json_out:
            write_whole(json_out, text + "\n")
        for kind, successes in sorted((by_kind or {}).items()):
            typer.echo(f"{kind:<14} {sum(successes) / len(successes):.3f} of {len(successes)}")

    _plain_errors(work)


@app.command()
def leaks(
    pack: Pack = Path(".cache/pack"),
    work: Annotated[
        Path,
        typer.Option(help="Where `make` worked; where it did not, the shipped signatures of its functions are read."),
    ] = Path(".cache/base/make"),
    json_out: Annotated[Path | None, typer.Option("--json", help="Where the report goes.")] = None,
) -> None:
    """No function of the RL, dev or held-out split is in any training stream. Exit code 1 if one is."""
    from services.trainer.base import leak

    streams, report = work / "streams", None

    def look() -> None:
        nonlocal report
        if json_out:
            require_writable(json_out, "--json")
        known = (streams / leak.SOURCES).is_file()
        report = leak.of_streams(pack, streams) if known else leak.of_signatures(pack, DATA / "signatures.npz")

    _plain_errors(look)
    assert report
    typer.echo(report.to_json())
    if json_out:
        write_whole(json_out, report.to_json() + "\n")
    raise typer.Exit(0 if report.clean else 1)


@app.command()
def surprise(
    out: Annotated[Path, typer.Option(help="Where the figures go: JSON, problem id -> nats.")],
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint directory.", show_default="the shipped one")] = DATA,
    pack: Pack = Path(".cache/pack"),
    split: Annotated[str, typer.Option(help="rl, dev or train.")] = "rl",
    threads: Annotated[int, typer.Option(help="Threads to compute with.", min=1, max=64)] = 2,
) -> None:
    """How surprising the reference repairs are to a policy: the scheduler's first guess at what is hard."""
    import torch
    from rich.progress import Progress

    from services.trainer.base.surprise import of_pack

    def work() -> None:
        typer.echo(
            "A first guess of how hard each problem is: how likely the policy would write its known repair (once per pack)"
        )
        with Progress() as bars:
            bar = bars.add_task("problems looked at", total=1.0)
            found = of_pack(checkpoint, pack, split, lambda share: bars.update(bar, completed=share))
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_suffix(f".{os.getpid()}")  # two may compute the same
        unfinished.write_text(json.dumps({name: round(nats, 3) for name, nats in found.items()}) + "\n")
        unfinished.replace(out)
        typer.echo(f"{out}: {len(found):,} problems")

    torch.set_num_threads(threads)
    _plain_errors(work)


def _plain_errors(work: Callable[[], None]) -> None:
    """Errors that a user can mend, without a traceback."""
    from shared.sandbox import SandboxUnavailable

    try:
        work()
    except (ValueError, FileNotFoundError, SandboxUnavailable) as error:
        typer.echo(f"base: {error}", err=True)
        raise typer.Exit(2) from None
