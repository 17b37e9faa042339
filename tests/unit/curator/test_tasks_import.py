"""`etude tasks import` writes what practice and measurement need, and says what it leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from etude.demo.prepare import BASE, fitting_split, own_pack, own_problems
from services.curator.cli import app
from shared.problems import FunctionHidden, FunctionProblem
from shared.problems.pack import Lines, file_name, splits_in
from shared.sandbox import FunctionRun, connect


def row(name: str, **changed: Any) -> dict[str, Any]:
    return {
        "id": name,
        "files": {"f.py": "def f(x):\n    return x\n"},
        "entry": "f",
        "visible": [{"args": "[1]", "expected": "2"}],
        "hidden": [{"args": "[2]", "expected": "3"}],
        "solution": {"f.py": "def f(x):\n    return x + 1\n"},
        **changed,
    }


@pytest.fixture(scope="module", autouse=True)
def harness() -> None:
    """Copied by one thread before two start at once."""
    functions = connect("process", 1)
    functions.run_sync([FunctionRun(source="def f(): return 1", entry="f", args=("[]",))])
    functions.close_sync()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row(f"p{i}", cell=f"c{i // 2}")) + "\n" for i in range(30)))
    return path


def imported(path: Path, *options: str) -> Result:
    """In sandboxes that are bare processes: fast, and the code is our own."""
    arguments = ["import", str(path), "--out", str(path.parent / "pack"), "--sandbox", "process", *options]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def ids(pack: Path) -> dict[str, list[str]]:
    return {
        name: Lines((pack / file_name(name, "public")).read_bytes(), FunctionProblem).ids
        for name in sorted(splits_in(pack))
    }


def test_an_imported_pack_has_the_splits_of_a_demo_on_the_same_file(own: Path, tmp_path: Path) -> None:
    result = imported(own)
    assert result.exit_code == 0, result.output
    found = ids(tmp_path / "pack")
    demo = ids(own_pack(own, tmp_path / "demo"))
    assert {name: set(members) for name, members in found.items()} == {name: set(ms) for name, ms in demo.items()}
    assert set(found) == {"rl", "held_out"}
    said = f"30 of 30 problems, {len(found['rl'])} in rl, {len(found['held_out'])} in held_out"
    assert said in result.stderr


def test_a_measurement_on_a_file_shows_what_one_on_its_pack_shows(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_SANDBOX", "process")
    assert imported(own, "--split", "held_out").exit_code == 0
    of_file, of_pack = own_problems(own), fitting_split(tmp_path / "pack", "held_out", BASE, leave_out=False)
    assert all(problem.actual == ["1"] for problem, _ in of_file.pairs)
    assert {problem.id: problem for problem, _ in of_file.pairs} == {
        problem.id: problem for problem, _ in of_pack.pairs
    }


def test_what_fails_the_check_is_named_with_its_line(own: Path, tmp_path: Path) -> None:
    own.write_text(json.dumps(row("wrong", solution={"f.py": "def f(x):\n    return 0\n"})) + "\n" + own.read_text())
    result = imported(own)
    assert result.exit_code == 0, result.output
    assert "line 1: problem 'wrong': oracle: the solution gives 0 for visible[0], expected 2" in result.stderr
    assert "30 of 31 problems" in result.stderr
    assert "wrong" not in str(ids(tmp_path / "pack"))


FORGOTTEN = {
    "forgot-return": (
        "def f(xs):\n    xs.sort()\n",
        "def f(xs):\n    xs.sort()\n    return xs\n",
        "[[3, 1]]",
        "[1, 3]",
    ),
    "copy": ("def f(xs):\n    return xs\n", "def f(xs):\n    return sorted(xs)\n", "[[3, 1]]", "[1, 3]"),
    "unwanted-return": ("def f(xs):\n    return sorted(xs)\n", "def f(xs):\n    xs.sort()\n", "[[3, 1]]", "[1, 3]"),
    "forgot-return-dict": (
        "def f(d, k):\n    d[k] = 1\n",
        "def f(d, k):\n    d[k] = 1\n    return d\n",
        '[{"dict": []}, "a"]',
        '{"dict": [["a", 1]]}',
    ),
}


def test_a_forgotten_return_is_a_problem_that_can_be_posed(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    rows = [
        row(name, files={"f.py": broken}, solution={"f.py": solution}, visible=[case], hidden=[case])
        for name, (broken, solution, args, expected) in FORGOTTEN.items()
        for case in ({"args": args, "expected": expected},)
    ]
    own.write_text("".join(json.dumps(one) + "\n" for one in rows))
    result = imported(own, "--split", "held_out")
    assert result.exit_code == 0, result.output
    assert "4 of 4 problems" in result.stderr
    problems = Lines((tmp_path / "pack" / file_name("held_out", "public")).read_bytes(), FunctionProblem)
    hidden = Lines((tmp_path / "pack" / file_name("held_out", "hidden")).read_bytes(), FunctionHidden)
    for name in FORGOTTEN:
        wanted = name == "unwanted-return"
        assert {case.changed for case in (*problems[name].visible, *hidden[name].cases)} == {wanted}, name


def test_the_share_that_is_held_out_can_be_chosen_and_relatives_stay_together(own: Path, tmp_path: Path) -> None:
    assert imported(own, "--held-out", "0.6").exit_code == 0
    found = ids(tmp_path / "pack")
    cells = {name: {int(member[1:]) // 2 for member in members} for name, members in found.items()}
    assert not cells["rl"] & cells["held_out"]
    assert len(found["held_out"]) > len(found["rl"])


def test_all_go_into_the_one_split_that_is_named(own: Path, tmp_path: Path) -> None:
    assert imported(own, "--split", "dev").exit_code == 0
    assert {name: len(members) for name, members in ids(tmp_path / "pack").items()} == {"dev": 30}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--split", "rl", "--held-out", "0.3"], "found --held-out 0.3 and --split rl"),
        (["--split", "test"], "'train', 'rl', 'dev', 'held_out'"),
        (["--held-out", "nan"], "Input should be"),
        (["--held-out", "1"], "less than or equal to 0.99"),
        (["--checkpoint", "/nowhere"], "--checkpoint /nowhere: found no etude.json there"),
    ],
)
def test_what_cannot_be_is_refused_with_what_is_allowed(
    own: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    result = imported(own, *options)
    assert result.exit_code == 2
    assert said in result.output
    assert not (tmp_path / "pack").exists()


def test_a_pack_that_cannot_be_written_is_said(own: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = imported(own, "--out", str(tmp_path / "file" / "pack"))
    assert result.exit_code == 2
    assert f"--out {tmp_path / 'file' / 'pack'}: cannot be written: " in result.stderr


def test_what_it_says_steers_no_terminal(own: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b]0;title\x07"
    folder.mkdir()
    result = imported(own.rename(folder / "own.jsonl"))
    assert result.exit_code == 0, result.output
    assert "a⟨ESC⟩]0;title⟨BEL⟩/pack: 30 of 30 problems" in result.output
    assert "\x1b" not in result.output


def test_too_few_cells_for_both_splits_are_refused_and_fit_into_one(own: Path, tmp_path: Path) -> None:
    own.write_text(json.dumps(row("a")) + "\n")
    result = imported(own)
    assert result.exit_code == 1
    assert "found 1 in field 'cell'" in result.stderr
    assert "--split held_out" in result.stderr
    assert not (tmp_path / "pack").exists()
    assert imported(own, "--split", "held_out").exit_code == 0


def test_what_a_split_lacks_is_said_before_a_problem_is_run(own: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def run(*_: Any) -> Any:
        raise AssertionError("a problem was run")

    monkeypatch.setattr("services.curator.own._gate", run)
    own.write_text(json.dumps(row("a")) + "\n")
    assert "nothing is left for held_out" in imported(own).stderr
    assert "a problem was run" in str(imported(own, "--split", "rl").exception)


def test_what_the_chat_format_cannot_take_is_left_out_with_line_and_reason(own: Path, tmp_path: Path) -> None:
    files = {"f.py": "def f(x):\n    return x\n", "g.py": ""}
    own.write_text(json.dumps(row("two", files=files, entry="f.py::f")) + "\n" + own.read_text())
    result = imported(own)
    assert result.exit_code == 0, result.output
    assert "left out: 1 of 31 problems do not fit compact-1" in result.stderr
    assert "line 1: problem 'two': field 'files': found 2 files (f.py, g.py); allowed: exactly one" in result.stderr
    assert "30 of 31 problems" in result.stderr
    assert "two" not in str(ids(tmp_path / "pack"))


def test_where_nothing_is_left_nothing_is_written(own: Path, tmp_path: Path) -> None:
    own.write_text(json.dumps(row("long", files={"f.py": "def f(x):\n    return x\n" + "# x\n" * 60})) + "\n")
    result = imported(own)
    assert result.exit_code == 2
    assert "1 of 1 problems do not fit compact-1" in result.stderr
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("command", [["mutate", "--limit", "1"], ["import", "FILE"]])
def test_where_problems_are_run_is_said_by_the_setting_too(
    command: list[str], own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_SANDBOX", "nonsense")
    arguments = [str(own) if word == "FILE" else word for word in command]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "nonsense" in done.output
