"""Splits are a fact about a module's name: on no machine does a held-out module serve training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from shared.problems.splits import CORPUS, SPLITS, split_of

ROOT = Path(__file__).parents[3]


def test_these_modules_stay_where_they_are():
    """If this fails, every shipped base policy has seen what it is tested on."""
    names = ("textwrap", "json.encoder", "calendar", "bisect", "difflib", "colorsys", "statistics", "fractions")
    assert [split_of("python", name) for name in names] == GOLDEN


GOLDEN = ["train", "dev", "rl", "held_out", "rl", "dev", "train", "rl"]


def test_the_corpus_is_train_altogether_and_no_dependency():
    assert {split_of("django", f"m{index}") for index in range(200)} == {"train"}
    pins = (ROOT / "constraints" / "linux.txt").read_text().splitlines()
    assert {"django", "sphinx"} <= CORPUS
    assert CORPUS.isdisjoint(pin.split("==")[0] for pin in pins)


def test_shares_are_as_promised():
    counts = Counter(split_of("numpy", f"m{index}") for index in range(20_000))
    assert set(counts) == set(SPLITS)
    for split, share in (("train", 0.45), ("rl", 0.35), ("dev", 0.06), ("held_out", 0.14)):
        assert abs(counts[split] / 20_000 - share) < 0.01
