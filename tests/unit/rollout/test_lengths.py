"""Attempts that lose their workers end as long as others do; begun again from their task they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.attempts.lengths import ks_p, played


def test_equal_samples_cannot_be_told_apart_and_shifted_ones_can() -> None:
    a = list(range(100))
    assert ks_p(a, a) == 1.0
    assert ks_p(a, [value + 3 for value in a]) > 0.05
    assert ks_p(a, [value + 40 for value in a]) < 1e-6


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.nightly)])
def test_kills_every_thirty_seconds_do_not_make_long_attempts_rarer(tmp_path: Path, count: int) -> None:
    calm = played(tmp_path, count, "calm", kills=False)
    killed = played(tmp_path, count, "kills", kills=True)
    again = played(tmp_path, count, "again", kills=True, resume=False)
    assert len(calm) == len(killed) == count  # none is lost for good
    assert ks_p(calm, killed) > 0.05
    assert ks_p(calm, again) < 1e-4
    assert len(again) < count
