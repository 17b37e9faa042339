"""Problems of one's own: how many steps they give, what is left out, and what a pack without the wanted split is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude import evaluate
from etude.demo import DemoOptions
from etude.demo import prepare as p
from shared import objects as stores
from shared.problems import FunctionHidden
from shared.problems import pack as packs
from shared.renderers.formats.compact_1 import MIN_ROOM
from shared.sandbox import bubblewrap

NO_OP = {"files": {"f.py": "def f(x):\n    return x + 1\n"}}
WRONG = {"solution": {"f.py": "def f(x):\n    return x + 2\n"}}
LONG = "def f(x):\n    return x\n" + "# x\n" * 60


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_SANDBOX", "process")


@pytest.fixture
def no_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ETUDE_SANDBOX", "bubblewrap")
    monkeypatch.setenv("PATH", str(tmp_path))
    bubblewrap.program.cache_clear()
    yield
    bubblewrap.program.cache_clear()


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


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def split_ids(pack: Path) -> dict[str, set[str]]:
    return {
        name: set(packs.Lines((pack / packs.file_name(name, "public")).read_bytes(), packs.FunctionProblem).ids)
        for name in packs.splits_in(pack)
    }


def test_it_is_said_how_many_are_practised_and_held_out_and_how_many_steps_that_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "own.jsonl", [row(f"p{i}") for i in range(100)])
    found = split_ids(p.own_pack(path, tmp_path / "pack", groups_per_step=16))
    practised, held_out = len(found["rl"]), len(found["held_out"])
    assert practised + held_out == 100
    assert 10 <= held_out <= 30
    said = f"{path}: {practised} problems to practise on, each once: at most {practised // 16} steps of 16; {held_out} held out"
    assert said in capsys.readouterr().err


def test_where_not_one_step_is_possible_nothing_is_written_and_the_way_out_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [row(f"p{i}") for i in range(12)])
    with pytest.raises(
        p.DemoError, match=r"found \d+ problems to practise on; a step takes 16.*Allowed: 16 or more"
    ) as no:
        p.own_pack(path, tmp_path / "pack", groups_per_step=16)
    allowed = int(str(no.value).split("schedule.groups_per_step of ")[1].split()[0])
    assert not (tmp_path / "pack").exists()
    assert len(split_ids(p.own_pack(path, tmp_path / "pack", groups_per_step=allowed))["rl"]) == allowed


def test_steps_are_as_large_as_the_changed_configuration_says(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [row(f"p{i}") for i in range(40)])
    config = tmp_path / "changes.json"
    config.write_text('{"schedule": {"groups_per_step": 64}}')
    objects = stores.connect(f"file:{tmp_path / 'objects'}")
    options = DemoOptions(problems=path, config=config, state=tmp_path)
    with pytest.raises(p.DemoError, match="a step takes 64"):
        p.new_run(objects, options)
    assert not list(objects.list(""))


@pytest.mark.usefixtures("no_sandbox")  # it is said before a problem is run
def test_problems_that_are_all_relatives_cannot_be_held_out_and_it_is_said_why(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [row(f"p{i}", cell="one") for i in range(40)])
    with pytest.raises(p.DemoError, match=r"none of 40 problems is left for .* found 1 in field 'cell'"):
        p.own_pack(path, tmp_path / "pack", groups_per_step=16)


def test_what_the_policy_cannot_take_is_left_out_of_practice_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(f"p{i}") for i in range(40)]
    path = write(tmp_path / "own.jsonl", [row("long", files={"f.py": LONG}), *rows])
    found = split_ids(p.own_pack(path, tmp_path / "pack", groups_per_step=16))
    assert found["rl"] | found["held_out"] == {one["id"] for one in rows}
    said = capsys.readouterr().err
    assert "left out: 1 of 41 problems" in said
    assert "line 1: problem 'long': field 'files[f.py]': found 62 lines; allowed: at most 48" in said


def test_a_measurement_leaves_nothing_out(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [row("a"), row("long", files={"f.py": LONG})])
    with pytest.raises(
        p.DemoError,
        match=r"line 2: problem 'long'.*found 62 lines[\s\S]*nothing out by itself[\s\S]*--leave-out",
    ):
        p.own_problems(path)
    assert [problem.id for problem, _ in p.own_problems(write(path, [row("a")])).pairs] == ["a"]


def test_a_measurement_leaves_out_what_it_is_told_to_and_says_which_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [row("a"), row("long", files={"f.py": LONG}), row("b")])
    found = p.own_problems(path, leave_out=True)
    assert [problem.id for problem, _ in found.pairs] == ["a", "b"]
    assert "left out: 1 of 3 problems" in found.left_out()
    assert "line 2: problem 'long'" in found.left_out()


def test_a_measurement_refuses_what_its_solution_does_not_solve_and_what_is_solved_already(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [row("a"), row("done", **NO_OP), row("wrong", **WRONG)])
    with pytest.raises(p.DemoError) as no:
        p.own_problems(path)
    for said in (
        "2 of 3 problems fail the check in the sandbox",
        "line 2: problem 'done': no-op: the given files pass every case",
        "line 3: problem 'wrong': oracle: the solution gives 3 for visible[0], expected 2",
        "--leave-out",
    ):
        assert said in str(no.value)
    rest = p.own_problems(path, leave_out=True)
    assert [problem.id for problem, _ in rest.pairs] == ["a"]
    assert rest.without == 2
    assert "left out: 2 of 3 problems fail the check" in rest.left_out()
    write(path, [row("wrong", **WRONG)])
    with pytest.raises(p.DemoError, match="1 of 1 problems fail the check"):
        p.own_problems(path, leave_out=True)


def test_what_fails_the_check_is_left_out_of_practice_and_of_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [row(f"bad{i}", **(WRONG if i % 2 else NO_OP)) for i in range(30)]
    path = write(tmp_path / "own.jsonl", [*bad, *(row(f"p{i}") for i in range(40))])
    found = split_ids(p.own_pack(path, tmp_path / "pack", groups_per_step=16))
    assert found["rl"] | found["held_out"] == {f"p{i}" for i in range(40)}
    said = capsys.readouterr().err
    assert f"{path}: left out: 30 of 70 problems fail the check" in said
    assert "line 2: problem 'bad1': oracle: " in said


def test_it_is_said_how_many_have_no_solution_and_their_files_are_run_all_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [row("a"), row("b", solution={}), row("done", solution={}, **NO_OP)])
    found = p.own_problems(path, leave_out=True)
    assert found.unproven().startswith("1 of 2 problems have no field 'solution'")
    assert "line 3: problem 'done': no-op" in found.left_out()
    assert p.own_problems(write(path, [row("a")])).unproven() == ""


def test_what_the_code_gives_takes_room_in_the_prompt_also_where_the_file_does_not_say_it(tmp_path: Path) -> None:
    long = row("a", files={"f.py": "def f(x):\n    return 'abcdefghijklmnopqrstuvwxyz' * 3\n"})
    path = write(tmp_path / "own.jsonl", [long, row("b")])
    whole = p.chat_format(p.BASE)
    ((problem, _),) = p.own_problems(write(tmp_path / "one.jsonl", [long])).pairs
    tokens = len(whole.prompt(problem, problem.files))
    checkpoint = of_context(tmp_path, tokens + MIN_ROOM - 1)
    with pytest.raises(p.DemoError, match=rf"line 1: problem 'a': .*found a prompt of {tokens} tokens"):
        p.own_problems(path, checkpoint)


def of_context(tmp_path: Path, tokens: int) -> Path:
    """The base policy's card with so short a context."""
    checkpoint = tmp_path / f"context-{tokens}"
    checkpoint.mkdir()
    shutil.copy(p.BASE / "tokenizer.json", checkpoint)
    card = json.loads((p.BASE / "etude.json").read_text())
    (checkpoint / "etude.json").write_text(json.dumps({**card, "context": tokens}))
    return checkpoint


