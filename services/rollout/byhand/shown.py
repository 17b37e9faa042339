"""An attempt for people, on a terminal. Everything that a model, a file or a server wrote goes through `visible`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from services.rollout.byhand.kept import Said
from services.rollout.byhand.watched import CallMade, ResultSeen, Turn
from shared.contracts.messages import Verdict
from shared.contracts.trajectory import Segment, Trajectory
from shared.renderers import Renderer
from shared.visible import visible

SHORT = 100  # characters of an argument, while an attempt runs
SHORT_LINES = 6  # of a result, while an attempt runs
WHOLE_PART = 8  # ids that one character may be spread over, at most
# Log-probability of a sampled token from which a style holds: the surer, the calmer.
COLOURS = ((-0.1, "green"), (-0.7, "cyan"), (-2.3, "yellow"), (-4.6, "red"), (float("-inf"), "bold white on red"))
LEGEND = "log-probability at least: -0.1 -0.7 -2.3 -4.6 below"


@dataclass(frozen=True, slots=True)
class View:
    """An attempt as it is shown, wherever it is stored. `facts`: name to text, in the order of the page. `terms`: the terms of the
    reward. `unit`: tokens or bytes. `policy`: its name; empty: unknown. `details`: more of the verdict, a line each. `tools`: the
    tools offered to the agent, as chat templates read them."""

    title: str
    facts: Mapping[str, str]
    opening: Sequence[Said]
    turns: Sequence[Turn]
    diff: str
    trajectory: Trajectory
    renderer: Renderer
    outcome: str
    solved: bool | None = None
    details: Sequence[str] = ()
    findings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    reward: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict)
    unit: str = "tokens"
    policy: str = ""
    tools: Sequence[dict[str, Any]] = ()


def show(console: Console, view: View, *, tokens: bool) -> None:
    """Print the whole attempt; with `tokens` its ids by log-probability in place of the turns."""
    console.print(Rule(_text(view.title, "bold"), align="left"))
    for name, fact in view.facts.items():
        _say(console, Text.assemble((f"{name}  ", "dim"), visible(fact)))
    if tokens:
        show_tokens(console, view.trajectory, view.renderer)
    else:
        for message in view.opening:
            console.print(Rule(_text(message.role, "dim"), align="left", style="dim"))
            _say(console, _text(message.content))
        for turn in view.turns:
            show_turn(console, turn, unit=view.unit)
        if view.diff:
            console.print(Rule(_text("changes", "dim"), align="left", style="dim"))
            for line in view.diff.splitlines():
                _say(console, _text(line, _diff_style(line)))
    show_end(console, view)


def show_end(console: Console, view: View) -> None:
    """Print how the attempt ended, what graders found and what the reward is made of."""
    console.print(Rule(style="dim"))
    style = {True: "bold green", False: "bold red", None: "bold"}[view.solved]
    _say(console, _text(view.outcome, style))
    for line in view.details:
        _say(console, _text(line, "dim"), indent=2)
    for name, evidence in view.findings.items():
        _say(console, Text.assemble((f"{visible(name)}  ", "yellow"), visible("; ".join(evidence))))
    if view.reward is not None:
        terms = ", ".join(f"{visible(name)} {value:+.4g}" for name, value in view.terms.items())
        _say(
            console, Text.assemble(("reward  ", "dim"), f"{view.reward:.4g}", (f"  = {terms}" if terms else "", "dim"))
        )


def outcome(stop: str, verdict: Verdict | None, ungraded: str, error: str = "") -> str:
    """Return in one line how an attempt ended and what its grade is."""
    if error:
        return f"{stop}: {error}"
    if verdict is None:
        return f"{stop}; not graded: {ungraded}"
    result = "solved" if verdict.solved else "not solved"
    why = f" ({verdict.error})" if verdict.error else ""
    return f"{stop}; {result}: {verdict.passed} of {verdict.total} tests passed{why}"


def details(verdict: Verdict | None) -> list[str]:
    """Return the hidden tests that did not pass, and what the grading left open, a line each. For the operator: the policy is
    told nothing of it."""
    if verdict is None:
        return []
    lines = [f"not passed: {name}" for name in verdict.failed]
    more = verdict.total - verdict.passed - len(verdict.failed)
    if verdict.failed and more > 0:
        lines.append(f"not passed: {more} more")
    return [*lines, *verdict.notes]


def show_turn(console: Console, turn: Turn, *, unit: str = "tokens", short: bool = False) -> None:
    """Print a turn; `short`: as it is told while the attempt runs."""
    facts = [f"{turn.tokens} {unit}"]
    if turn.sampling_s or turn.acting_s:
        facts.append(f"{turn.sampling_s + turn.acting_s:.1f} s")
    facts += [f"version {turn.versions[0]}–{turn.versions[1]}"] if turn.versions[0] != turn.versions[1] else []
    facts += ["cut short"] if turn.finish == "length" else []
    facts += [turn.fault] if turn.fault else []
    title = f"turn {turn.number} · {' · '.join(facts)}"
    if short:
        _say(console, _text(title, "bold"))
    else:
        console.print(Rule(_text(title, "bold"), align="left", style="dim"))
    if turn.thinking:
        _say(console, _text(_shortened(turn.thinking) if short else turn.thinking, "dim italic"), indent=2)
    if turn.text:
        _say(console, _text(_shortened(turn.text) if short else turn.text), indent=2)
    results = list(turn.results)
    for number, call in enumerate(turn.calls):
        _say(console, _call(call, short), indent=2)
        if number < len(results):
            _result(console, results[number], short)
    for result in results[len(turn.calls) :]:
        _result(console, result, short)
    if turn.restarts:
        _say(console, _text("the agent forgets this and begins again", "dim"), indent=2)


def _call(call: CallMade, short: bool) -> Text:
    arguments = call.arguments if isinstance(call.arguments, dict) else {}
    shown = ", ".join(f"{name}={_argument(value, short)}" for name, value in arguments.items())
    line = Text.assemble(("● ", "cyan"), (visible(call.name) or "?", "bold cyan"), f"({visible(shown)})")
    return line if not call.error else line.append("  not executed", "red")


def _argument(value: Any, short: bool) -> str:
    if isinstance(value, str) and not short and "\n" in value:
        return f"\n{value}\n"
    text = json.dumps(value, ensure_ascii=False)
    return text if not short or len(text) <= SHORT else f"{text[:SHORT]}…"


def _result(console: Console, result: ResultSeen, short: bool) -> None:
    text = result.text if result.ran else result.text or "passed over"
    if not text:
        return
    style = "red" if not result.ok else {True: "green", False: "yellow", None: "dim"}[result.passed]
    _say(console, _text(_shortened(text) if short else text, style), indent=4)


def _shortened(text: str) -> str:
    lines = text.strip("\n").split("\n")
    shown = [line if len(line) <= SHORT else f"{line[:SHORT]}…" for line in lines[:SHORT_LINES]]
    if len(lines) > SHORT_LINES:
        shown[-1:] = [f"… {len(lines) - SHORT_LINES + 1} more lines"]
    return "\n".join(shown)


def show_tokens(console: Console, trajectory: Trajectory, renderer: Renderer) -> None:
    """Print every segment, sampled tokens coloured by log-probability, all others dim."""
    _say(console, legend())
    for number, segment in enumerate(trajectory.segments):
        sampled = segment.loss_mask
        facts = f"{len(segment.tokens)} tokens, {int(sampled.sum())} sampled"
        if sampled.any():
            logprobs, versions = segment.logprobs[sampled], segment.versions[sampled]
            facts += f", mean log-probability {float(logprobs.mean()):.4f}, least {float(logprobs.min()):.4f}"
            facts += f", versions {int(versions.min())}–{int(versions.max())}, KV from {segment.oldest_kv_version}"
        else:
            facts += ": it has no log-probabilities"
        console.print(Rule(_text(f"segment {number}", "bold"), align="left", style="dim"))
        _say(console, _text(facts, "dim"))
        _say(console, coloured(segment, renderer))


def legend() -> Text:
    names = LEGEND.split(": ")[1].split()
    parts = [(f" {name} ", style) for name, (_, style) in zip(names, COLOURS, strict=True)]
    return Text.assemble((f"{LEGEND.split(': ')[0]}: ", "dim"), *parts)


def coloured(segment: Segment, renderer: Renderer) -> Text:
    """Return the tokens of a segment as one text. Ids that share a character share the least log-probability of theirs."""
    text = Text()
    for start, end, piece in pieces(segment.tokens, renderer):
        if segment.loss_mask[start:end].any():
            style = style_of(float(np.min(segment.logprobs[start:end][segment.loss_mask[start:end]])))
        else:
            style = "dim"
        text.append(visible(piece), style)
    return text


def pieces(tokens: np.ndarray, renderer: Renderer) -> Iterator[tuple[int, int, str]]:
    """Yield runs of ids that are whole characters together, as (start, end, text)."""
    start = 0
    ids = [int(token) for token in tokens]
    for end in range(1, len(ids) + 1):
        piece = renderer.text(ids[start:end])
        if piece.endswith("\ufffd") and end < len(ids) and end - start < WHOLE_PART:
            continue
        yield start, end, piece
        start = end


def style_of(logprob: float) -> str:
    return next(style for least, style in COLOURS if logprob >= least)


def _diff_style(line: str) -> str:
    if line.startswith(("+++", "---")):
        return "bold"
    return {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "")


def _text(text: str, style: str = "") -> Text:
    return Text(visible(text), style)


def _say(console: Console, text: Text, indent: int = 0) -> None:
    """Print as it is: rich neither reads markup in it nor colours it by itself."""
    if indent:
        lines = text.split("\n", allow_blank=True)
        text = Text("\n").join(Text(" " * indent).append_text(line) for line in lines)
    console.print(text, soft_wrap=True, highlight=False)
