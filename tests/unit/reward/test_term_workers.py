"""Terms in a process that can be killed: none of them stops a grader, and each that fails is named."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.reward import term_workers
from services.reward.behaviour import answer, observed
from services.reward.term_worker import Look
from services.reward.term_workers import TermWorkers
from shared import terms
from shared.contracts.graded import Finding
from shared.contracts.trajectory import pack
from shared.terms import Evidence, Found, Seen
from tests.plugins import forget
from tests.unit.reward.conftest import make

# What a package of somebody else's might bring. The pattern backtracks over 2^40 ways.
PACKAGE = """
import os, re, time
from shared.terms import Evidence, Found

def polite(seen):
    print("terms may print")
    return Found(2.0, [Evidence("said please", turn=3)])

def catastrophe(seen):
    return Found(float(bool(re.match(r"(a+)+$", "a" * 40 + "!"))))

def deadly(seen):
    os._exit(7)

def nan(seen):
    return Found(float("nan"))

def endless(seen):
    return Found(float("inf"))

def wordy(seen):
    return Found("many")

def mute(seen):
    return None

def clumsy(seen):
    raise KeyError("oops")

def hoarding(seen):
    return Found(float(len(bytearray(1 << 40))))
"""
NAMES = ("polite", "catastrophe", "deadly", "nan", "endless", "wordy", "mute", "clumsy", "hoarding")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with those terms, for this process and for the worker."""
    (tmp_path / "their_terms.py").write_text(PACKAGE)
    about = tmp_path / "their_terms-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-terms\nVersion: 1.0\n")
    points = "\n".join(f"{name} = their_terms:{name}" for name in (*NAMES, "solved"))
    missing = "gone = nowhere_to_be_found:term"
    (about / "entry_points.txt").write_text(f"[etude.reward_terms]\n{points}\n{missing}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    forget("their_terms")
    yield
    forget("their_terms")


@pytest.fixture
def workers() -> Iterator[TermWorkers]:
    made = TermWorkers(term_s=1.0)
    yield made
    made.close()


def look(*names: str) -> Look:
    return Look(names=list(names), trajectory=pack(make("edit", ("test", False), "submit")))


@pytest.mark.usefixtures("installed")
def test_a_term_of_another_package_is_found_computed_and_may_have_a_weight() -> None:
    from shared.contracts.allowed import objections
    from shared.contracts.run import RewardConfig

    assert {*NAMES, "no_submit"} <= set(terms.names())
    assert "solved" not in terms.names()  # a part of the reward has this name
    assert not list(objections(RewardConfig(behaviour={"polite": 0.1})))
    (said,) = objections(RewardConfig(behaviour={"rude": 0.1}))
    assert "found 'behaviour.rude'; allowed: broken_tool_call" in said
    assert "polite" in said
    assert "entry points of the group etude.reward_terms" in said


@pytest.mark.usefixtures("installed")
def test_a_catastrophic_pattern_a_crash_and_a_wrong_amount_stop_nothing_else(workers: TermWorkers) -> None:
    workers.look(look("polite"))  # the worker is there, whatever else the machine does
    found = workers.look(look("broken_tool_call", *NAMES, "gone", "unheard_of", "no_submit", "untested_submit"))
    assert found.findings == {
        "broken_tool_call": Finding(1.0, ["segment 0, tokens 4-6: broken test"]),
        "polite": Finding(2.0, ["turn 3: said please"]),
        "untested_submit": Finding(1.0, ["segment 0, tokens 2-4: changed, then submitted untested"]),
    }
    said = found.quarantined
    assert said["catastrophe"] == "killed after 1 s without an answer"
    assert said["deadly"] == "ended the term worker (exit status 7)"
    assert said["nan"] == "ValueError: amount: found nan; expected a finite number"
    assert said["endless"] == "ValueError: amount: found inf; expected a finite number"
    assert said["wordy"] == "ValueError: amount: found 'many'; expected a finite number"
    assert said["mute"].startswith("ValueError: answer: found None; expected Found")
    assert said["clumsy"] == "KeyError: 'oops'"
    assert said["hoarding"].startswith("MemoryError")
    assert said["gone"] == (
        "Unloadable: 'gone' (nowhere_to_be_found:term, group 'etude.reward_terms') cannot be loaded: "
        "ModuleNotFoundError: No module named 'nowhere_to_be_found'"
    )
    assert said["unheard_of"].startswith("not installed; installed: broken_tool_call")


@pytest.mark.usefixtures("installed")
def test_a_term_that_is_killed_again_and_again_rests(workers: TermWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(term_workers, "LATE", 2)
    for _ in range(2):
        assert "exit status 7" in workers.look(look("deadly")).quarantined["deadly"]
    found = workers.look(look("deadly", "polite"))
    assert found.quarantined["deadly"].startswith("rests for 600 s")
    assert "polite" in found.findings


def test_a_worker_that_somebody_killed_is_started_again(workers: TermWorkers) -> None:
    workers.look(look("no_submit"))
    assert workers._process is not None
    workers._process.kill()
    workers._process.wait()
    assert workers.look(look("broken_tool_call")).findings["broken_tool_call"].amount == 1


def test_an_attempt_that_cannot_be_read_there_quarantines_its_terms_and_the_next_is_computed(
    workers: TermWorkers,
) -> None:
    broken = Look(names=["no_submit", "broken_tool_call"], trajectory=b"no trajectory")
    assert set(workers.look(broken).quarantined) == {"no_submit", "broken_tool_call"}
    assert "broken_tool_call" in workers.look(look("broken_tool_call")).findings


def test_the_worker_finds_what_this_process_finds(workers: TermWorkers) -> None:
    trajectory = make("edit", ("test", False), "bash", "submit")
    names = [name for name in terms.names() if name != "judge"]  # graders ask it outside of the worker
    here = observed(Seen(trajectory, {}), names)
    there = workers.look(Look(names=names, trajectory=pack(trajectory)))
    assert there.findings == here.findings
    assert set(there.quarantined) == set(here.quarantined) == {"needless_question", "untruthful_final"}


@pytest.mark.parametrize(
    "found",
    [Found(math.nan), Found(True), Found(1.0, ["text"]), Found(1.0, [Evidence(3)]), Found(None), 1.0],  # type: ignore[list-item, arg-type]
)
def test_only_a_finite_amount_with_evidence_in_words_is_an_answer(
    found: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terms, "load", lambda name: lambda seen: found)
    assert "ValueError" in str(answer("any", Seen(make("submit"), {})))
