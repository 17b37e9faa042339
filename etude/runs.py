"""Commands about runs: begin one, list them, and what a person may do to them."""

from __future__ import annotations

import asyncio
import json as texts
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude import run_list
from etude.commands import BOTH, Retry, Seed, State
from shared.options import finite
from shared.visible import visible

if TYPE_CHECKING:
    from etude.acting import Action
    from shared.settings import ServiceSettings

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's id; left out: the only one that is not finished.")
]
RunOrLast = Annotated[
    str, typer.Argument(metavar="RUN", help="The run; left out: the one that was started last.", show_default=False)
]
Reason = Annotated[str, typer.Option(help="Why; it stands on the run's page and in `etude runs`.")]
Problems = Annotated[int, typer.Option(help="Held-out problems to measure on, at most; 0: all.", min=0)]
Samples = Annotated[int, typer.Option(help="Attempts per problem, at temperature 1; one more is greedy.", min=1)]
Within = Annotated[float, typer.Option(help="With --canary: so many points fewer are borne.", min=0, callback=finite)]


def register(app: typer.Typer) -> None:
    for command in (start, runs, pause, resume, stop, rollback, reconfigure, measure, promote):
        app.command()(command)


def start(
    pack: Annotated[
        Path | None,
        typer.Option(help="Pack to practise on; made if there is none. Left out: .cache/pack, kept up to date."),
    ] = None,
    problems: Annotated[
        Path | None, typer.Option(help="Your own problems to practise on instead (JSONL, docs/problems.md).")
    ] = None,
    seed: Seed = 1,
    minutes: Annotated[float, typer.Option(help="Minutes of practice; 0: no limit.", min=0, callback=finite)] = 10.0,
    steps: Annotated[int, typer.Option(help="Stop after so many steps; 0: by time alone.", min=0)] = 0,
    base: Annotated[str, typer.Option(help="Start from this imported checkpoint (etude import), not from ours.")] = "",
    retry: Retry = "fresh",
    probe: Annotated[
        Path | None,
        typer.Option(help="What `etude tasks probe` found out of these problems: the first evidence of what is hard."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="JSON of what the run shall learn with instead of its defaults (docs/run.md).")
    ] = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Stop the run that goes on and start at once. Its step in hand is finished and saved, its attempts are "
            "dropped, and groups that wait for the trainer stay untrained; `etude stop` first trains them.",
        ),
    ] = False,
    paused: Annotated[
        bool,
        typer.Option(
            "--paused", help="Nothing is practised until `etude resume`: `etude measure` first says how good it is."
        ),
    ] = False,
    beside: Annotated[
        bool,
        typer.Option(
            "--beside",
            help="Start it beside the runs that go on, which keep their trainer and engines. It needs a trainer and an engine of "
            "its own; rollout workers are shared by `schedule.share` (docs/runs.md).",
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Check the settings, the options, --config and the problems, and start nothing."),
    ] = False,
    state: State = Path(".etude"),
) -> None:
    """Start a run, of the shipped model or of `--base NAME`, on the platform that the settings name (ETUDE_BUS, ETUDE_OBJECTS), and
    return when the scheduler has taken it up.

    One run at a time: the trainer and the engines follow the one started
    last, and do not come back to an earlier one, which would go on asking
    for attempts that no engine serves. So nothing is started while another
    run is running, paused or stopping, unless --replace ends it, or --beside
    leaves it alone.
    """
    from etude.demo import DemoOptions
    from etude.start import run

    if problems and pack:
        raise typer.BadParameter(BOTH, param_hint="--problems FILE, --pack DIR")
    if replace and beside:
        raise typer.BadParameter(BOTH, param_hint="--replace, --beside")
    options = DemoOptions(
        pack=pack,
        problems=problems,
        seed=seed,
        minutes=minutes,
        steps=steps,
        base=base,
        retry=retry,
        probe=probe,
        config=config,
        state=state,
    )
    raise typer.Exit(run(options, instead=replace, paused=paused, beside=beside, check=check))


