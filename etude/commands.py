"""The front door's own commands. Heavy imports stay inside the functions: `etude --help` must be quick."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from etude import doctor as machine
from etude.finding import Finding
from shared.options import finite

State = Annotated[Path, typer.Option("--state", help="Directory for everything local.", envvar="ETUDE_STATE")]
BOTH = "found both; give one of them"
Retry = Annotated[
    Literal["fresh", "append"],
    typer.Option(
        help="After a failure the agent reads the task alone, or everything so far; append for a model that reads."
    ),
]

Seed = Annotated[int, typer.Option(help="Seed of the run.", min=0, max=2**63 - 1)]

# Panels of `etude demo --help`, beside the options that most will want.
PROBLEMS, FIGURES, RECIPE, MACHINE = "Problems", "Figures", "Recipe: each an ablation", "This machine"


def register(app: typer.Typer) -> None:
    for command in (up, down, status, logs, doctor, demo):
        app.command()(command)
    app.command(name="eval")(evaluate)
    app.command()(compare)
    from etude import exchanging, letters, planning, runs, topics
    from etude.figures import command as figures
    from etude.study import command as study

    exchanging.register(app)
    runs.register(app)
    figures.register(app)
    app.add_typer(planning.app, name="plan")
    app.add_typer(study.app, name="study")
    app.add_typer(letters.app, name="dlq")
    app.add_typer(topics.app, name="topics")


def _require_linux() -> None:
    """What follows needs Linux to be imported at all."""
    _refuse([machine.system()])


def require_machine(state: Path, elsewhere: str = machine.ELSEWHERE) -> None:
    """Before anything is written: what the doctor objects to, with the way out."""
    _require_linux()
    _refuse(machine.essentials(state, elsewhere))


def _require_free(state: Path) -> None:
    """First of all: services that run here already hold what the machine would be said to lack."""
    _require_linux()
    from etude.supervisor import AlreadyRunning, require_free

    try:
        require_free(state)
    except AlreadyRunning as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _require_servers(state: Path) -> None:
    """Every server that the settings name can be used."""
    _refuse(machine.servers(state))


def _refuse(findings: list[Finding]) -> None:
    bad = [finding for finding in findings if not finding.ok]
    for finding in bad:
        typer.echo(f"{finding.what}: {finding.found}. Way out: {finding.way_out}", err=True)
    if bad:
        raise typer.Exit(1)


def up(
    state: State = Path(".etude"),
    base_port: Annotated[
        int, typer.Option(help="Ports count from here; 0: free ones.", min=0, max=65000)
    ] = machine.BASE_PORT,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Leave the services running and return.")] = False,
) -> None:
    """Start every service as its own process on this machine, and keep them alive. With the embedded adapters, or with
    the servers that ETUDE_BUS, ETUDE_LEDGER, ETUDE_OBJECTS and ETUDE_JOBS name."""
    _require_free(state)
    require_machine(state)
    _require_servers(state)
    from etude.supervisor import run_foreground, spawn_detached

    (spawn_detached if detach else run_foreground)(state, base_port)


def down(state: State = Path(".etude")) -> None:
    """Stop what `etude up` or `etude demo` started: services drain, then leave."""
    _require_linux()
    from etude.supervisor import stop

    stop(state)


def status(
    state: State = Path(".etude"),
    json: Annotated[bool, typer.Option("--json", help="One JSON array instead of a table.")] = False,
) -> None:
    """Every service: process, port, ready or waiting on what since when."""
    from etude.status import show

    show(state, as_json=json)


def logs(
    service: Annotated[str | None, typer.Argument(help="One service; all when left out.")] = None,
    state: State = Path(".etude"),
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added; Ctrl-C ends it.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each log.")] = 40,
) -> None:
    """Print the services' logs."""
    from etude.status import show_logs

    show_logs(state, service, follow, lines)


def doctor(
    state: State = Path(".etude"),
    compose: Annotated[
        bool,
        typer.Option(
            "--compose",
            help="Check docker compose in this folder instead: engine, .env, ports, disk, memory, and which container is not "
            "well. Without an environment: python3 infra/docker/check.py.",
        ),
    ] = False,
) -> None:
    """Check this machine: system, packages, sandboxes, memory, disk, cores, ports. Exit code 1 if the demo cannot run."""
    raise typer.Exit(machine.report_compose(Path.cwd()) if compose else machine.report(state))


