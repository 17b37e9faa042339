"""Records and the picture of a run of `benchmarks.learning.repository`. Pure, but for the file that `plot` writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.records import Record, record
from shared.statistics import bootstrap_mean, paired_difference

if TYPE_CHECKING:
    from benchmarks.learning.repository import State

WHAT = {"before_sft": "before SFT", "after_sft": "after SFT", "after_rl": "after RL"}
GAINS = (("sft_gain", "before_sft", "after_sft"), ("rl_gain", "after_sft", "after_rl"))
PREFIX = "learning.repository"


def to_records(state: State) -> list[Record]:
    """Return what is known so far: solve rates, paired gains, and the share of the time by activity."""
    found: list[Record] = []
    for name, what in WHAT.items():
        if (evaluation := state.evaluations.get(name)) is None:
            continue
        for way, ending in (("greedy", ""), ("sampled", ".sampled")):
            mean, low, high = bootstrap_mean(np.array(evaluation[way]))
            text = f"{state.model}: held-out solve rate {what}, {way}"
            found.append(
                record(f"{PREFIX}.{name}{ending}", text, [mean], "share", _interval(low, high, evaluation[way]))
            )
    for name, before, after in GAINS:
        if before not in state.evaluations or after not in state.evaluations:
            continue
        for way, ending in (("greedy", ""), ("sampled", ".sampled")):
            pair = [np.array(state.evaluations[one][way]) for one in (before, after)]
            mean, low, high = paired_difference(*pair)
            text = f"{state.model}: {WHAT[after]} less {WHAT[before]}, the same problems, {way}"
            found.append(record(f"{PREFIX}.{name}{ending}", text, [mean], "share", _interval(low, high, pair[0])))
    for activity, share in shares(state).items():
        text = f"{state.model}: share of the time, all stages"
        found.append(record(f"{PREFIX}.time.{activity}", text, [share], "share"))
    return found


def shares(state: State) -> dict[str, float]:
    """Return the share of each activity in the time of all stages and evaluations."""
    total: dict[str, float] = {}
    for activities in state.seconds.values():
        for name, seconds in activities.items():
            total[name] = total.get(name, 0.0) + seconds
    whole = sum(total.values())
    return {name: seconds / whole for name, seconds in sorted(total.items())} if whole else {}


def _interval(low: float, high: float, values: Any) -> str:
    return f"95 % interval {low:.3f} to {high:.3f}, {len(values)} problems"


def plot(state: State, out: Path) -> None:
    """Draw the loss on scripted actions, the solved share of RL's attempts, and the held-out solve rates."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (losses, solved, held_out) = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    for stage, label in (("pretrain", "pretraining (validation)"), ("sft", "SFT")):
        lines = [line for line in state.curve if line["stage"] == stage]
        losses.plot([line["minutes"] for line in lines], [line["loss"] for line in lines], label=label)
    losses.set_title("loss per action token", fontsize=10)
    losses.set_yscale("log")
    losses.legend(fontsize=8)
    lines = [line for line in state.curve if line["stage"] == "rl"]
    solved.plot([line["minutes"] for line in lines], [line["solved"] for line in lines])
    solved.set_title("RL: solved share of the step's attempts", fontsize=10)
    for axis in (losses, solved):
        axis.set_xlabel("minutes of the stage")
        axis.grid(alpha=0.3)
    names = [name for name in WHAT if name in state.evaluations]
    for offset, way in ((-0.1, "greedy"), (0.1, "sampled")):
        points = [bootstrap_mean(np.array(state.evaluations[name][way])) for name in names]
        means = [mean for mean, _, _ in points]
        bars = [[mean - low for mean, low, _ in points], [high - mean for mean, _, high in points]]
        held_out.errorbar(np.arange(len(names)) + offset, means, bars, fmt="o", capsize=3, label=way)
    held_out.set_xticks(range(len(names)), [WHAT[name] for name in names])
    held_out.set_title(f"{state.model}: held-out solve rate, 95 % intervals", fontsize=10)
    held_out.set_ylim(-0.02, 1.02)
    held_out.legend(fontsize=8)
    figure.savefig(out, dpi=110)
    plt.close(figure)
