"""`etude rollout …`: one attempt by hand, and attempts looked at."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.status import Status
from rich.table import Column, Table
from rich.text import Text

from services.rollout.byhand import kept
from services.rollout.byhand.endpoints import Unreachable
from services.rollout.byhand.exporting import document
from services.rollout.byhand.policies import Api, BadPolicy, Policy, Wish, opened
from services.rollout.byhand.problems import Chosen, choose
from services.rollout.byhand.replica import NotStarted
from services.rollout.byhand.running import NO_HIDDEN, Objection, Watching, attempt
from services.rollout.byhand.scripted import BadScript
from services.rollout.byhand.shown import View, details, outcome, show, show_turn
from services.rollout.byhand.stored import NotStored, effort, versions, view_of
from services.rollout.byhand.watched import Turn
from services.rollout.config import RolloutSettings
from shared import objects as stores
from shared.contracts.messages import StopReason
from shared.contracts.run import Retry, Sampling
from shared.environments import Brief, InfrastructureError
from shared.environments.places import opened_places
from shared.environments.registry import Environments
from shared.objects.directory import DirectoryObjects
from shared.options import finite
from shared.output import require_writable, write_whole
from shared.problems import ProblemError
from shared.sandbox import SandboxUnavailable
from shared.settings import Told, read
from shared.visible import visible

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Make one attempt by hand, and read attempts.",
    pretty_exceptions_enable=False,
)
LISTED = 20  # attempts that `show` names
FAILURES = (NotStarted, Unreachable, SandboxUnavailable, InfrastructureError, OSError)  # of the machine or the policy
MISTAKES = (ProblemError, BadPolicy, BadScript, Objection, kept.UnknownAttempt, NotStored, Told, ValueError)
State = Annotated[Path, typer.Option("--state", help="Directory for everything local.", envvar="ETUDE_STATE")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]


@app.command()
def run(
    problem: Annotated[
        str, typer.Argument(help="FILE.jsonl (its first problem), FILE.jsonl#ID or PACKDIR#ID.", show_default=False)
    ],
    policy: Annotated[
        str,
        typer.Option(
            metavar="URL|DIRECTORY",
            help="Who writes the replies. What holds `://` is the URL of a replica, of an SGLang server or of an OpenAI-compatible "
            "endpoint. Any other name is a checkpoint directory with config.json, as `etude export NAME --out DIRECTORY` writes "
            "it: an engine starts for it.",
        ),
    ] = "",
    scripted: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Play the replies of this file instead.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Directory with the tokenizer and chat format, for a URL or a script."
        ),
    ] = None,
    api: Annotated[
        Api, typer.Option(help="What a URL speaks: token ids (generate), text (chat), or look (auto).")
    ] = "auto",
    model: Annotated[str, typer.Option(help="Name of the model at a chat endpoint; left out: its first.")] = "",
    key_variable: Annotated[
        str, typer.Option("--key-env", help="Environment variable with the key of a chat endpoint.")
    ] = "OPENAI_API_KEY",
    temperature: Annotated[float, typer.Option(min=0.0, callback=finite, help="0 is greedy.")] = 1.0,
    turns: Annotated[
        int, typer.Option(min=1, help="Turns, unless the problem has a limit of its own; the default is that of a run.")
    ] = 30,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens after the prompt, sampled and read, unless the problem has a limit.")
    ] = 32768,
    retry: Annotated[
        Retry, typer.Option(help="Of function problems: fresh forgets what was said after a failure.")
    ] = "append",
    seed: Annotated[int | None, typer.Option(min=0, help="Of sampling, where the server takes one.")] = None,
    state: State = Path(".etude"),
    as_json: AsJson = False,
) -> None:
    """Make one attempt at a problem and grade it.

    Each turn is printed as it happens; Ctrl-C submits the work as it is. The attempt is kept below the state directory, and
    `etude rollout show` reads it.

    Examples:

        etude rollout run problems.jsonl#fix-add --policy checkpoints/mine

        etude rollout run pack#calc --policy http://127.0.0.1:8000/v1 --model qwen3

        etude rollout run problems.jsonl --scripted replies.json

    A script is a JSON list of replies: [{"text": "…", "calls": [{"name": "submit", "arguments": {}}]}].

    Exit code 0: the attempt ended, solved or not. 1: the machine, the policy or the grader failed. 2: the command is wrong.
    """
    if scripted is not None and policy:
        raise typer.BadParameter("found --policy and --scripted; give one of them", param_hint="--scripted")
    wish = Wish(policy, scripted, checkpoint, api, model, key_variable, temperature, seed)
    sampling = Sampling(
        temperature=temperature, retry=retry, max_turns=turns, max_completion_tokens=tokens, max_edits=turns
    )
    console = Console(stderr=True)
    try:
        record = asyncio.run(_run(problem, wish, sampling, read(RolloutSettings, state=state), console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(130) from None
    except NotStarted as error:
        raise _refuse(f"--policy {policy}: {error}", 1) from None
    except FAILURES as error:
        raise _refuse(str(error), 1) from None
    except MISTAKES as error:
        raise _refuse(str(error)) from None
    if as_json:
        print(json.dumps({**msgspec.to_builtins(record), "folder": str(state / "attempts" / record.id)}, indent=2))
    failed = record.stop is StopReason.infrastructure or record.ungraded not in ("", NO_HIDDEN)
    raise typer.Exit(int(failed))


async def _run(named: str, wish: Wish, sampling: Sampling, settings: RolloutSettings, console: Console) -> kept.Record:
    objects = DirectoryObjects(settings.state / "cache" / "objects")
    attempts = settings.state / "attempts"
    with console.status("") as status:
        doing = _progress(console, status)
        chosen = await asyncio.to_thread(choose, named, objects)
        if chosen.others and "#" not in named:
            _say(console, f"{chosen.source}: the first of {chosen.others + 1} problems", "dim")
        async with (
            opened(wish, doing) as policy,
            opened_places(settings, 1, objects, settings.sandbox) as places,
        ):
            watching = _watching(console, doing, chosen, policy)
            record = await attempt(chosen, policy, Environments(places), sampling, attempts, watching)
    _say(console, outcome(record.stop, record.verdict, record.ungraded, record.error), _style(record))
    for line in details(record.verdict):
        _say(console, f"  {line}", "yellow")
    turns = record.effort.turns
    seconds = f"{turns} turn{'s' * (turns != 1)}, {record.seconds:.1f} s"
    _say(console, f"{seconds}; etude rollout show {record.id}" + _where(settings.state), "dim")
    if policy.caveat:
        _say(console, policy.caveat, "yellow")
    return record


def _progress(console: Console, status: Status) -> Callable[[str], None]:
    """Return what tells a person that something takes a while: a line that is replaced on a terminal, and lines elsewhere."""
    if console.is_terminal:
        return lambda text: status.update(visible(text))
    return lambda text: _say(console, text, "dim")


def _watching(console: Console, doing: Callable[[str], None], chosen: Chosen, policy: Policy) -> Watching:
    def begins(brief: Brief) -> None:
        tools = ", ".join(tool.name for tool in brief.tools) or "those of its own agent"
        _say(console, f"{chosen.source} ({chosen.problem.kind}) · {policy.name} · tools: {tools}", "dim")

    def told(turn: Turn) -> None:
        show_turn(console, turn, unit=policy.unit, short=True)

    return Watching(
        begins=begins,
        asking=lambda number: doing(f"turn {number}: waiting for the policy"),
        told=told,
        grading=lambda: doing("grading"),
    )


@app.command("show")
def show_(
    id: Annotated[
        str, typer.Argument(help="Id of an attempt made by hand (its end suffices), or RUN/ATTEMPT; left out: a list.")
    ] = "",
    tokens: Annotated[bool, typer.Option("--tokens", help="Print the tokens, coloured by log-probability.")] = False,
    state: State = Path(".etude"),
    as_json: AsJson = False,
) -> None:
    """Read one attempt: turns, calls, results, changes, versions, verdict and reward.

    Examples:

        etude rollout show

        etude rollout show h-20261125T031500-8f3a --tokens

        etude rollout show r-20261125T010203-77aa/a-0b1c2d
    """
    try:
        if not id:
            return _list(kept.records(state / "attempts"), as_json)
        view = _view(id, state)
    except FAILURES as error:
        raise _refuse(str(error), 1) from None
    except MISTAKES as error:
        raise _refuse(str(error)) from None
    if as_json:
        print(json.dumps(_as_json(view), indent=2))
    else:
        show(Console(), view, tokens=tokens)


@app.command()
def export(
    id: Annotated[str, typer.Argument(help="As for `show`.", show_default=False)],
    atif: Annotated[Path, typer.Option("--atif", help="File to write; replaced as a whole.", show_default=False)],
    state: State = Path(".etude"),
) -> None:
    """Write one attempt as ATIF 1.8, for other tools.

    Example: `etude rollout export h-20261125T031500-8f3a --atif attempt.json`
    """
    try:
        require_writable(atif, "--atif")
        made = document(_view(id, state))
        write_whole(atif, json.dumps(made, indent=1) + "\n")
    except FAILURES as error:
        raise _refuse(str(error), 1) from None
    except MISTAKES as error:
        raise _refuse(str(error)) from None
    _say(Console(stderr=True), f"{atif}: {len(made['steps'])} steps")


def _view(id: str, state: Path) -> View:
    if "/" in id:
        run, _, name = id.partition("/")
        settings = read(RolloutSettings, state=state)
        return view_of(run, name, stores.connect(settings.objects_url), settings)
    found = kept.load(state / "attempts", id)
    record = found.record
    unknown = {
        (True, True): versions(found.trajectory),
        (True, False): "unknown, recorded as 0; ids and log-probabilities are exact",
    }
    return View(
        title=record.id,
        facts={
            "problem": f"{record.source} ({record.kind})",
            "policy": f"{record.policy}, temperature {record.temperature:g}, format {record.format}",
            "made": f"{record.at}, {record.seconds:.1f} s",
            "versions": unknown.get((record.trainable, record.versions_known), "none: no training data in it"),
            "effort": effort(found.trajectory),
            **{name: text for name, text in record.notes.items() if text},
        },
        opening=found.conversation.messages,
        turns=found.conversation.turns,
        diff=found.diff,
        trajectory=found.trajectory,
        renderer=found.renderer,
        outcome=outcome(record.stop, record.verdict, record.ungraded, record.error),
        solved=record.verdict.solved if record.verdict is not None else None,
        details=details(record.verdict),
        unit="tokens" if record.digest else "bytes",
        policy=record.policy,
        tools=found.conversation.tools,
    )


def _as_json(view: View) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.to_builtins(
        {"turns": view.turns, "opening": view.opening, "effort": view.trajectory.effort, "stop": view.trajectory.stop}
    )
    return {
        "id": view.title,
        "facts": dict(view.facts),
        **built,
        "diff": view.diff,
        "outcome": view.outcome,
        "solved": view.solved,
        "findings": {name: list(evidence) for name, evidence in view.findings.items()},
        "reward": view.reward,
        "terms": dict(view.terms),
    }


def _list(records: list[kept.Record], as_json: bool) -> None:
    if as_json:
        print(json.dumps(msgspec.to_builtins(records), indent=2))
        return
    table = Table(Column("attempt", no_wrap=True), "problem", "policy", "turns", "outcome")
    for record in records[:LISTED]:
        ended = outcome(record.stop, record.verdict, record.ungraded, record.error)
        cells = (record.id, record.problem, record.policy, str(record.effort.turns), ended)
        table.add_row(*(Text(visible(cell)) for cell in cells))
    Console().print(table if records else "no attempt yet: `etude rollout run --help` shows how to make one")


def _style(record: kept.Record) -> str:
    if record.verdict is None:
        return "bold red" if record.error else "bold"
    return "bold green" if record.verdict.solved else "bold yellow"


def _where(state: Path) -> str:
    return "" if state == Path(".etude") else f" --state {state}"


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(visible(text), style), soft_wrap=True, highlight=False)


def _refuse(text: str, code: int = 2) -> typer.Exit:
    print(visible(f"etude rollout: {text}"), file=sys.stderr)
    return typer.Exit(code)


if __name__ == "__main__":
    app()
