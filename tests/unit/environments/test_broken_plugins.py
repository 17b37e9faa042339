"""Environments and tools of other packages with a mistake: the error names the package, what was found and what is allowed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.reward.batches import graded_together
from services.rollout.cli import app
from shared.contracts.trajectory import Submission
from shared.environments import Grading, Places, tools
from shared.environments.registry import Environments
from shared.problems.importing import read_lines
from tests.plugins import forget
from tests.unit.environments.test_own_environment import EXAMPLE, LINE

OUTLINE = EXAMPLE.with_name("outline.py")
REPLY = {"text": "", "calls": [{"name": "answer", "arguments": {"value": 5}}]}
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install an example as a package of its own would be, with a text of it replaced; returns a file with one problem."""

    def installed(example: Path, group: str, value: str, old: str = "", new: str = "") -> Path:
        name, source = example.stem, example.read_text()
        assert old in source
        (tmp_path / f"{name}.py").write_text(source.replace(old, new) if old else source)
        about = tmp_path / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}:{value}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        forget("arithmetic", "outline")
        (tmp_path / "sums.jsonl").write_text(json.dumps(LINE) + "\n")
        return tmp_path / "sums.jsonl"

    yield installed
    forget("arithmetic", "outline")


def attempted(problems: Path) -> tuple[int, str]:
    """The exit code and the words of one attempt by hand."""
    script = problems.with_name("replies.json")
    script.write_text(json.dumps([REPLY]))
    words = ["run", str(problems), "--scripted", str(script), "--state", str(problems.with_name("state"))]
    done = CliRunner().invoke(app, words, env={"ETUDE_SANDBOX": "process", "COLUMNS": "400"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        (
            "from typing",
            "from typng",
            2,
            "'arithmetic' (arithmetic:Arithmetic, group 'etude.environments') cannot be loaded: ModuleNotFoundError",
        ),
        (
            "def brief(self, problem)",
            "def told(self, problem)",
            1,
            "abstract method brief; allowed: a class that docs/",
        ),
        (
            "def brief(self, problem)",
            "def __init__(self, places):\n        self.lost = {}['lost']\n\n    def brief(self, problem)",
            1,
            "cannot be made: KeyError: 'lost'; allowed: a class that docs/",
        ),
        (
            "async def submission",
            "async def submitted",
            1,
            "infrastructure: TypeError: Can't instantiate abstract class Sheet",
        ),
        (
            'kind, problem, hidden = "arithmetic"',
            'kind, problem, hidden = "sums"',
            1,
            "says that its kind is 'sums'; allowed: the name of its entry point",
        ),
        ("for c in calls]", "for c in calls[1:]]", 1, "found 0 results of Sheet.call; allowed: 1, one each, in order"),
        ("for ok in right]", "for ok in right[1:]]", 1, "not graded: found 0 verdicts of environment 'arithmetic'"),
        ("right = [", "right = 1 / 0, [", 1, "not graded: ZeroDivisionError: division by zero ("),
    ],
)
def test_a_mistake_in_an_environment_is_named_and_ends_no_command_with_a_traceback(
    install: Install, old: str, new: str, code: int, said: str
) -> None:
    found = attempted(install(EXAMPLE, "etude.environments", "Arithmetic", old, new))
    assert found[0] == code
    assert said in found[1]


def test_an_attempt_that_an_exception_of_the_environment_ends_is_kept_with_its_place(install: Install) -> None:
    problems = install(EXAMPLE, "etude.environments", "Arithmetic", "good = [", "good = 1 / 0, [")
    code, said = attempted(problems)
    assert code == 1
    assert "ZeroDivisionError: division by zero (" in said
    assert ", in call)" in said
    assert len(list(problems.with_name("state").glob("attempts/h-*"))) == 1


def test_admission_and_graders_refuse_another_number_of_verdicts(install: Install) -> None:
    path = install(EXAMPLE, "etude.environments", "Arithmetic", "for ok in right]", "for ok in [*right, True]]")
    (line,) = read_lines(path)
    environments = Environments(Places())
    (outcome,) = asyncio.run(environments.of(line.problem).admit([(line.problem, line.hidden)]))
    assert (
        outcome.reason == "could not be checked: InfrastructureError: found 4 verdicts; allowed: 3, one each, in order"
    )
    grading = Grading(line.problem, line.hidden, Submission())
    said = "InfrastructureError: found 2 verdicts of environment 'arithmetic'; allowed: 1, one each, in order"
    assert graded_together(environments, "arithmetic", [grading]) == [said]


def test_an_environment_whose_canary_breaks_too_is_the_reason(install: Install) -> None:
    path = install(EXAMPLE, "etude.environments", "Arithmetic", "right = [", "right = 1 / 0, [")
    (line,) = read_lines(path)
    environments = Environments(Places())

    async def breaks() -> None:
        raise KeyError("lost")

    environments.of(line.problem).ready = breaks  # type: ignore[method-assign]
    gradings = [Grading(line.problem, line.hidden, Submission())] * 2
    assert graded_together(environments, "arithmetic", gradings) == ["KeyError: 'lost'"] * 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("import ast\n", "import asst\n", "cannot be loaded: ModuleNotFoundError: No module named 'asst'"),
        ("spec = ", "specs = ", "cannot be made: AttributeError"),
        ('ToolSpec("outline"', 'ToolSpec("outlines"', "its spec says 'outlines'; allowed: the name of its entry point"),
    ],
)
def test_a_tool_that_cannot_be_offered_is_refused_before_an_attempt(
    install: Install, old: str, new: str, said: str
) -> None:
    install(OUTLINE, "etude.tools", "Tool", old, new)
    objection = tools.objection(["read", "outline", "submit"])
    assert objection is not None
    assert objection.startswith("found 'outline': 'outline' (outline:Tool, group 'etude.tools')")
    assert said in objection


def test_a_tool_of_another_package_is_offered(install: Install) -> None:
    install(OUTLINE, "etude.tools", "Tool")
    assert tools.objection(["read", "outline", "submit"]) is None
    assert (tools.objection(["fly"]) or "").startswith("found 'fly'; allowed: edit, grep, list, outline, read")
