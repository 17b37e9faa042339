"""`etude train cpt|extend|sft|mtp|rl CONFIG`, `etude train evaluate-loss` and `etude train report`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from shared.output import NotWritable, require_writable, write_whole

if TYPE_CHECKING:
    from services.trainer.phases.config import Phase

Config = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="What the phase is told (docs/phases.md).")]
Check = Annotated[bool, typer.Option("--check", help="Read and check everything, print the whole, and train nothing.")]


def register(app: typer.Typer) -> None:
    app.command()(cpt)
    app.command()(extend)
    app.command()(sft)
    app.command()(mtp)
    app.command()(rl)
    app.command("evaluate-loss")(evaluate_loss)
    app.command()(report)


def cpt(config: Config, check: Check = False) -> None:
    """Continued pretraining on token files (`etude data tokenize`).

    Interrupted, the same command goes on where it was, and ends with the same weights, bit for bit. Several ranks: `torchrun
    --nproc-per-node 2 --no-python etude train cpt CONFIG.toml`. Exit code 2: something cannot be used, and nothing is written.

    Example: etude train cpt docs/examples/phases/cpt.toml
    """
    _train("cpt", config, check)


def extend(config: Config, check: Check = False) -> None:
    """Continued pretraining at a longer context, with stretched positions (`model.rope`).

    As `cpt`. MTP layers learn in the same step if the checkpoint has any.

    Example: etude train extend docs/examples/phases/extend-32k.toml
    """
    _train("extend", config, check)


def sft(config: Config, check: Check = False) -> None:
    """Supervised fine-tuning on conversations (JSONL) and on recorded attempts. Only the assistant's tokens have a loss.

    Example: etude train sft docs/examples/phases/sft.toml
    """
    _train("sft", config, check)


def mtp(config: Config, check: Check = False) -> None:
    """Distil the policy into its MTP layers (the draft of speculative decoding). Nothing else moves.

    Example: etude train mtp docs/examples/phases/mtp.toml
    """
    _train("mtp", config, check)


def rl(config: Config) -> None:
    """Say how to start RL: it is a run of all services, not of the trainer alone.

    CONFIG.toml: the tables of a run (docs/run.md): sampling, reward, schedule, train. `etude start` reads the same as JSON, and
    this command writes that file beside CONFIG.toml.
    """
    import tomllib

    import msgspec

    from shared.contracts.allowed import objections, unfit
    from shared.contracts.run import RewardConfig, Sampling, ScheduleConfig, TrainConfig

    tables = {"sampling": Sampling, "reward": RewardConfig, "schedule": ScheduleConfig, "train": TrainConfig}
    try:
        raw = tomllib.loads(config.read_text())
    except (OSError, ValueError) as error:
        _end(f"{config}: cannot be read as TOML: {error}")
    wrong = [f"found {name!r}; allowed: {', '.join(tables)}" for name in raw if name not in tables]
    for name, of in tables.items():
        if name in raw:
            bad = list(unfit(raw[name], of, name))
            wrong += bad or objections(msgspec.convert(raw[name], of), f"{name}.")
    if wrong:
        _end("\n".join(f"{config}: {line}" for line in wrong))
    out = config.with_suffix(".json")
    try:
        write_whole(out, json.dumps(raw, indent=2) + "\n")
    except NotWritable as error:
        _end(str(error))
    typer.echo(f"{out}: written. RL is a run of all services. Start it with:")
    typer.echo("  etude up --detach")
    typer.echo("  etude import CHECKPOINT --name NAME")
    typer.echo(f"  etude start --base NAME --config {out}")


def evaluate_loss(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    data: Annotated[list[Path], typer.Option(help="Folders of tokens (`etude data tokenize`); repeatable.")],
    window: Annotated[int, typer.Option(help="Tokens of context, at most.", min=2, max=2**24)] = 2048,
    stride: Annotated[int, typer.Option(help="Tokens that a window moves on by.", min=1, max=2**24)] = 1024,
    tokens: Annotated[int, typer.Option(help="First tokens of each folder; 0: all.", min=0)] = 0,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1, max=1024)] = 1,
    json_out: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Read and check everything, and measure nothing.")] = False,
) -> None:
    """The loss of a checkpoint on held-out code: files follow one another, and a window rolls over them.

    Each token is predicted once, from up to `--window` tokens before it, on the bf16 weights.

    Example: etude train evaluate-loss smollm-code --data tokens-held-out
    """
    from services.trainer.phases.config import BadPhase, Data, Machine, Measure, PhaseConfig
    from services.trainer.phases.heldout import codebase, count, measured
    from services.trainer.phases.screen import Bar
    from services.trainer.phases.sources import tokens_of
    from services.trainer.phases.start import load, shape_of

    try:
        if json_out:
            require_writable(json_out, "--json")
        config = PhaseConfig(
            checkpoint=str(checkpoint),
            out="",
            data=Data(length=2, held_out=[str(folder) for folder in data]),
            measure=Measure(window=window, stride=stride, tokens=tokens),
            machine=Machine(threads=threads),
        )
        shape = shape_of(config, "cpt")
        if stride > window:
            raise BadPhase(f"--stride: found {stride}; allowed: 1 to {window}, the window")
        folders = {str(folder): tokens_of(folder, config, shape) for folder in data}
        if check:
            for name, shards in folders.items():
                typer.echo(f"{name}: {measured(shards, tokens):,} tokens")
            return
        import torch

        torch.set_num_threads(threads)
        model = load(config, shape, "cpu")
    except (BadPhase, NotWritable) as error:
        _end(str(error))
    figures = {}
    with Bar() as screen:
        for name, shards in folders.items():
            tell = screen.measures(name, count(measured(shards, tokens), window, stride))
            loss = codebase(
                model, shards, window=window, stride=stride, most=tokens, micro_batch_tokens=2 * window, tell=tell
            )
            screen.measured(name, loss)
            figures[name] = loss.figures
    text = json.dumps(figures, indent=2)
    typer.echo(text)
    if json_out:
        write_whole(json_out, text + "\n")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that a phase wrote, or that it works in (OUT.work).")],
    plot: Annotated[Path | None, typer.Option(help="Where the picture goes (PNG).")] = None,
) -> None:
    """Held-out losses of phases as a table, and the fit of loss against log compute with its R².

    Compute counts from the start of each phase. Compare phases that start from one checkpoint with different `train.tokens`.

    Example: etude train report small medium large --plot fit.png
    """
    from services.trainer.phases import report as reports

    by_name: dict[str, list[reports.Point]] = {}
    try:
        if plot:
            require_writable(plot, "--plot")
        for folder in runs:
            for name, found in reports.points(folder).items():
                by_name.setdefault(name, []).extend(found)
    except (OSError, ValueError, KeyError) as error:
        _end(f"report: {error}; allowed: folders that a phase wrote")
    if not by_name:
        _end("report: found no held-out loss; allowed: phases with data.held_out or data.held_out_conversations")
    typer.echo(reports.markdown(by_name))
    if plot:
        reports.plot(by_name, plot)


def _train(phase: Phase, path: Path, check: bool) -> None:
    from services.trainer.phases.config import BadPhase, read
    from services.trainer.phases.phase import run
    from services.trainer.phases.screen import Bar, Silent

    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        if stopping:  # a second one ends at once; the state of the last checkpoint stands
            raise KeyboardInterrupt
        stopping = True

    try:
        config = read(path, phase)
        if check:
            _checked(config, phase)
            return
        before = [signal.signal(name, stop) for name in (signal.SIGINT, signal.SIGTERM)]
        try:
            if os.environ.get("RANK", "0") == "0":
                with Bar() as screen:
                    outcome = run(config, phase, screen, lambda: stopping)
            else:
                run(config, phase, Silent(), lambda: stopping)
                return
        finally:
            for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
                signal.signal(number, handler)
    except (BadPhase, NotWritable) as error:
        _end(str(error))
    if not outcome.finished:
        typer.echo(f"interrupted after step {outcome.progress.step}; the same command goes on from there", err=True)
        raise typer.Exit(130)
    typer.echo(f"{config.out}: finished, {outcome.progress.step} steps, {outcome.progress.targets:,} targets")
    for name, (first, last) in outcome.held_out.items():
        typer.echo(f"held out, {name}: {first:.4f} -> {last:.4f} nats per token")


def _checked(config: object, phase: Phase) -> None:
    import msgspec

    from services.trainer.phases import sources, start
    from services.trainer.phases.config import PhaseConfig

    assert isinstance(config, PhaseConfig)
    found = sources.open_all(config, phase, start.shape_of(config, phase))
    typer.echo(json.dumps(msgspec.to_builtins(config), indent=2))
    typer.echo(f"{len(found.train):,} sequences, {found.train.targets:,} targets an epoch", err=True)


def _end(text: str) -> NoReturn:
    for line in text.splitlines():
        typer.echo(f"train: {line}", err=True)
    raise typer.Exit(2)
