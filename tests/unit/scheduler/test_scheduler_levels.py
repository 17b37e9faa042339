"""Levels of hardness: what is learnt of a repository, a language or a size holds for its problems that nobody tried."""

from __future__ import annotations

import numpy as np
import pytest

from services.scheduler.calibration import Calibration, report
from services.scheduler.catalogue import Catalogue
from services.scheduler.hardness import Hardness, Outcome

LEVELS = {
    "repository": "bugfix/boundary/repository-{}:x/language-python/size-08",
    "language": "bugfix/boundary/language-{}/size-08",
    "size": "bugfix/boundary/language-python/size-{}",
}


@pytest.mark.parametrize("level", LEVELS)
def test_an_unseen_problem_of_a_hard_level_is_expected_to_fail_more_often_than_one_of_an_easy(level: str) -> None:
    hardness, category = Hardness(), LEVELS[level].format
    for i in range(6):
        hardness.observe(Outcome(category("hard"), f"hard-cell-{i}", 8, 1, 3.0, 20.0, 0))
        hardness.observe(Outcome(category("easy"), f"easy-cell-{i}", 8, 6, 3.0, 20.0, 0))
    hard, new, easy = hardness.chance([category(x) for x in ("hard", "new", "easy")], [None] * 3)
    assert hard < 0.25 < 0.6 < easy
    assert hard < new < easy


def test_a_repository_that_is_the_cell_of_its_problems_is_a_level_of_its_own() -> None:
    hardness, category = Hardness(), "bugfix/boundary/language-python/size-08"
    for _ in range(6):
        hardness.observe(Outcome(category, "a/hard", 8, 1, 3.0, 20.0, 0))
        hardness.observe(Outcome(category, "b/easy", 8, 6, 3.0, 20.0, 0))
    other = "feature/function/language-python/size-05"
    hard, new, easy = hardness.chance([other] * 3, ["a/hard", None, "b/easy"])
    assert hard < new < easy


def simulated(seed: int, *, levels: bool, languages: int = 3) -> Calibration:
    """A run over repository problems whose odds of success follow from kind, repository, language and size. `levels`: the estimate
    is told language and size; else the kind and the repository alone."""
    rng = np.random.default_rng(seed)
    kinds, repositories, spoken = rng.normal(0, 0.7, 5), rng.normal(0, 0.7, 40), rng.normal(0, 1.0, languages)
    rows, logits = [], {}
    for i in range(3000):
        kind, repository, size = int(rng.integers(5)), int(rng.integers(40)), int(rng.integers(4, 12))
        language = repository % languages
        tags = f"/language-{language}/size-{size:02d}" if levels else ""
        rows.append((f"p{i}", f"bugfix/kind-{kind}{tags}", f"repository-{repository}", "pack"))
        logits[f"p{i}"] = kinds[kind] + repositories[repository] + spoken[language] - 0.4 * (size - 7.5)
    catalogue, hardness = Catalogue(), Hardness()
    catalogue.add(rows)
    for step in range(80):
        for problem in catalogue.draw(hardness, 16, step=step, seed=seed, number=1 + 16 * step):
            solved = int(rng.binomial(8, 1 / (1 + np.exp(-logits[problem] - 0.5 - step / 80))))
            hardness.observe(Outcome(*catalogue.kind(problem), 8, solved, 3.0, 20.0, step))
    return hardness.calibration


@pytest.mark.parametrize("seed", [0, 1])
def test_estimates_with_levels_are_calibrated_and_tell_more_than_without(seed: int) -> None:
    told, untold = (report(simulated(seed, levels=levels).newest) for levels in (True, False))
    assert told.error <= 0.05
    assert told.brier < untold.brier


def test_a_level_that_all_problems_share_does_no_harm() -> None:
    assert report(simulated(2, levels=True, languages=1).newest).error <= 0.05
