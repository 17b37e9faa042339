"""`etude tasks probe`: its file is one that a run can be started with, its table, and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from etude import cli, commands, probing
from etude.demo import DemoOptions
from etude.demo import prepare as p
from etude.demo.prepare import BASE, DemoError
from shared.contracts.probe import Probe, Tried, read
from shared.contracts.run import Ref
from shared.environments.repository.problem import RepositoryProblem
from shared.objects.directory import DirectoryObjects
from shared.problems import FunctionHidden, FunctionProblem

TREE = Ref(key="trees/t", size=1, checksum="0" * 32)


def function(name: str, category: str = "debugging/return") -> FunctionProblem:
    return FunctionProblem(id=name, files={"f.py": ""}, entry="f", visible=[], category=category)


def pack(folder: Path, *names: str) -> Path:
    return p.write_split(folder, "rl", [(function(name), FunctionHidden(id=name, cases=[])) for name in names])


def written(path: Path, found: Probe) -> Path:
    path.write_text(probing.text(found))
    return path


def test_the_file_is_read_as_what_was_measured() -> None:
    rows = {"b": {"samples": 4, "solved": 1}, 'a"\\': {"samples": 3, "solved": 3}, "lost": {"samples": 0, "solved": 0}}
    found = probing.probe_of(rows, "folder/policy")
    assert found.problems == {"b": Tried(attempts=4, solved=1), 'a"\\': Tried(attempts=3, solved=3)}
    text = probing.text(found)
    assert read(text.encode()) == found
    assert len(text.splitlines()) == 8


def test_rates_are_told_of_all_of_categories_and_of_repositories() -> None:
    problems = [function("a"), function("b"), function("c", "debugging/[if]")]
    problems += [RepositoryProblem(id="d", tree=TREE, cell="psf/requests", category="commit")]  # type: ignore[list-item]
    tried = {name: Tried(attempts=4, solved=solved) for name, solved in zip("abcd", (0, 2, 4, 1), strict=True)}
    every, categories, repositories = probing.rates(tried, problems)
    assert [(one.name, one.problems, one.attempts, one.mean) for one in every] == [("all", 4, 16, 7 / 16)]
    assert [(one.name, one.mean, one.silent) for one in categories] == [
        ("debugging/return", 0.25, 0.5),
        ("commit", 0.25, 0.0),
        ("debugging/[if]", 1.0, 1.0),
    ]
    assert categories[0].low is not None
    assert categories[0].low <= 0.25 <= categories[0].high  # type: ignore[operator]
    assert (categories[1].low, categories[1].high) == (None, None)
    assert [one.name for one in repositories] == ["psf/requests"]
    shown = io.StringIO()
    Console(file=shown, width=120).print(probing.table([every, categories, repositories], 4))
    assert "debugging/[if]" in shown.getvalue()
    assert "psf/requests" in shown.getvalue()


def test_of_many_categories_the_smallest_stand_together() -> None:
    names = [f"p{i:02d}" for i in range(probing.ROWS + 3)]
    tried = {name: Tried(attempts=2, solved=1) for name in names}
    _, categories = probing.rates(tried, [function(name, f"kind-{name}") for name in names])
    assert len(categories) == probing.ROWS + 1
    assert (categories[-1].name, categories[-1].problems) == ("others (3)", 3)


def test_a_run_takes_a_probe_of_its_own_problems_alone(tmp_path: Path) -> None:
    objects, mine = DirectoryObjects(tmp_path / "objects"), pack(tmp_path / "pack", "a", "b")
    good = written(tmp_path / "good.json", Probe(problems={"a": Tried(attempts=4, solved=1)}))
    ref = p.stored_probe(objects, "r-1", good, mine)
    assert ref.key == "runs/r-1/probe.json"
    assert objects.get(ref) == good.read_bytes()
    other = written(tmp_path / "other.json", Probe(problems={"stranger": Tried(attempts=4, solved=1)}))
    with pytest.raises(DemoError, match=r"--probe .*found 'stranger'; allowed: ids of split rl of"):
        p.stored_probe(objects, "r-1", other, mine)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "cannot be read: No such file"),
        ('{"version": 1, "problems": {"a": {"attempts": NaN, "solved": 1}}}', "nan"),
    ],
)
def test_a_bad_probe_is_told_before_a_platform_is_asked_for(tmp_path: Path, data: str | None, why: str) -> None:
    if data:
        (tmp_path / "probe.json").write_text(data)
    with pytest.raises(DemoError, match=f"--probe .*{why}"):
        p.planned("r", DemoOptions(probe=tmp_path / "probe.json"))


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("nowhere", "is not there; allowed: the folder of a pack"),
        ("file.jsonl", "is a file; allowed: the folder of a pack"),
        ("empty", "missing; found the splits: none"),
    ],
)
def test_what_is_no_pack_is_refused_before_a_service_starts(
    tmp_path: Path, where: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.jsonl").write_text("{}")
    (tmp_path / "empty").mkdir()
    assert probing.run(tmp_path / where, BASE, 0, 1, "fresh", tmp_path / "probe.json") in (1, 2)
    assert why in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "probe.json").exists()


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = pack(tmp_path / "pack", "a")
    assert probing.run(mine, tmp_path, 0, 1, "fresh", tmp_path / "probe.json") == 2
    assert "no config.json there" in capsys.readouterr().err


def test_the_command_stands_beside_those_that_make_problems() -> None:
    app = typer.Typer(cls=cli._Commands)
    commands.register(app)
    run = CliRunner()
    listed = run.invoke(app, ["tasks", "--help"])
    assert listed.exit_code == 0, listed.output
    assert "probe" in listed.output
    assert "check" in listed.output
    told = run.invoke(app, ["tasks", "probe", "--help"])
    assert told.exit_code == 0, told.output
    assert "etude start --pack .cache/pack --probe probe.json" in told.output
    assert run.invoke(app, ["tasks", "probe", "pack", "--checkpoint", "c", "--samples", "0"]).exit_code == 2


def test_the_file_is_json_for_others(tmp_path: Path) -> None:
    path = written(tmp_path / "p.json", Probe(checkpoint="c", problems={"a": Tried(attempts=4, solved=1)}))
    assert json.loads(path.read_text()) == {
        "version": 1,
        "checkpoint": "c",
        "problems": {"a": {"attempts": 4, "solved": 1}},
    }