def runs(
    state: State = Path(".etude"),
    json: Annotated[bool, typer.Option("--json", help="One JSON array instead of a table.")] = False,
    history: Annotated[
        str,
        typer.Option(
            metavar="RUN",
            help="Of this run, all that was said to it: when, by whom, the answer, why.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Every run, the newest first: state and since when, step, version, when it was started, why it is in that state."""
    from etude.acting import in_folder
    from etude.hearing import embedded
    from etude.supervisor import holder

    settings = _settings(state)
    if history:
        _history(settings, history, as_json=json)
        return
    local, found = embedded(settings) is not None, _do(run_list.read(settings))
    if json:
        typer.echo(texts.dumps(run_list.rows(found)))
    elif not found.runs:
        where = state if local else "this bus"
        typer.echo(f"{where}: no run was started here. `{in_folder('etude start', settings)}` begins one.")
    else:
        run_list.show(found)
        if local and found.unfinished and holder(state) is None:
            typer.echo(
                f"Nothing runs in {state}: `{in_folder('etude up', settings)}` goes on with what is not finished."
            )


def pause(
    run: RunName = "",
    reason: Reason = "",
    drain: Annotated[
        bool, typer.Option(help="Train what is complete; else the trainer stops after the step in hand.")
    ] = True,
    state: State = Path(".etude"),
) -> None:
    """Pause a run: nothing more is asked for, attempts in hand are finished. Its minutes stand still."""
    _act("pause", run, reason, state, drain=drain)


def resume(run: RunName = "", reason: Reason = "", state: State = Path(".etude")) -> None:
    """Go on with a run that is paused or stopping."""
    _act("resume", run, reason, state)


def stop(run: RunName = "", reason: Reason = "", state: State = Path(".etude")) -> None:
    """End a run: attempts in hand are dropped, what is complete is trained. Returns when it has ended, after three minutes
    in any case. (The services go on: `etude down` ends those.)"""
    _act("stop", run, reason, state)


def rollback(
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="N|best", help="The published version to go on from; best: `etude measure --best`."
        ),
    ],
    run: RunName = "",
    reason: Reason = "",
    canary: Annotated[
        bool,
        typer.Option(
            "--canary",
            help="First one engine alone: one of the evaluation pool measures version N and the newest, as `etude measure` "
            "does. Only where N solves no fewer held-out problems do all others follow.",
        ),
    ] = False,
    within: Within = 0.0,
    problems: Problems = 400,
    samples: Samples = 8,
    state: State = Path(".etude"),
) -> None:
    """Make a run go on from an earlier version of its own: its weights are published again under a new number, and groups
    trained after it are free again. A paused run stays paused."""
    settings = _settings(state)
    from etude.best import meant

    run, version = _do(meant(settings, run, to))
    if canary:
        from etude.canary import Trial
        from etude.canary import run as tried

        raise typer.Exit(tried(settings, run, version, reason, Trial(problems, samples, within)))
    _act("rollback", run, reason, state, version=version)


def reconfigure(
    file: Annotated[
        Path, typer.Option("--config", metavar="FILE", help="JSON of the fields that shall differ (docs/run.md).")
    ],
    run: RunName = "",
    reason: Reason = "",
    state: State = Path(".etude"),
) -> None:
    """Change what may still change of a run that goes on: its budget, its quota, what it pauses on.

    \b
    echo '{"schedule": {"quota_gb": 80, "minutes": 60}}' > more.json
    etude reconfigure --config more.json
    """
    from etude.reconfiguring import reconfigure as changed

    _do(changed(_settings(state), run, file, typer.echo, reason=reason))


def measure(
    run: RunOrLast = "",
    version: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Which one, 0: the policy it began with; the newest where left out."),
    ] = None,
    versions: Annotated[
        str, typer.Option(metavar="N,M,…", help="Several, one after the other.", show_default=False)
    ] = "",
    every: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Each N-th whose weights are there, and the newest.", show_default=False),
    ] = 0,
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="Measure nothing: of what was measured, say which version is the best, and how surely."
        ),
    ] = False,
    problems: Problems = 400,
    samples: Samples = 8,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Every row with all its figures.")] = None,
    state: State = Path(".etude"),
) -> None:
    """Measure a version of a run on its held-out problems, on the platform that the settings name, and print it beside all that
    was measured of the run before. While a run is running its engines go on to newer versions: pause it, or wait for its
    end.

    \b
    etude measure                      # the newest version of the run that was started last
    etude measure --every 10           # every tenth version that is kept
    etude measure --best               # of what was measured: which one to take
    """
    if sum((version is not None, bool(versions), bool(every), best)) > 1:
        raise typer.BadParameter("at most one of them", param_hint="--version, --versions, --every, --best")
    if best:
        from etude.best import show

        _do(show(_settings(state), run, out))
        return
    from etude.measuring import Which
    from etude.measuring import run as measured

    which = Which(_numbers(versions) if versions else () if version is None else (version,), every)
    raise typer.Exit(measured(_settings(state), run, which, problems=problems, samples=samples, out=out))


