"""What came of a demo: figures as JSON, a table, a plot, and three attempts before and after to read."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from etude.demo import by_kind
from etude.demo.options import DemoOptions
from etude.demo.progress import Progress
from etude.demo.watch import GAIN_STEPS
from shared.contracts.run import Ref, RunConfig
from shared.contracts.trajectory import Trajectory, unpack
from shared.objects import Objects
from shared.output import NotWritable, require_writable, write_whole
from shared.renderers import Renderer
from shared.statistics import paired_difference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPANIONS = (".png", ".md")
BEST_OF_8, BEST_OF_K = "best_of_8", "best_of_k"
# Key in report.json -> what a person reads, and how it is written.
ROWS = (
    ("pass_at_1", "held-out pass@1, temperature 1", "{:.1%}"),
    ("first_edit", "right with the first edit alone", "{:.1%}"),
    (BEST_OF_8, "best of {k}", "{:.1%}"),
    ("greedy", "pass@1, greedy", "{:.1%}"),
    ("tokens_per_solved", "sampled tokens per solved task", "{:,.0f}"),
)


def figures_of(evaluation: dict[str, Any]) -> dict[str, Any]:
    """The figures of one evaluation under the names that report.json promises. With fewer than eight attempts a problem there
    are no eight to choose from: `best_of_8` is null, and `best_of_k` and `k` stand beside it. `greedy` and `tokens_per_solved`
    are null where there are none (nothing was solved), `ci95` where there are not two problems."""
    f = evaluation["figures"]
    k = int(f["k"])
    best = {BEST_OF_8: f["best_of_k"]} if k == 8 else {BEST_OF_8: None, BEST_OF_K: f["best_of_k"], "k": k}
    return {
        "pass_at_1": f["pass_at_1"],
        "ci95": [f["pass_at_1_low"], f["pass_at_1_high"]] if f["problems"] > 1 else None,
        "first_edit": f["first_edit"],
        **best,
        "greedy": f.get("greedy"),
        "tokens_per_solved": f.get("tokens_per_solved"),
        "problems": int(f["problems"]),
        "samples": int(f["samples"]),
        "infrastructure_errors": int(f["infrastructure_errors"]),
    }


def per_problem(evaluation: dict[str, Any], key: str) -> dict[str, float]:
    """Problem id -> share of its samples for which `key` (solved | first_edit) holds."""
    return {name: row[key] / row["samples"] for name, row in evaluation["problems"].items() if row["samples"]}


def paired(before: dict[str, Any], after: dict[str, Any], key: str, seed: int = 0) -> dict[str, Any]:
    """Difference over the problems that both evaluations have, with its bootstrap interval over problems; null where there are
    not two."""
    a, b = per_problem(before, key), per_problem(after, key)
    common = sorted(a.keys() & b.keys())
    mean, low, high = paired_difference(np.array([a[k] for k in common]), np.array([b[k] for k in common]), seed=seed)
    return {"mean": mean, "ci95": [low, high] if len(common) > 1 else None, "problems": len(common)}


def within(ci95: list[float] | None, form: str) -> str:
    """` [low, high]` behind a figure, both in `form`; nothing where there is no interval."""
    return f" [{', '.join(form.format(end) for end in ci95)}]" if ci95 else ""


def in_points(gain: dict[str, Any]) -> str:
    """A difference and its interval: `+1.5 points [-0.5, +3.5]`."""
    ends = gain["ci95"] and [100 * end for end in gain["ci95"]]
    return f"{100 * gain['mean']:+.1f} points{within(ends, '{:+.1f}')}"


def audit(state: Path, run: str) -> dict[str, Any]:
    """The ledger's own audit, by the scheduler's command: lost, trained twice, violations, counts per topic."""
    done = subprocess.run(
        [sys.executable, "-m", "services.scheduler.cli", "audit", run, "--state", str(state), "--json"],
        capture_output=True,
        text=True,
    )
    try:
        return json.loads(done.stdout)
    except ValueError:
        return {"error": done.stderr[-2000:] or done.stdout[-2000:], "exit_code": done.returncode}


@dataclass(frozen=True, slots=True)
class Outcome:
    options: DemoOptions
    config: RunConfig
    before: dict[str, Any]
    after: dict[str, Any]
    progress: Progress
    audit: dict[str, Any]
    prepared_s: float
    kinds: dict[str, str] = field(default_factory=dict)  # problem id -> kind

    @property
    def sound(self) -> bool:
        """Nothing lost, nothing trained twice."""
        return self.audit.get("lost") == 0 and self.audit.get("trained_twice") == 0

    def as_json(self) -> dict[str, Any]:
        steps = self.progress.lineage
        before, after = per_problem(self.before, "solved"), per_problem(self.after, "solved")
        return {
            "run": self.config.run,
            "seed": self.options.seed,
            "before": figures_of(self.before),
            "after": figures_of(self.after),
            "gain": {
                "pass_at_1": paired(self.before, self.after, "solved"),
                "first_edit": paired(self.before, self.after, "first_edit"),
            },
            "by_kind": by_kind.by_kind(before, after, self.kinds),
            "minutes": self.progress.minutes,
            "steps": steps[-1].step if steps else 0,
            "trained_twice": self.audit.get("trained_twice"),
            "lost": self.audit.get("lost"),
            "staleness_violations": self.audit.get("staleness_violations"),
            "greatest_age": max((s.age for s in steps), default=0),
            "attempts": len(self.progress.practice.attempts),
            "tokens": self.progress.practice.tokens,
            "counts": {"bus": self.progress.counts(), "ledger": self.audit.get("counts", {})},
            "seconds": {
                "prepare": self.prepared_s,
                "evaluation_before": self.before.get("seconds"),
                "evaluation_after": self.after.get("seconds"),
            },
            "options": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self.options).items()},
        }


def require_place(path: Path) -> None:
    """For the report, asked before the work; its folder is made. Raises NotWritable."""
    if path.suffix in COMPANIONS:
        raise NotWritable(
            f"--report {path}: plot and text go beside it, as {' and '.join(COMPANIONS)}; give a file that ends otherwise (.json)"
        )
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    require_writable(path, "--report")


def write(outcome: Outcome, path: Path, objects: Objects, console: Console) -> None:
    """The table on the console; report.json, report.png and report.md beside it."""
    figures = outcome.as_json()
    console.print(table(figures))
    if len(figures["by_kind"]) > 1:
        console.print(by_kind.table(figures["by_kind"]))
    write_whole(path, json.dumps(figures, indent=2) + "\n")
    gain = figures["gain"]["pass_at_1"]
    sure = "(95 % interval {:+.1f} to {:+.1f}) ".format(*(100 * end for end in gain["ci95"])) if gain["ci95"] else ""
    console.print(
        f"pass@1 {gain['mean'] * 100:+.1f} points {sure}"
        f"after {figures['minutes']:.1f} minutes, {figures['steps']} steps, {figures['attempts']} attempts; "
        f"lost {figures['lost']}, trained twice {figures['trained_twice']}, greatest age {figures['greatest_age']}.",
        highlight=False,
    )
    import matplotlib

    matplotlib.use("Agg")
    plot(outcome).savefig(path.with_suffix(".png"), dpi=130)
    text = readings(outcome, objects)
    path.with_suffix(".md").write_text(text)
    console.print(
        f"Figures: {path}   plot: {path.with_suffix('.png')}   three attempts before and after: {path.with_suffix('.md')}"
    )
    console.print(
        "What to try next: `etude demo --seed 2`; an ablation (--no-router-replay, --no-length-penalty, "
        "--uniform-sampling, --staleness 0); your own problems (--problems FILE.jsonl, docs/problems.md); `etude ledger audit "
        + outcome.config.run
        + "`."
    )


def table(figures: dict[str, Any]) -> Table:
    before, after = figures["before"], figures["after"]
    result = Table(title=f"{before['problems']} held-out problems × {before['samples']} attempts", title_justify="left")
    for column in ("", "before", "after"):
        result.add_column(column, justify="left" if not column else "right")
    for key, label, form in ROWS:
        cells = []
        for side in (before, after):
            value = side[BEST_OF_K if key == BEST_OF_8 and BEST_OF_K in side else key]
            text = "–" if value is None else form.format(value)
            if key == "pass_at_1":
                text += within(side["ci95"], "{:.1%}")
            cells.append(text)
        result.add_row(label.format(k=before.get("k", 8)), *cells)
    return result


def plot(outcome: Outcome) -> Figure:
    """Pass rate in practice over minutes, with the held-out figure before and after, and what the length did."""
    import matplotlib.pyplot as plt

    steps = outcome.progress.lineage
    start = outcome.progress.first_request or (steps[0].at if steps else 0.0)
    minutes = [max(0.0, s.at - start) / 60 for s in steps]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    solved = np.array([s.metrics.get("solved_share", np.nan) for s in steps]) * 100
    left.plot(minutes, solved, ".", color="#9ab", label="practice problems, per step")
    if len(solved) >= 5:
        left.plot(
            minutes[4:],
            np.convolve(solved, np.ones(5) / 5, "valid"),
            color="#246",
            label="practice problems, mean of 5 steps",
        )
    gains = [
        (minute, 100 * s.metrics["solved_gain"])
        for minute, s in zip(minutes, steps, strict=True)
        if "solved_gain" in s.metrics
    ]
    if len(gains) >= GAIN_STEPS:
        mean = np.convolve([gain for _, gain in gains], np.ones(GAIN_STEPS) / GAIN_STEPS, "valid")
        label = f"gain at equal difficulty, points, mean of {GAIN_STEPS} steps"
        left.plot([at for at, _ in gains[GAIN_STEPS - 1 :]], mean, color="#b06", label=label)
    ends = (0.0, max(minutes, default=1.0))
    for x, side, colour, label in (
        (ends[0], outcome.before, "#b60", "held-out problems, before"),
        (ends[1], outcome.after, "#063", "held-out problems, after"),
    ):
        f = figures_of(side)
        sure = [[abs(end - f["pass_at_1"]) * 100] for end in f["ci95"]] if f["ci95"] else None
        left.errorbar([x], [f["pass_at_1"] * 100], yerr=sure, fmt="o", capsize=4, color=colour, label=label)
    drawn = ", drawn by hardness" if outcome.config.schedule.hardness_sampling else ""
    left.set(
        xlabel=f"minutes of practice\n(practice problems are others than the held-out ones{drawn})",
        ylabel="attempts solved, %",
        title="Repairs that pass the hidden tests",
        ylim=(min(0.0, left.get_ylim()[0]), 1.25 * max(left.get_ylim()[1], 1.0)),  # room for the legend
    )
    left.legend(frameon=False, loc="upper left", fontsize="small", ncols=2)
    right.plot(
        minutes, [s.metrics.get("sampled_mean", np.nan) for s in steps], color="#246", label="tokens per attempt"
    )
    right.set(
        xlabel="minutes of practice",
        ylabel="sampled tokens per attempt",
        title="Effort, and the age of samples",
        ylim=(0, None),
    )
    ages = right.twinx()
    ages.step(minutes, [s.age for s in steps], color="#b60", alpha=0.6, where="post", label="greatest age")
    bound = outcome.config.schedule.max_staleness
    ages.set(ylabel="age of the oldest sample, steps", ylim=(0, bound + 2), yticks=range(bound + 2))
    right.legend(frameon=False, loc="lower left")
    ages.legend(frameon=False, loc="lower right")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    plt.close(figure)  # it stays whole; pyplot forgets it
    return figure


LEGEND = """`<L5>` is line 5 and `<i2>` its indentation; `<T1>` a visible test: arguments `<t>` expected `<got>` what the code
gives. `<edit><L5> 0<got> 1<end>`: in line 5 the first ` 0` becomes ` 1`. `<obs>` is the answer to a test, `<broken>` to a call
that could not be applied; too many of those end an attempt (`format_errors`). docs/base.md has the whole format. After a
test that failed or a broken call the agent reads the task alone once more: that is a new context, of which only what it wrote
is shown.
"""


def readings(outcome: Outcome, objects: Objects) -> str:
    """Three problems that practice taught: an attempt before and one after, as text with the special tokens visible."""
    from shared.renderers.registry import load_renderer

    chat = load_renderer(_base_directory())
    before, after = per_problem(outcome.before, "solved"), per_problem(outcome.after, "solved")
    taught = sorted((k for k in before if k in after), key=lambda k: (before[k] - after[k], k))[:3]
    parts = [
        f"# Attempts before and after practice\n\nRun {outcome.config.run}, seed {outcome.options.seed}. The three of "
        f"{len(before)} held-out problems that gained most, one attempt that failed before and one that passed after: not "
        "typical.\n\n" + LEGEND
    ]
    for name in taught:
        parts.append(f"\n## {name}: solved {before[name]:.0%} before, {after[name]:.0%} after\n")
        for title, evaluation, wanted in (("before", outcome.before, False), ("after", outcome.after, True)):
            attempt = _pick(evaluation["problems"][name]["attempts"], wanted)
            if attempt is None:
                continue
            trajectory = unpack(objects.get(msgspec.convert(attempt["trajectory"], Ref)))
            parts.append(f"\n### {title} ({'solved' if attempt['solved'] else 'not solved'}, {trajectory.stop})\n")
            parts.append("\n```\n" + "\n".join(_contexts(trajectory, chat)) + "\n```\n")
    return "".join(parts)


def _contexts(trajectory: Trajectory, chat: Renderer) -> Iterator[str]:
    """The text of every context; where one begins with the first one's prompt, without it."""
    prompt: list[int] = []
    for segment in trajectory.segments:
        tokens = segment.tokens.tolist()
        at = int(segment.loss_mask.argmax())  # a segment has at least one sampled token
        again = tokens[:at] == prompt
        prompt = prompt or tokens[:at]
        yield chat.text(tokens[at:] if again else tokens)


def _pick(attempts: list[dict[str, Any]], solved: bool) -> dict[str, Any] | None:
    """The first attempt with this outcome, else the first at all."""
    return next((a for a in attempts if a["solved"] is solved), attempts[0] if attempts else None)


def _base_directory() -> Path:
    from etude.demo.prepare import BASE

    return BASE
