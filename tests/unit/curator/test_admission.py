"""Batches fit the bus, name every problem once, and are the same every time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.curator import admission
from shared.contracts import topics
from shared.contracts.codec import MAX_BYTES, encode
from shared.contracts.run import Ref, RunConfig
from shared.problems import FunctionProblem

REF = Ref(key="k", size=1, checksum="0" * 32)
CONFIG = RunConfig(run="r-1", base=REF, pack=REF, pack_hidden=REF)
NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=128)


def problems(names: list[str], cell: str = "") -> list[FunctionProblem]:
    return [FunctionProblem(id=name, files={"f.py": ""}, entry="f", visible=[], cell=cell) for name in names]


@given(st.lists(NAMES, unique=True, max_size=50), st.text(max_size=60))
def test_every_problem_once_and_its_own_relative_where_it_has_no_cell(names: list[str], cell: str):
    batches = list(admission.admitted(CONFIG, problems(names, cell)))
    merged = [(name, value) for batch in batches for name, value in batch.problems.items()]
    assert merged == [(name, ("debugging", cell or name)) for name in names]


def test_where_surprise_is_known_hardness_counts_by_it():
    surprise = {"easy": 0.2, "even": 2.7, "hopeless": 40.0}
    (batch,) = admission.admitted(CONFIG, problems([*surprise, "unknown"], cell="c"), admission.Known(surprise))
    assert batch.problems == {
        "easy": ("debugging/surprise-00", "c"),
        "even": ("debugging/surprise-05", "c"),
        "hopeless": (f"debugging/surprise-{len(admission.BANDS)}", "c"),
        "unknown": ("debugging", "c"),
    }


def test_levels_are_tags_behind_the_category_and_before_the_surprise():
    known = admission.Known({"b": 0.2}, {"a": ["language-go"], "b": ["language-go", "size-05"]})
    (batch,) = admission.admitted(CONFIG, problems(["a", "b", "c"], cell="x"), known)
    assert [category for category, _ in batch.problems.values()] == [
        "debugging/language-go",
        "debugging/language-go/size-05/surprise-00",
        "debugging",
    ]


def test_what_a_probe_found_out_comes_with_the_problems_that_it_tried():
    own = problems([f"{index:0>128}" for index in range(3000)])
    probed = {problem.id: (10_000, index) for index, problem in enumerate(own) if index % 3}
    batches = list(admission.admitted(CONFIG, own, admission.Known(probed=probed)))
    assert all(len(encode(topics.PROBLEMS_ADMITTED, batch)[0]) <= MAX_BYTES for batch in batches)
    assert all(batch.probed.keys() <= batch.problems.keys() for batch in batches)
    assert {name: counts for batch in batches for name, counts in batch.probed.items()} == probed


def test_thousands_of_problems_fit_the_bus_and_come_in_the_same_batches_again():
    own = problems([f"{index:0>128}" for index in range(5000)])
    batches = list(admission.admitted(CONFIG, own))
    assert all(len(encode(topics.PROBLEMS_ADMITTED, batch)[0]) <= MAX_BYTES for batch in batches)
    assert batches == list(admission.admitted(CONFIG, own))


def test_alerts_fit_the_bus_and_say_how_bad_it_is():
    reasons = {f"p{index}": "x" * 10_000 for index in range(100)}
    alert = admission.refused("r-1", reasons, 200)
    assert len(encode(topics.ALERTS, alert)[0]) <= MAX_BYTES
    assert (alert.severity, alert.what) == ("warning", "100 of 200 problems did not pass the gate")
    assert admission.refused("r-1", reasons, 100).severity == "critical"
