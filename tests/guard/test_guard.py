"""An attempt's path gives the same bytes as it gave when the digest below was taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guard.digest import count, fold, missing, portable
from tests.guard.problems import FIXED_CONTEXT, fixed
from tests.guard.world import play

ATTEMPTS, SEED = 240, 1
# A change that means to alter trajectories, verdicts or rewards takes a new digest from `python -m tests.guard --attempts 240`.
# For any other change a new digest is a defect; --json and --against name the attempts and the parts that differ.
DIGEST = "dbfa5138919676572a5f1e875e0ca6ac"


@pytest.mark.parametrize("concurrency", [48, 3])  # the order of requests decides nothing
def test_trajectories_verdicts_and_rewards_are_the_same_bytes_as_before(tmp_path: Path, concurrency: int) -> None:
    outcomes = play(tmp_path, fixed(), ATTEMPTS, SEED, context=FIXED_CONTEXT, concurrency=concurrency)
    assert missing(count(outcomes, FIXED_CONTEXT)) == []
    assert fold({one.request.key.attempt: portable(one) for one in outcomes}) == DIGEST
