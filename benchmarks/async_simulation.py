"""What pacing costs: a trainer, slots and heavy-tailed attempts, simulated under the shipped rule and under those of others.

Attempts last 10 s to 2 h, log-normally; a bound of so many steps holds at least 999 of 1,000 of them. Every rule sees the same
attempts. `étude` is the shipped gate; `async.desk_against_gate` says how far the whole scheduler, its own state machine on a
ledger, differs from it in the trainer's idle time. `as far ahead as allowed` and `paced by the oldest` are variants of it
(services/scheduler/simulation/rules.py).

`idle_limit`: no rule could do with less, given when the attempts began. An attempt of the version of step v is trained in step
v + bound + 1 at the latest, which begins after it has ended; meanwhile the trainer makes at most `bound` steps. So it is idle for
what the attempt lasts beyond `bound` steps. Summed over attempts that do not overlap, chosen so that the sum is greatest.

`throughput_vs_best`: groups an hour over those of the best other rule that keeps the bound. Those throw attempts away, and with
them the long ones: the bias by length stands beside it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.records import Bench, record
from services.scheduler.simulation.desk import Shipped
from services.scheduler.simulation.durations import HeavyTailed
from services.scheduler.simulation.fleet import Fleet, Rule, simulate
from services.scheduler.simulation.measures import Measures, measure
from services.scheduler.simulation.rules import ALTERNATIVES, Ahead, Oldest, Paced

# (median s, spread, seconds of a step, bound): in each the bound times the step is at least the 0.999 quantile.
SHAPES = ((120.0, 0.6, 100.0, 8), (120.0, 0.6, 400.0, 2), (120.0, 1.5, 900.0, 8), (600.0, 1.2, 1800.0, 4))
SPARE = 1.5  # times the slots that the mean asks for
STEPS, QUICK_STEPS = 200, 60
SEEDS, QUICK_SEEDS = 3, 1
NAMES = {
    "étude": "",
    "as far ahead as allowed": "ahead.",
    "paced by the oldest": "oldest.",
    "synchronous": "synchronous.",
    "drop what is stale": "drop_stale.",
    "capacity (AReaL)": "capacity.",
}
LIMITS = {
    "trainer_idle": "at most 0.05",
    "idle_limit": "",
    "discarded_tokens": "at most 0.01",
    "staleness_violations": "0",
    "throughput_vs_best": "at least 1",
    "age_mean": "",
    "bias": "0",
}


def fleet_of(durations: HeavyTailed, step_s: float, bound: int) -> Fleet:
    """Raises AssertionError where the bound does not hold 999 of 1,000 attempts."""
    sample = durations.groups(50_000, 8, np.random.default_rng(0))
    assert np.quantile(sample, 0.999) <= bound * step_s
    slots = SPARE * float(sample.mean()) * 16 * 8 / step_s
    return Fleet(slots=round(slots), groups_per_step=16, group_size=8, max_staleness=bound, step_s=step_s)


def run(rule: Rule, fleet: Fleet, durations: HeavyTailed, steps: int, seed: int, resolution_s: float = 0.0) -> Measures:
    history = simulate(rule, fleet, durations, steps=steps, seed=seed, resolution_s=resolution_s)
    return measure(rule.name, fleet, history, warm_up=steps // 4)


def main() -> None:
    bench = Bench.start(__doc__)
    steps, seeds = bench.pick(STEPS, QUICK_STEPS), bench.pick(SEEDS, QUICK_SEEDS)
    rules: tuple[Callable[[], Rule], ...] = (Paced, Ahead, Oldest, *ALTERNATIVES)
    worst: dict[str, list[list[float]]] = {}
    for median, spread, step_s, bound in SHAPES:
        durations = HeavyTailed(median, spread)
        fleet = fleet_of(durations, step_s, bound)
        shape = f"median {median:g} s, spread {spread:g}, {bound} steps of {step_s:g} s, {fleet.slots} slots"
        found = [[run(rule(), fleet, durations, steps, seed) for seed in range(seeds)] for rule in rules]
        best = max(np.median([one.groups_per_hour for one in others]) for others in found[3:])
        for these in found:
            name = these[0].rule
            figures = {
                "trainer_idle": [one.trainer_idle for one in these],
                "idle_limit": [one.idle_limit for one in these],
                "discarded_tokens": [one.discarded for one in these],
                "staleness_violations": [float(one.too_old) for one in these],
                "throughput_vs_best": [float(one.groups_per_hour / best) for one in these],
                "age_mean": [one.age_mean for one in these],
                "bias": [one.bias for one in these],
            }
            for figure, values in figures.items():
                bench.add(
                    record(
                        f"async.{NAMES[name]}{figure}.{bound}x{step_s:g}",
                        f"{name}; {shape}",
                        values,
                        "",
                        LIMITS[figure],
                    )
                )
            if these is found[0]:
                for figure, values in figures.items():
                    worst.setdefault(figure, []).append(values)
    for figure in ("trainer_idle", "discarded_tokens", "staleness_violations", "throughput_vs_best"):
        choose = min if figure == "throughput_vs_best" else max
        values = choose(worst[figure], key=lambda some: float(np.median(some)))
        bench.add(record(f"async.{figure}", "étude, the worst of these fleets", values, "", LIMITS[figure]))
    median, spread, step_s, bound = SHAPES[1]
    durations = HeavyTailed(median, spread)
    fleet = fleet_of(durations, step_s, bound)
    with tempfile.TemporaryDirectory() as folder:
        shipped = Shipped(fleet, Path(folder), problems=2 * QUICK_STEPS * fleet.groups_per_step)
        desk = run(shipped, fleet, durations, QUICK_STEPS, 0, resolution_s=step_s / 200)
        shipped.close()
    gate = run(Paced(), fleet, durations, QUICK_STEPS, 0, resolution_s=step_s / 200)
    difference = [desk.trainer_idle - gate.trainer_idle]
    bench.add(
        record(
            "async.desk_against_gate", "the trainer's idle time: the scheduler's less the gate's", difference, "", "0"
        )
    )
    bench.end()


if __name__ == "__main__":
    main()
