"""Whether the scheduler's estimate of hardness is right: predicted against actual solve rate, on runs that are simulated with the
scheduler's own catalogue, estimate and draws.

A population of problems has categories of two tags, cells of relatives, and a difficulty of its own on top of both. The policy gets
better by the step. Attempts are independent given the problem and the step. Each run draws groups as the scheduler does, and
the estimate hears of them in order. Nothing else is known to it.

`calibration.error`: the expected calibration error over the newest groups (`services/scheduler/calibration.py`); beside it the
error that groups of this number would show by chance if every prediction were exactly right. `calibration.silent_over`: the
predicted share of groups without a signal, less the actual one. `--json F` also draws predicted against actual: F with the
suffix .png.
"""

from __future__ import annotations

import numpy as np

from benchmarks.records import Bench, record
from services.scheduler.calibration import Calibration, Prediction, report
from services.scheduler.catalogue import Catalogue
from services.scheduler.hardness import Hardness, Outcome
from services.scheduler.pictures import reliability

STEPS, GROUPS, ATTEMPTS = 120, 16, 8
SEEDS = 3
PROBLEMS, PER_CELL = 20_000, 10


def population(rng: np.random.Generator, spread: float) -> tuple[list[tuple[str, str, str, str]], np.ndarray]:
    """Problems as the catalogue takes them, and the log-odds that the policy of step 0 solves each. `spread`: of the problem's own
    difficulty, in log-odds, beyond its tags and its cell."""
    kinds, bands = rng.normal(0, 1.0, 6), np.linspace(1.5, -3.0, 13)
    rows, logits = [], np.zeros(PROBLEMS)
    for i in range(PROBLEMS):
        if i % PER_CELL == 0:
            cell, kind = rng.normal(0, 0.7), int(rng.integers(6))
        band = int(rng.integers(13))
        rows.append((f"p{i}", f"debugging/kind-{kind}/surprise-{band:02}", f"cell-{i // PER_CELL}", "pack"))
        logits[i] = -0.5 + kinds[kind] + bands[band] + cell + rng.normal(0, spread)
    return rows, logits


def simulate(seed: int, *, gain: float, spread: float, weighted: bool = True) -> Calibration:
    """`gain`: log-odds that the policy wins over the whole run. `weighted`: hardness decides what is drawn."""
    rng = np.random.default_rng(seed)
    rows, logits = population(rng, spread)
    catalogue, hardness = Catalogue(), Hardness()
    catalogue.add(rows, checked=True)
    number = 1
    for step in range(STEPS):
        drawn = catalogue.draw(hardness if weighted else None, GROUPS, step=step, seed=seed, number=number)
        number += len(drawn)
        for problem in drawn:
            odds = logits[int(problem[1:])] + gain * step / STEPS
            chance = 1 / (1 + np.exp(-odds))
            category, cell = catalogue.kind(problem)
            turns, thinking = 2 + 3 * (1 - chance) + rng.random(), 20 + 60 * (1 - chance) * rng.random()
            solved = int(rng.binomial(ATTEMPTS, chance))
            hardness.observe(Outcome(category, cell, ATTEMPTS, solved, turns, thinking, step))
    return hardness.calibration


def by_chance(seed: int, found: Calibration) -> float:
    """The error of predictions that are exactly right, by the same number of groups that differ as these do."""
    rng = np.random.default_rng(seed)
    strength = 1 / found.spread - 1

    def again(one: Prediction) -> Prediction:
        chance = rng.beta(one.chance * strength, (1 - one.chance) * strength)
        return Prediction(one.chance, one.silent, one.attempts, int(rng.binomial(one.attempts, chance)))

    return float(np.mean([report(map(again, found.newest)).error for _ in range(20)]))


def main() -> None:
    bench = Bench.start(__doc__)
    every: list[Prediction] = []
    for gain in (0.0, 1.5, 3.0):
        for spread in (0.5, 1.5):
            for weighted in (True, False):
                runs = [
                    simulate(seed, gain=gain, spread=spread, weighted=weighted) for seed in range(bench.pick(SEEDS, 1))
                ]
                shown = [report(run.newest) for run in runs]
                drawn = "hardness" if weighted else "uniform"
                key = f"{drawn}.gain{gain:g}.spread{spread:g}"
                what = f"drawn by {drawn}; the policy wins {gain:g} log-odds, problems differ by {spread:g}"
                chance = float(np.mean([by_chance(seed, run) for seed, run in enumerate(runs)]))
                limit = f"at most 0.05; by chance {chance:.3f}"
                bench.add(record(f"calibration.error.{key}", what, [one.error for one in shown], "", limit))
                over = [one.silent_predicted - one.silent for one in shown]
                bench.add(record(f"calibration.silent_over.{key}", what, over, "", "0"))
                if weighted:
                    every += [one for run in runs for one in run.newest]
    together = report(every)
    bench.add(record("calibration.error", "all that hardness drew", [together.error], "", "at most 0.05"))
    bench.end()
    if bench.json:
        bench.json.with_suffix(".png").write_bytes(reliability(together, "simulated runs"))


if __name__ == "__main__":
    main()