def test_of_a_pack_too_what_does_not_fit_the_checkpoint_is_refused_or_left_out(tmp_path: Path) -> None:
    longer = row("long", files={"f.py": "def f(x):\n    return x\n" + "# x y z\n" * 40})
    own = p.own_problems(write(tmp_path / "own.jsonl", [row("a"), longer]))
    pack = p.write_split(tmp_path / "pack", "held_out", own.pairs)
    checkpoint = of_context(tmp_path, 128)
    assert p.fitting_split(pack, "held_out", p.BASE, leave_out=False).pairs == own.pairs
    with pytest.raises(p.DemoError, match=r"1 of 2 problems do not fit[\s\S]*\nproblem 'long': .*[\s\S]*--leave-out"):
        p.fitting_split(pack, "held_out", checkpoint, leave_out=False)
    source, rest = evaluate.chosen(evaluate.Split(pack, "held_out"), checkpoint, True)
    assert (source, rest.pairs, rest.without) == (pack, own.pairs[:1], 1)


def test_a_pack_whose_parts_do_not_belong_together_is_refused(tmp_path: Path) -> None:
    own = p.own_problems(write(tmp_path / "own.jsonl", [row("a"), row("b")]))
    pack = p.write_split(tmp_path / "pack", "held_out", own.pairs)
    (pack / packs.file_name("held_out", "hidden")).write_bytes(packs.write([own.pairs[0][1]]))
    with pytest.raises(p.DemoError, match="found no hidden part of problem 'b'"):
        p.fitting_split(pack, "held_out", p.BASE, leave_out=False)


