"""What a policy takes to, from recorded attempts alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from services.reward import cli
from services.reward.habits import Done, buckets, done, habits
from shared.contracts.trajectory import Change
from tests.unit.reward.conftest import make
from tests.unit.reward.recorded import record


def test_figures_are_told_apart_by_version_and_configuration() -> None:
    records = [
        replace(record(f"a{i}", f"g{i // 2}", solved=i % 4 == 0, untruthful_final=float(i == 5)), version=i * 4)
        for i in range(8)
    ]
    records[7] = replace(records[7], reward_config="new")
    found = {
        key: habits(*key, 20, bucket, {f"a{i}": Done({"edit": 2, "test": i}, 10 * i, f"s{i // 2}") for i in range(2)})
        for key, bucket in buckets(records, 20).items()
    }
    assert list(found) == [("default", 0), ("default", 20), ("new", 20)]
    first = found["default", 0]
    assert (first.versions, first.attempts, first.groups, first.pass_at_1) == ((0, 19), 5, 3, 0.4)
    assert first.best_of == 2 / 3
    assert (first.read, first.tools, first.comment_characters) == (2, {"edit": 0.8, "test": 0.2}, 5.0)
    assert first.distinct == 0.5
    second = found["default", 20]
    assert (second.signatures["untruthful_final"], second.examples["untruthful_final"]) == (0.5, ["a5"])
    assert second.distinct is None


def test_a_trajectory_shows_its_tools_comments_and_what_it_submitted() -> None:
    one = done(make("edit", "test", "submit", files={"m.py": "x = 1  # four\n"}))
    assert (dict(one.tools), one.comments) == ({"edit": 1, "test": 1, "submit": 1}, len("# four"))
    other = done(make(files={}, changes={"m.py": Change(text="x = 2\n"), "gone.py": Change()}))
    assert other.comments == 0
    assert other.submission != one.submission
    assert (
        other.submission
        == done(make("edit", files={}, changes={"gone.py": Change(), "m.py": Change(text="x = 2\n")})).submission
    )


@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.integers(0, 3)), min_size=1, max_size=20),
    st.integers(1, 20),
)
def test_every_attempt_is_counted_once(drawn: list[tuple[int, bool, int]], every: int) -> None:
    records = [
        replace(record(f"a{i}", f"g{group}", solved=solved), version=version)
        for i, (version, solved, group) in enumerate(drawn)
    ]
    rows = [habits(*key, every, bucket, {}) for key, bucket in buckets(records, every).items()]
    assert sum(row.attempts for row in rows) == len(records)
    assert round(sum(row.pass_at_1 * row.attempts for row in rows)) == sum(solved for _, solved, _ in drawn)
    assert all(row.pass_at_1 <= 1 and row.best_of >= row.pass_at_1 / row.attempts for row in rows)


def test_the_command_reads_ledger_and_store_and_names_examples(state: Path) -> None:
    done = CliRunner().invoke(cli.app, ["habits", "r-1", "--state", str(state), "--json"])
    assert done.exit_code == 0, done.output
    [row] = json.loads(done.stdout)["rows"]
    assert (row["attempts"], row["groups"], row["pass_at_1"], row["best_of"], row["read"]) == (4, 2, 0.75, 1.0, 4)
    assert row["tools"]["edit"] == 0.4
    assert row["distinct"] == 0.75
    done = CliRunner().invoke(cli.app, ["habits", "r-1", "--state", str(state)])
    assert (done.exit_code, "r-1: habits" in done.output) == (0, True)
