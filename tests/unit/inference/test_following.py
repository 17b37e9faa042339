"""Which version a replica should serve, from what it has heard."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from services.inference.following import Following
from services.inference.wire import version_spans
from shared.contracts.messages import EvalFinished, EvalRequested, PolicyPromoted, PolicyPublished, RunStatus
from shared.contracts.run import Ref
from tests.ruling import running, status

REF = Ref(key="k", size=1, checksum="0" * 32)


def start(run: str) -> RunStatus:
    return status(run, "running", REF)


def knowing(*runs: str, **more: Any) -> Following:
    return Following(statuses=running(*runs), **more)


def version(run: str, incarnation: int, serial: int) -> PolicyPublished:
    return PolicyPublished(run=run, serial=serial, incarnation=incarnation, step=serial, parent=-1, manifest=REF)


def test_the_run_started_last_is_served_unless_one_is_named():
    following = Following()
    assert following.runs() == []
    for run in ("a", "b"):
        following.statuses.hear(start(run))
    assert following.runs() == ["b", "a"]
    assert knowing("a", run="c").runs() == []
    assert knowing("a", "b", run="a").runs() == ["a"]


def test_a_run_that_is_started_beside_others_is_served_by_replicas_alone_that_are_bound_to_it():
    following, bound = Following(), Following(run="b")
    for one in (following, bound):
        one.statuses.hear(start("a"))
        one.statuses.hear(status("b", "running", REF, beside=True))
    assert following.runs() == ["a"]
    assert bound.runs() == ["b"]
    following.statuses.hear(start("c"))
    assert following.runs() == ["c", "a"]
    following.pinned_run = "b"
    assert following.runs() == ["b"]  # somebody asked for a version of it


@pytest.mark.parametrize("end", ["stopping", "finished"])
def test_a_run_that_is_over_before_its_first_version_is_served_only_where_no_other_is_left(end):
    following = Following()
    for run in ("a", "b", "c"):
        following.statuses.hear(start(run))
    following.published(version("b", 0, 0))
    for run in ("b", "c"):
        following.statuses.hear(status(run, end))
    assert following.runs() == ["b", "a"]  # what b learnt may still be evaluated
    following.statuses.hear(status("c", "running"))
    assert following.runs() == ["c", "b", "a"]
    for run in ("a", "b", "c"):
        following.statuses.hear(status(run, end))
    assert following.runs() == ["b"]


def test_the_newest_version_of_the_highest_incarnation_wins_in_whatever_order_they_arrive():
    versions = [version("a", 0, 1), version("a", 0, 9), version("a", 1, 5), version("a", 1, 6), version("b", 7, 99)]
    for order in itertools.permutations(versions):
        following = Following()
        for message in order:
            following.published(message)
        newest = following.newest("a")
        assert newest is not None
        assert (newest.incarnation, newest.serial) == (1, 6)


def test_version_spans_cover_all_sampled_tokens_once():
    assert version_spans(np.array([], np.int32)) == []
    spans = version_spans(np.array([3, 3, 4, 7, 7], np.int32))
    assert spans == [
        {"version": "3", "start": 0, "end": 2},
        {"version": "4", "start": 2, "end": 3},
        {"version": "7", "start": 3, "end": 5},
    ]


def test_evaluations_are_served_in_the_order_in_which_they_were_asked_for() -> None:
    following = Following()

    def asked(name: str, serial: int, run: str = "a") -> EvalRequested:
        return EvalRequested(run=run, eval=name, serial=serial, pack=REF, pack_hidden=REF)

    def ended(name: str, run: str = "a") -> EvalFinished:
        return EvalFinished(run=run, eval=name, serial=0, report=REF, figures={})

    following.evaluation(ended("early"))  # another topic: it may be heard before
    for message in (
        asked("early", 9),
        asked("other", 7, "b"),
        asked("first", 4),
        asked("second", 2),
        asked("first", 4),
    ):
        following.evaluation(message)
    assert (following.evaluated("a"), following.evaluated("b"), following.evaluated("c")) == (4, 7, None)
    following.evaluation(ended("first"))
    assert following.evaluated("a") == 2
    following.evaluation(ended("second"))
    assert following.evaluated("a") is None


def test_where_promotions_are_followed_the_last_one_holds_whatever_is_started_or_published():
    following = Following(promotions=True)
    for run in ("a", "b"):
        following.statuses.hear(start(run))
        following.published(version(run, 0, 7))
    assert following.runs() == []
    for run, serial in (("a", 3), ("b", 5), ("a", 2)):
        following.promotion(PolicyPromoted(run=run, serial=serial))
    following.statuses.hear(status("a", "finished"))
    following.statuses.hear(start("c"))
    assert following.runs() == ["a"]
    assert (following.promoted("a"), following.promoted("b")) == (2, None)
    following.promotion(PolicyPromoted(run="d", serial=1))
    assert following.runs() == []  # nobody has heard of its start yet
    only = knowing("a", "b", run="b", promotions=True)
    for run in ("b", "a"):
        only.promotion(PolicyPromoted(run=run, serial=1))
    assert only.runs() == ["b"]


@pytest.mark.parametrize("promotions", [False, True])
def test_a_version_of_a_run_that_was_pinned_is_served_whatever_is_started_or_promoted(promotions):
    following = Following(promotions=promotions, past_heard=True)
    for run in ("a", "b"):
        following.statuses.hear(start(run))
    following.promotion(PolicyPromoted(run="b", serial=5))
    following.pinned, following.pinned_run = 3, "a"
    assert following.runs() == ["a"]
    assert (following.asked("a"), following.asked("b")) == (3, None)
    following.pinned, following.pinned_run = None, ""
    assert following.runs()[0] == "b"
    assert following.asked("b") == (5 if promotions else None)
