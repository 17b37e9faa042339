"""An attempt's path gives the same bytes as it gave when the digest below was taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guard.digest import count, fold, missing, portable
from tests.guard.problems import FIXED_CONTEXT, fixed
from tests.guard.world import play

ATTEMPTS = 240  # of each seed
# A change that means to alter trajectories, verdicts or rewards takes new digests from
# `python -m tests.guard --attempts 240 --seed SEED`. For any other change a new digest is a defect; --json and --against name the
# attempts and the parts that differ.
DIGESTS = {
    1: "dbfa5138919676572a5f1e875e0ca6ac",
    2: "f3c641d239460d236bae32ab6e226f04",
    3: "1ee04362ed88334cf799e752264d6854",
}
COVERS = (1,)  # seeds whose attempts alone meet all that the guard counts


@pytest.mark.parametrize(
    ("seed", "concurrency"), [(1, 48), (1, 3), (2, 48), (3, 48)]
)  # the order of requests decides nothing
def test_trajectories_verdicts_and_rewards_are_the_same_bytes_as_before(
    tmp_path: Path, seed: int, concurrency: int
) -> None:
    outcomes = play(tmp_path, fixed(), ATTEMPTS, seed, context=FIXED_CONTEXT, concurrency=concurrency)
    if seed in COVERS:
        assert missing(count(outcomes, FIXED_CONTEXT)) == []
    assert fold({one.request.key.attempt: portable(one) for one in outcomes}) == DIGESTS[seed]
