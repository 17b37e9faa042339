"""What is shown and kept of an attempt by hand: diffs that apply, colours, hostile text."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from services.rollout.byhand.builtin import builtin
from services.rollout.byhand.changes import unified
from services.rollout.byhand.kept import FORMATS, keep_format
from services.rollout.byhand.scripted import Reply, read_script
from services.rollout.byhand.shown import coloured, pieces, show_turn, style_of
from services.rollout.byhand.watched import CallMade, ResultSeen, Turn
from shared.contracts.trajectory import Change, Segment, Submission
from shared.environments.repository.patches import changes_of
from shared.environments.repository.trees import File

LINES = st.text(st.sampled_from("ab \n\x0c\u2028é"), max_size=40)
PATHS = st.sampled_from(["a.py", "b/c.py", "d"])


class Given:
    """The part of an environment that a diff needs."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def given(self, problem: Any, paths: Any) -> dict[str, str]:
        return {path: self.files[path] for path in paths if path in self.files}


@given(st.dictionaries(PATHS, LINES.filter(bool)), st.dictionaries(PATHS, LINES.filter(bool) | st.none()))
def test_the_diff_applied_to_the_given_files_is_the_work(before: dict[str, str], after: dict[str, str | None]) -> None:
    changes = {path: Change(text=text) for path, text in after.items() if text is not None or path in before}
    changes = {path: change for path, change in changes.items() if change.text != before.get(path)}
    diff = unified(Given(before), None, Submission(changes=changes))  # type: ignore[arg-type]
    tree = {path: File(text.encode()) for path, text in before.items()}
    assert changes_of(tree, diff) == changes if changes else diff == ""


def test_binary_files_are_named_and_not_printed() -> None:
    diff = unified(Given({}), None, Submission(changes={"a": Change(data=b"\0\1"), "b": Change()}))  # type: ignore[arg-type]
    assert diff == "Binary file b/a has 2 bytes\nBinary file a/b was deleted\n"


def test_empty_files_are_named() -> None:
    work = Submission(changes={"a": Change(text=""), "b": Change(), "c": Change(text="")})
    diff = unified(Given({"b": "", "c": "x\n"}), None, work)  # type: ignore[arg-type]
    assert diff.startswith("Empty file b/a was created\nEmpty file a/b was deleted\n--- a/c\n")


def test_a_line_of_a_script_may_hold_other_separators(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text('{"text": "a\u2028b\x85c"}\r\n\n{"text": "d"}\n', newline="")
    assert read_script(script) == [Reply(text="a\u2028b\x85c"), Reply(text="d")]


def test_an_attempt_keeps_the_named_chat_templates_of_its_checkpoint(tmp_path: Path) -> None:
    more = tmp_path / "checkpoint" / "additional_chat_templates"
    more.mkdir(parents=True)
    digests = []
    for text in ("a", "b"):
        (more / "tool_use.jinja").write_text(text)
        digests.append(keep_format(tmp_path / "attempts", more.parent))
        kept = tmp_path / "attempts" / FORMATS / digests[-1] / more.name / "tool_use.jinja"
        assert kept.read_text() == text
    assert digests[0] != digests[1]


def segment(ids: list[int], logprobs: list[float | None]) -> Segment:
    mask = np.array([logprob is not None for logprob in logprobs])
    return Segment(
        tokens=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=np.array([logprob or 0.0 for logprob in logprobs], np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        oldest_kv_version=0,
    )


def test_ids_of_one_character_are_coloured_by_the_least_likely_of_them() -> None:
    ids = builtin().vocabulary.plain("aé\x1b")
    assert len(ids) == 4
    text = coloured(segment(ids, [None, -0.01, -3.0, -0.5]), builtin())
    assert text.plain == "aé⟨ESC⟩"
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("a", "dim"),
        ("é", style_of(-3.0)),
        ("⟨ESC⟩", style_of(-0.5)),
    ]


@given(st.lists(st.integers(0, builtin().vocab_size - 1), max_size=60))
def test_the_pieces_cover_all_ids_in_order(ids: list[int]) -> None:
    found = list(pieces(np.array(ids, np.int32), builtin()))
    assert [id for start, end, _ in found for id in ids[start:end]] == ids


@pytest.mark.parametrize("short", [True, False])
def test_foreign_text_steers_neither_the_terminal_nor_its_markup(short: bool) -> None:
    hostile = "\x1b[2J[bold]\u202e\x07"
    turn = Turn(
        number=1,
        segment=0,
        thinking=hostile,
        text=hostile,
        calls=[CallMade(name=hostile, arguments={hostile: hostile}, error=hostile)],
        results=[ResultSeen(tool=hostile, text=hostile, ok=False)],
        fault=hostile,
    )
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    show_turn(console, turn, short=short)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[2J" not in said
    assert "\u202e" not in said
    assert "\x07" not in said
    assert said.count("[bold]") >= 6