def demo(
    minutes: Annotated[
        float,
        typer.Option(help="Minutes of practice, first request to last publication.", min=0.1, callback=finite),
    ] = 10.0,
    steps: Annotated[int, typer.Option(help="Stop after so many steps; 0: by time alone.", min=0)] = 0,
    seed: Seed = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the demo that was interrupted, with the options it began with.")
    ] = False,
    problems: Annotated[
        Path | None,
        typer.Option(help="Your own problems to practise on (JSONL, docs/problems.md).", rich_help_panel=PROBLEMS),
    ] = None,
    pack: Annotated[
        Path | None, typer.Option(help="A pack made before (etude tasks mutate --out DIR).", rich_help_panel=PROBLEMS)
    ] = None,
    report: Annotated[
        Path, typer.Option(help="Where the figures go, as JSON; plot and text beside it.", rich_help_panel=FIGURES)
    ] = Path("report.json"),
    eval_problems: Annotated[
        int, typer.Option(help="Held-out problems in the report; 0: all.", min=0, rich_help_panel=FIGURES)
    ] = 400,
    eval_samples: Annotated[
        int, typer.Option(help="Attempts per held-out problem.", min=1, rich_help_panel=FIGURES)
    ] = 8,
    credit: Annotated[
        Literal["turn", "attempt"],
        typer.Option(
            help="Who earns the reward: the turns that brought it about, or the whole attempt (Dr. GRPO).",
            rich_help_panel=RECIPE,
        ),
    ] = "turn",
    retry: Annotated[
        Literal["fresh", "append"],
        typer.Option(
            help="After a failure the agent reads the task alone, or everything so far (with the limits of a conversation).",
            rich_help_panel=RECIPE,
        ),
    ] = "fresh",
    staleness: Annotated[int, typer.Option(help="Steps that a sample may be old.", min=0, rich_help_panel=RECIPE)] = 2,
    groups_per_step: Annotated[int, typer.Option(help="Groups trained in a step.", min=1, rich_help_panel=RECIPE)] = 16,
    group_size: Annotated[int, typer.Option(help="Attempts per problem.", min=2, rich_help_panel=RECIPE)] = 8,
    router_replay: Annotated[
        bool, typer.Option(help="Train with the experts that the sampler used.", rich_help_panel=RECIPE)
    ] = True,
    length_penalty: Annotated[
        bool, typer.Option(help="Subtract the nonlinear length penalty.", rich_help_panel=RECIPE)
    ] = True,
    uniform_sampling: Annotated[
        bool, typer.Option("--uniform-sampling", help="No hardness upsampling.", rich_help_panel=RECIPE)
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(help="JSON of anything else that shall differ (docs/run.md).", rich_help_panel=RECIPE),
    ] = None,
    control: Annotated[
        Literal["none", "sft"],
        typer.Option(
            help="sft: spend the same minutes on more supervised fine-tuning instead.", rich_help_panel=RECIPE
        ),
    ] = "none",
    state: Annotated[
        Path,
        typer.Option("--state", help="Directory for everything local.", envvar="ETUDE_STATE", rich_help_panel=MACHINE),
    ] = Path(".etude"),
    base_port: Annotated[
        int,
        typer.Option(
            help="Ports of the services count from here; 0: free ones.", min=0, max=65000, rich_help_panel=MACHINE
        ),
    ] = machine.BASE_PORT,
) -> None:
    """Watch a small model learn to repair real Python functions: every service, one command, no GPU.

    \b
    etude demo                                      ten minutes of practice
    etude demo --minutes 2 --eval-problems 50       a quick look
    etude demo --staleness 0 --report fresh.json    an ablation, reported apart
    """
    if problems and pack:
        raise typer.BadParameter(BOTH, param_hint="--problems FILE, --pack DIR")
    if control == "none":
        _require_free(state)
    require_machine(state)
    _require_servers(state)
    from etude.demo import DemoOptions, run

    raise typer.Exit(
        run(
            DemoOptions(
                seed=seed,
                minutes=minutes,
                problems=problems,
                pack=pack,
                report=report,
                state=state,
                resume=resume,
                eval_problems=eval_problems,
                eval_samples=eval_samples,
                control=control,
                staleness=staleness,
                router_replay=router_replay,
                length_penalty=length_penalty,
                uniform_sampling=uniform_sampling,
                credit=credit,
                retry=retry,
                config=config,
                steps=steps,
                groups_per_step=groups_per_step,
                group_size=group_size,
                base_port=base_port,
            )
        )
    )


def evaluate(
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint directory (Hugging Face layout + etude.json).")],
    problems: Annotated[Path | None, typer.Option(help="Problems of your own, JSONL (docs/problems.md).")] = None,
    pack: Annotated[
        Path | None, typer.Option(help="A pack instead (.cache/pack, etude tasks mutate --out DIR).")
    ] = None,
    split: Annotated[
        Literal["dev", "held_out"] | None,
        typer.Option(help="Which part of the pack: held_out where left out; dev while you still try things."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Attempts per problem at temperature 1.", min=1)] = 8,
    json: Annotated[
        Path | None,
        typer.Option(help="Where the figures go, as JSON, with the results by problem (etude compare)."),
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many problems; 0: all.", min=0)] = 0,
    retry: Retry = "fresh",
    leave_out: Annotated[
        bool,
        typer.Option(
            "--leave-out",
            help="Name and count what the chat format cannot take, and what of --problems fails the check; measure the rest.",
        ),
    ] = False,
) -> None:
    """Measure a checkpoint on problems, with the same services, agent and graders as a run.

    \b
    etude eval --checkpoint policy --problems mine.jsonl --json figures.json
    etude eval --checkpoint policy --pack .cache/pack --limit 400
    """
    from etude.evaluate import Split, run

    what: Path | Split
    if problems and not pack:
        what = problems
        if split:
            raise typer.BadParameter("a file of problems has no splits; it goes with --pack", param_hint="--split")
    elif pack and not problems:
        what = Split(pack, split or "held_out")
    else:
        raise typer.BadParameter(
            BOTH if pack else "found neither; give one of them", param_hint="--problems FILE, --pack DIR"
        )
    require_machine(Path(tempfile.gettempdir()), "set TMPDIR to another folder")
    raise typer.Exit(run(checkpoint, what, samples, json, limit, retry, leave_out))


def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="Figures that `etude eval --json` wrote.")],
    after: Annotated[
        Path, typer.Argument(metavar="B.json", help="Figures of another checkpoint on the same problems.")
    ],
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Compare two measurements problem by problem: B minus A, with the 95 % interval of the paired difference.

    \b
    etude eval --checkpoint etude/data/base --pack .cache/pack --json before.json
    etude eval --checkpoint policy --pack .cache/pack --json after.json
    etude compare before.json after.json
    """
    from etude.compare import run

    raise typer.Exit(run(before, after, json))
