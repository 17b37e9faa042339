"""Behaviour terms: what counts, what does not, and that the evidence says where."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from services.reward.behaviour import answer, findings
from shared.contracts.graded import Finding
from shared.contracts.messages import StopReason
from shared.contracts.run import RewardConfig
from shared.contracts.trajectory import Trajectory
from shared.problems.schema import MAX_CODE
from shared.terms import Seen, names


@pytest.fixture
def found(trajectory: Callable[..., Trajectory]) -> Callable[..., Finding]:
    def find(
        name: str, *calls: str | tuple[str, bool], before: dict[str, str] | None = None, **fields: object
    ) -> Finding:
        finding = answer(name, Seen(trajectory(*calls, **fields), before or {}))
        assert isinstance(finding, Finding)
        return finding

    return find


def test_a_blameless_attempt_has_no_findings(trajectory: Callable[..., Trajectory]) -> None:
    assert findings(trajectory("test", "edit", "test", "submit"), {}) == {}


def test_broken_calls_are_counted_and_located(found: Callable[..., Finding]) -> None:
    finding = found("broken_tool_call", "test", ("edit", False), "edit", ("undo", False), "submit")
    assert finding.amount == 2
    assert finding.evidence == ["segment 0, tokens 4-6: broken edit", "segment 0, tokens 8-10: broken undo"]


@pytest.mark.parametrize("stop", [stop for stop in StopReason if stop is not StopReason.submitted])
def test_an_attempt_that_was_ended_did_not_submit(found: Callable[..., Finding], stop: StopReason) -> None:
    assert found("no_submit", "edit", stop=stop) == Finding(1.0, [f"ended by {stop}"])


@pytest.mark.parametrize(
    ("calls", "amount"),
    [
        (["edit", "submit"], 1),
        (["edit", "test", "submit"], 0),
        (["edit", "test", "undo", "submit"], 1),
        (["edit", ("test", False), "submit"], 1),
        (["edit", "test", ("edit", False), "submit"], 0),
        (["submit"], 0),
    ],
)
def test_a_submit_is_untested_when_no_test_follows_the_last_change(
    found: Callable[..., Finding], calls: list, amount: int
) -> None:
    assert found("untested_submit", *calls).amount == amount


@pytest.mark.parametrize(
    ("segments", "amount"),
    [
        ([["edit", ("test", False)], ["submit"]], 0),  # the files as they were given
        ([["edit", ("edit", False)], ["edit", "submit"]], 1),
        ([["edit", ("edit", False)], ["edit", "test", "submit"]], 0),
        ([["edit", "summary"], ["submit"]], 1),
        ([["edit", "summary"], [("edit", False)], ["submit"]], 0),
        ([["edit", "test", "summary"], ["submit"]], 0),
    ],
)
def test_a_change_that_a_fresh_retry_discarded_was_not_submitted_and_one_before_a_summary_was(
    trajectory: Callable[..., Trajectory], segments: list[list], amount: int
) -> None:
    parts = [trajectory(*calls).segments[0] for calls in segments]
    for part in parts:
        part.spans = [
            msgspec.structs.replace(span, role="summary") if span.tool == "summary" else span for span in part.spans
        ]
    finding = answer("untested_submit", Seen(trajectory(segments=parts), {}))
    assert isinstance(finding, Finding)
    assert finding.amount == amount


def test_being_ended_before_the_test_is_no_untested_submit(found: Callable[..., Finding]) -> None:
    assert found("untested_submit", "edit", stop=StopReason.deadline).amount == 0


def test_open_items_of_the_todo_list_count(found: Callable[..., Finding]) -> None:
    notes = {"todo": "- [x] read\n- [ ] write tests\n* [ ] tidy up\n- plain"}
    finding = found("todo_unfinished", "submit", notes=notes)
    assert finding == Finding(2.0, ["left open: write tests", "left open: tidy up"])
    assert found("todo_unfinished", "submit").amount == 0


def test_work_in_the_terminal_alone_is_a_collapse_only_when_there_is_much_of_it(found: Callable[..., Finding]) -> None:
    assert found("terminal_only", *["bash"] * 4, "submit").amount == 1
    assert found("terminal_only", *["bash"] * 3, "submit").amount == 0
    assert found("terminal_only", *["bash"] * 4, "edit", "submit").amount == 0
    assert found("terminal_only", "submit").amount == 0


def test_thinking_aloud_in_new_comments_counts_and_explaining_does_not(found: Callable[..., Finding]) -> None:
    before = {"main.py": "x = 1  # maybe old\n"}
    files = {
        "main.py": "x = 1  # maybe old\ny = '# wait'  # Wait, let me reconsider\n# sorted by key\n",
        "notes.md": "# let me think",
        "broken.py": "def (:\n  # hmm",
    }
    finding = found("thoughts_in_comments", "submit", before=before, files=files)
    assert "main.py:2: # Wait, let me reconsider" in finding.evidence
    assert not [e for e in finding.evidence if "sorted" in e or "old" in e or e.startswith("notes")]


def test_a_very_long_file_is_not_read_for_comments(found: Callable[..., Finding]) -> None:
    files = {"main.py": f"# wait, let me think\nx = '{'y' * MAX_CODE}'\n"}
    assert found("thoughts_in_comments", "submit", before={}, files=files).amount == 0


def test_every_term_of_the_default_configuration_exists() -> None:
    assert set(RewardConfig().behaviour) <= set(names())