def promote(
    run: RunOrLast = "",
    version: Annotated[
        str,
        typer.Option(
            metavar="N|best", help="Which one; left out: say what is promoted, and who serves it.", show_default=False
        ),
    ] = "",
    reason: Reason = "",
    canary: Annotated[
        bool,
        typer.Option(
            "--canary",
            help="First one engine alone: one of the evaluation pool measures what is promoted now, and version N. Only where N "
            "solves no fewer held-out problems do the others hear of it.",
        ),
    ] = False,
    within: Within = 0.0,
    problems: Problems = 400,
    samples: Samples = 8,
    state: State = Path(".etude"),
) -> None:
    """Say which version is served to others: engines with ETUDE_POOL=serving take the one that was promoted last, of whatever
    run, and none that is published meanwhile. Its weights are kept.

    \b
    etude promote                                  # which one it is
    etude promote RUN --version best --canary      # measured first, beside the one that is served
    """
    from etude import promoting
    from etude.canary import Trial

    settings = _settings(state)
    if not version:
        for line in _do(promoting.tell(settings)):
            typer.echo(visible(line))
        return
    trial = Trial(problems, samples, within) if canary else None
    raise typer.Exit(promoting.run(settings, run, version, reason, trial))


def _numbers(versions: str) -> tuple[int, ...]:
    names = [name.strip() for name in versions.split(",")]
    if not all(name.isascii() and name.isdigit() for name in names):
        raise typer.BadParameter(
            f"found {versions!r}; allowed: numbers with commas between them", param_hint="--versions"
        )
    return tuple(dict.fromkeys(map(int, names)))


def _act(action: Action, run: str, reason: str, state: Path, **options: Any) -> None:
    from etude.acting import act

    _do(act(_settings(state), action, run, typer.echo, reason=reason, **options))


def _settings(state: Path) -> ServiceSettings:
    from shared.settings import ServiceSettings, read

    try:
        return read(ServiceSettings, state=state)
    except (OSError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _do(work: Coroutine[Any, Any, Any]) -> Any:
    """Errors that say all that a person needs end the command with code 1 and nothing else."""
    from shared.settings import Told

    try:
        return asyncio.run(work)
    except (Told, ValueError) as error:
        typer.echo(visible(str(error)), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("Not waited for any longer. What was said stands: `etude runs` shows what becomes of it.", err=True)
        raise typer.Exit(130) from None


def _history(settings: ServiceSettings, run: str, *, as_json: bool) -> None:
    from rich.console import Console

    from etude import history

    entries = _do(history.read(settings, run))
    if as_json:
        typer.echo(texts.dumps(history.rows(entries)))
    else:
        Console().print(history.table(entries))