@pytest.mark.usefixtures("no_sandbox")
def test_without_a_sandbox_nothing_is_measured_and_the_way_out_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [row(f"p{i}") for i in range(40)])
    with pytest.raises(p.DemoError, match="cannot be checked: bwrap is not on the PATH; install bubblewrap"):
        p.own_problems(path)
    with pytest.raises(p.DemoError, match="bwrap is not on the PATH"):
        p.own_pack(path, tmp_path / "pack")


@pytest.mark.usefixtures("no_sandbox")
def test_where_a_run_is_started_there_may_be_no_sandbox_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "own.jsonl", [row(f"p{i}") for i in range(40)])
    p.own_pack(path, tmp_path / "pack", must_check=False)
    assert "not checked here, the run's admission checks those to practise on alone: bwrap" in capsys.readouterr().err


def test_a_pack_without_the_wanted_split_is_told_with_those_that_it_has(tmp_path: Path) -> None:
    objects = stores.connect(f"file:{tmp_path / 'objects'}")
    for name in ("rl", "dev"):
        p.write_split(tmp_path / "pack", name, [])
    with pytest.raises(p.DemoError) as no:
        p.upload_pack(objects, tmp_path / "pack", "held_out")
    for said in (
        "held_out.public.jsonl.zst: missing",
        "found the splits: rl, dev;",
        "held_out or dev for",
        "tasks import",
    ):
        assert said in str(no.value)
    with pytest.raises(p.DemoError, match="found the splits: none"):
        p.upload_pack(objects, tmp_path / "elsewhere", "dev")
    assert not list(objects.list(""))


def test_a_pack_of_too_few_problems_is_refused_before_anything_is_stored(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [row(f"p{i}") for i in range(20)])
    pack = p.own_pack(path, tmp_path / "pack", groups_per_step=1)
    objects = stores.connect(f"file:{tmp_path / 'objects'}")
    with pytest.raises(p.DemoError, match=rf"{pack}: found \d+ problems to practise on; a step takes 32"):
        p.new_run(objects, DemoOptions(pack=pack, groups_per_step=32, state=tmp_path))
    assert not list(objects.list(""))


def test_another_pack_in_a_folder_of_the_same_name_leaves_the_first_runs_problems_as_they_were(tmp_path: Path) -> None:
    objects = stores.connect(f"file:{tmp_path / 'objects'}")
    first, second = tmp_path / "a" / "own-pack", tmp_path / "b" / "own-pack"
    for folder, name in ((first, "first"), (second, "second")):
        folder.mkdir(parents=True)
        for part in packs.PARTS:
            (folder / packs.file_name("rl", part)).write_bytes(
                packs.write([FunctionHidden(id=f"{name}-{part}", cases=[])])
            )
    before = p.upload_pack(objects, first, "rl")
    p.upload_pack(objects, second, "rl")
    assert [packs.Lines(objects.get(ref), FunctionHidden).ids for ref in before] == [["first-public"], ["first-hidden"]]
    assert p.upload_pack(objects, first, "rl") == before
