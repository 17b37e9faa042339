"""`etude tasks show` finds a problem in whichever split it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.curator.cli import app
from shared.problems import Case, FunctionHidden, FunctionProblem
from shared.problems.pack import write

CASE = Case(args="[]", expected="1")


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    for split in ("train", "rl", "dev", "held_out"):
        problem = FunctionProblem(id=f"in-{split}", files={"f.py": "def f(): return 0"}, entry="f", visible=[])
        (tmp_path / f"{split}.public.jsonl.zst").write_bytes(write([problem]))
        (tmp_path / f"{split}.hidden.jsonl.zst").write_bytes(write([FunctionHidden(id=problem.id, cases=[CASE])]))
    return tmp_path


@pytest.mark.parametrize("split", ["train", "rl", "dev", "held_out"])
def test_a_problem_is_found_in_any_split(pack: Path, split: str) -> None:
    result = CliRunner().invoke(app, ["show", str(pack), f"in-{split}"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert (shown["id"], shown["hidden"]) == (f"in-{split}", [{"args": "[]", "expected": "1"}])
    assert f"split {split}" in result.stderr


def test_a_split_that_is_named_is_the_only_one_that_is_searched(pack: Path) -> None:
    result = CliRunner().invoke(app, ["show", str(pack), "in-dev", "--split", "rl"])
    assert result.exit_code == 2
    assert "no problem 'in-dev'" in result.stderr
    assert "splits: rl" in result.stderr


def test_without_an_id_all_are_listed(pack: Path) -> None:
    ids = CliRunner().invoke(app, ["show", str(pack)]).stdout.split()
    assert ids == ["in-train", "in-rl", "in-dev", "in-held_out"]


def test_a_pack_of_others_steers_no_terminal_and_is_shown_exactly(pack: Path) -> None:
    steers = "\x1b[2J\x9b2J\u202e\U000e0041é"
    problem = FunctionProblem(id=f"in-{steers}", prompt=steers, files={"f.py": steers}, entry="f", visible=[])
    (pack / "dev.public.jsonl.zst").write_bytes(write([problem]))
    (pack / "dev.hidden.jsonl.zst").write_bytes(write([FunctionHidden(id=problem.id, cases=[CASE])]))
    listed = CliRunner().invoke(app, ["show", str(pack), "--split", "dev"]).stdout
    assert listed == "in-⟨ESC⟩[2J⟨U+009B⟩2J⟨U+202E⟩⟨U+E0041⟩é\n"
    shown = CliRunner().invoke(app, ["show", str(pack), problem.id]).stdout
    assert shown.removesuffix("\n").isprintable()
    assert json.loads(shown)["files"] == {"f.py": steers}


def test_an_unknown_problem_is_refused_with_where_was_looked(pack: Path) -> None:
    result = CliRunner().invoke(app, ["show", str(pack), "elsewhere"])
    assert result.exit_code == 2
    assert "train, rl, dev, held_out" in result.stderr


def test_a_folder_without_a_pack_and_a_split_that_is_not_there_are_said(pack: Path, tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["show", str(empty)])
    assert (result.exit_code, "no problems in" in result.stderr) == (2, True)
    result = CliRunner().invoke(app, ["show", str(pack), "in-rl", "--split", "test"])
    assert result.exit_code == 2
    assert "no split 'test'; found: train, rl, dev, held_out" in result.stderr


@pytest.mark.parametrize("part", ["public", "hidden"])
def test_a_damaged_file_of_a_pack_is_named(pack: Path, part: str) -> None:
    path = pack / f"rl.{part}.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-3])
    result = CliRunner().invoke(app, ["show", str(pack), "in-rl"])
    assert result.exit_code == 2
    assert f"{path}: pack: cut short" in result.stderr.replace("\n", "")


def test_where_the_hidden_part_is_not_kept_the_public_part_is_shown_alone(pack: Path) -> None:
    (pack / "held_out.hidden.jsonl.zst").unlink()
    result = CliRunner().invoke(app, ["show", str(pack), "in-held_out"])
    assert result.exit_code == 0, result.output
    assert "hidden" not in json.loads(result.stdout)
    assert "only the public part" in result.stderr
