"""Which version is the best of those that were measured: like with like, and no more surely than the figures say."""

from __future__ import annotations

from typing import Any

import pytest

from etude.acting import Refused
from etude.best import choose, told

RUN = "r-20260101T000000-aaaa"


def report(serial: int, solved: list[int], samples: int = 4, *, lost: int = 0, first: int = 0) -> dict[str, Any]:
    rows = {f"p{i}": {"samples": samples, "solved": n} for i, n in enumerate(solved, first)}
    share = sum(solved) / len(solved) / samples
    figures = {"pass_at_1": share, "pass_at_1_low": share - 0.1, "pass_at_1_high": share + 0.1, "first_edit": 0.0,
               "best_of_k": 0.5, "k": float(samples), "problems": float(len(solved)), "samples": float(samples),
               "greedy": None, "attempts": float(len(solved) * samples), "infrastructure_errors": float(lost)}  # fmt: skip
    return {"serial": serial, "figures": figures, "problems": rows}


def text(reports: list[dict[str, Any]], newest: int | None = None, *, gone: bool = False) -> str:
    return " ".join(told(RUN, choose(RUN, reports), newest, gone=gone))


def test_the_version_with_the_highest_share_is_the_best_with_its_interval_and_beside_the_newest() -> None:
    said = text([report(0, [0] * 20), report(10, [4] * 20), report(20, [3] * 20)], 20)
    assert (
        "version 10, 100.0% [90.0%, 110.0%] of 20 × 4, is the best of 3 that were measured so: versions 0, 10, 20."
        in said
    )
    assert (
        "Beside the newest, version 20: +25.0 points [+25.0, +25.0], paired over 20 problems; they can be told apart."
        in said
    )
    assert "cannot" not in said


def test_what_the_best_cannot_be_told_from_is_named() -> None:
    some, other = [0, 1, 2, 3, 4] * 4, [0, 1, 2, 4, 3] * 4
    reports = [report(0, [0] * 20), report(1, some), report(2, other), report(3, [0, 1, 2, 2, 3] * 4)]
    choice = choose(RUN, reports)
    assert (choice.serial, choice.untold) == (2, [1])  # of equals the newest
    assert "It cannot be told from version 1." in text(reports, 3)
    reports[3] = report(3, [4, 3, 1, 1, 0] * 4)
    assert "; it cannot be told from it. Nor can it be told from version 1." in text(reports, 3)


def test_on_one_problem_nothing_can_be_told_apart() -> None:
    said = text([report(0, [4]), report(1, [0])], 1)
    assert "version 0, 100.0% of 1 × 4, is the best" in said
    assert "version 1: +100.0 points, paired over 1 problems; it cannot be told from it" in said


def test_the_best_may_be_the_newest_and_the_newest_may_not_be_measured() -> None:
    two = [report(0, [0] * 5), report(7, [4] * 5)]
    assert "It is the newest." in text(two, 7)
    said = text(two, 9)
    assert "It is the newest of these." in said
    assert f"The newest, version 9, was not measured so: `etude measure {RUN}`" in said
    assert "was not measured" not in text(two)


def test_measurements_on_other_problems_or_with_other_attempts_are_not_mixed_and_are_named() -> None:
    few = [report(3, [4] * 5), report(4, [4] * 5), report(5, [4] * 5)]
    many = [report(0, [1] * 20), report(1, [2] * 20)]
    alone = [report(9, [8] * 20, samples=8)]
    elsewhere = [report(1, [4] * 20, first=7), report(8, [4] * 20, first=7)]
    choice = choose(RUN, few + many + alone)
    assert (choice.serial, choice.how) == (1, "20 × 4")
    assert choice.otherwise == {"5 × 4": [3, 4, 5], "20 × 8": [9]}
    assert "Not compared, for measured otherwise (5 × 4): versions 3, 4, 5." in text(few + many + alone)
    assert set(choose(RUN, many + elsewhere).alike) in ({0, 1}, {1, 8})


def test_of_a_version_that_was_measured_twice_in_one_way_the_first_counts() -> None:
    choice = choose(RUN, [report(1, [1] * 5), report(1, [4] * 5), report(2, [2] * 5)])
    assert (choice.serial, choice.alike[1]["problems"]["p0"]["solved"]) == (2, 1)


def test_a_measurement_that_came_to_no_verdict_counts_for_nothing() -> None:
    reports = [report(1, [1] * 5), report(2, [4] * 5, lost=5)]
    with pytest.raises(Refused, match=r"found measured 5 × 4: version 1; to choose, at least two"):
        choose(RUN, reports)
    with pytest.raises(Refused, match=f"found measured nothing; .*`etude measure {RUN} --versions N,M`"):
        choose(RUN, [])


def test_that_its_weights_are_deleted_is_said() -> None:
    two = [report(0, [0] * 5), report(7, [4] * 5)]
    assert "The weights of version 7 are deleted" in text(two, 7, gone=True)
