"""`etude plan` and what lies below it: what a run needs, reckoned before it is started. The arithmetic: `plan`, `plan_train`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude import deferred

if TYPE_CHECKING:
    from etude.plan_train import Plan

# What services add below `etude plan`.
ADDED = {"fleet": "How many attempts to run at a time, and what the trainer then waits for."}
app = typer.Typer(cls=deferred.group("etude.plans", ADDED), add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    step_seconds: Annotated[float, typer.Option(help="Wanted, from one update of the weights to the next.")] = 4.0,
    groups_per_step: Annotated[int, typer.Option(help="Groups trained in a step.", min=1)] = 16,
    group_size: Annotated[int, typer.Option(help="Attempts per problem.", min=2)] = 8,
    sampled_tokens: Annotated[float, typer.Option(help="Of an attempt.")] = 50.0,
    trained_tokens: Annotated[float, typer.Option(help="Of an attempt, prompt and answers of tools too.")] = 110.0,
    turns: Annotated[float, typer.Option(help="Of an attempt.")] = 3.0,
    tool_seconds: Annotated[float, typer.Option(help="Of a turn: visible tests, shell.")] = 0.05,
    test_seconds: Annotated[float, typer.Option(help="Of an attempt: hidden tests.")] = 0.01,
    session_speed: Annotated[float, typer.Option(help="Tokens/s of one attempt on a busy engine.")] = 100.0,
    engine_speed: Annotated[float, typer.Option(help="Tokens/s of one inference replica.")] = 4000.0,
    trainer_speed: Annotated[float, typer.Option(help="Tokens/s of one training device.")] = 5000.0,
    concurrency: Annotated[int, typer.Option(help="Attempts in hand of one rollout worker.", min=1)] = 64,
    parameters: Annotated[float, typer.Option(help="Of the policy.")] = 2.7e6,
    routed: Annotated[int, typer.Option(help="MoE layers x experts per token; 0: dense.", min=0)] = 12,
    base_every: Annotated[int, typer.Option(help="Versions between full ones.", min=1)] = 25,
) -> None:
    """How many of each service a run needs. `etude plan train`: what one rank of its trainer needs. `etude plan fleet`: how
    many attempts to run at a time.

    Measure the speeds first (`make bench`, the dashboards); the defaults are of the demo's order of magnitude.

    \b
    etude plan --step-seconds 120 --groups-per-step 64 --group-size 16 \\
      --sampled-tokens 12000 --trained-tokens 30000 --turns 40 \\
      --tool-seconds 2 --test-seconds 30 \\
      --engine-speed 15000 --trainer-speed 60000 --parameters 3e10
    """
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.table import Table

    from etude.plan import Load
    from etude.plan import plan as reckoned

    try:
        load = Load(
            step_seconds=step_seconds,
            groups_per_step=groups_per_step,
            group_size=group_size,
            sampled_tokens=sampled_tokens,
            trained_tokens=trained_tokens,
            turns=turns,
            tool_seconds=tool_seconds,
            test_seconds=test_seconds,
            session_speed=session_speed,
            engine_speed=engine_speed,
            trainer_speed=trainer_speed,
            concurrency=concurrency,
            parameters=parameters,
            routed=routed,
            base_every=base_every,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    table = Table("what", "how many", "because", box=None, header_style="bold")
    for row in reckoned(load):
        table.add_row(*row)
    Console().print(table)


@app.command()
def train(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="config.json of a Hugging Face checkpoint, or the folder it lies in."),
    ],
    tokens: Annotated[
        int, typer.Option(help="Of a micro-batch, as one sequence (train.micro_batch_tokens).", min=1)
    ] = 4096,
    ranks: Annotated[int, typer.Option(help="Processes that train together, one for each device.", min=1)] = 1,
    context: Annotated[int, typer.Option(help="Ranks that share a sequence (ETUDE_TRAINER_CONTEXT_RANKS).", min=1)] = 1,
    expert: Annotated[int, typer.Option(help="Ranks that divide the experts.", min=1)] = 1,
    zero: Annotated[
        int, typer.Option(help="ZeRO stage: 1 shares the optimiser's state, 2 gradients too.", min=0, max=2)
    ] = 0,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Activation checkpointing (ETUDE_TRAINER_RECOMPUTE).")
    ] = False,
    kl: Annotated[bool, typer.Option("--kl", help="A KL penalty holds the base policy too (train.kl).")] = False,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="For a CPU: host memory is the device's; MLA keeps its scores.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Bytes, as one JSON object.")] = False,
) -> None:
    """Memory and communication of one rank of the trainer, from a checkpoint's config.json alone. Nothing is loaded.

    The trainer computes in float32: 20 bytes for each parameter before any token, shared by ranks as the ZeRO stage and the
    division of experts say. Activations grow with the tokens of a micro-batch.

    \b
    etude plan train ~/models/SmolLM2-135M --tokens 32768 --recompute --cpu
    etude plan train kimi-k2/config.json --ranks 1024 --context 8 --expert 64 --zero 2 --tokens 131072 --recompute
    """
    from etude.plan_train import Ranks, Work
    from etude.plan_train import plan as reckoned
    from shared.model import ModelConfig, UnknownModel

    folder = config.parent if config.name == "config.json" else config
    try:
        found = reckoned(
            ModelConfig.load(folder),
            Ranks(ranks, context, expert, zero),
            Work(tokens=tokens, recompute=recompute, kl=kl, fused=not cpu),
        )
    except UnknownModel as error:
        raise typer.BadParameter(str(error), param_hint="CONFIG") from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        told = asdict(found) | {"peak": found.peak}
        told["parameters"] = found.parameters._asdict() | {"total": found.parameters.total}
        print(json.dumps(told))
    else:
        _show(found, cpu)


def _show(found: Plan, cpu: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console, counted = Console(), found.parameters
    console.print(
        f"{_count(counted.total)} parameters: {_count(counted.dense)} dense, {_count(counted.experts)} in experts; "
        f"a token meets {_count(counted.used)}"
    )
    table = Table("one rank", "GiB", box=None, header_style="bold")
    table.columns[1].justify = "right"
    sections = {
        f"device, {found.moment}": found.device,
        "host": found.host,
        "sent over the network": found.sent,
    }
    for title, rows in sections.items():
        if not rows:
            continue
        table.add_section()
        for what, size in rows.items():
            table.add_row(what, _gib(size))
        if title != "sent over the network":
            table.add_row(f"[bold]{title}", f"[bold]{_gib(sum(rows.values()))}")
    console.print(table)
    if cpu:
        whole = found.peak + sum(found.host.values())
        console.print(f"main memory, together: {_gib(whole)} GiB, and about 1 GiB for the process itself")


def _gib(size: float) -> str:
    return f"{size / (1 << 30):,.2f}"


def _count(number: int) -> str:
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number:,}"
