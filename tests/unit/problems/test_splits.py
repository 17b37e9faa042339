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


def test_the_corpus_is_train_altogether_and_no_dependency_but_one_of_the_same_version():
    """A dependency of the corpus gives the train split alone, wherever it is installed; of another version it would give the
    base policy another corpus."""
    assert {split_of("django", f"m{index}") for index in range(200)} == {"train"}
    pins = pinned(ROOT / "constraints" / "linux.txt")
    corpus = pinned(ROOT / "shared" / "problems" / "corpus.txt")
    assert {"django", "sphinx"} <= CORPUS == set(corpus)
    assert {name: pins[name] for name in corpus.keys() & pins.keys()} == {"cryptography": corpus["cryptography"]}


def pinned(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines()
    return dict(line.partition(" ;")[0].split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_shares_are_as_promised():
    counts = Counter(split_of("numpy", f"m{index}") for index in range(20_000))
    assert set(counts) == set(SPLITS)
    for split, share in (("train", 0.45), ("rl", 0.35), ("dev", 0.06), ("held_out", 0.14)):
        assert abs(counts[split] / 20_000 - share) < 0.01
