"""Grading of repositories: honest work, cheats that convince a grader which trusts the tree, limits, and admission."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from shared.contracts.messages import Verdict
from shared.contracts.trajectory import Change, Submission
from shared.environments import Grading, Places, Ungradable
from shared.environments.repository import RepositoryEnvironment, cheats, grading, runtime
from shared.environments.repository.files import Files
from shared.environments.repository.problem import RepositoryHidden, RepositoryLimits, RepositoryProblem
from shared.environments.repository.submission import apply_inside
from shared.sandbox.contract import CommandResult, Limits
from tests.contract.sandboxes import NO_BWRAP
from tests.laboratory import CALC, FILES, HIDDEN, SOLUTION, UNITS, Laboratory, hidden

pytestmark = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)
ALL = ("tests/test_calc.py::test_add", "tests/test_calc.py::test_scaled", "tests/test_calc.py::test_zero")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def lab(tmp_path: Path, cache: Path) -> Laboratory:
    return Laboratory(tmp_path, cache)


def grade(
    lab: Laboratory,
    changes: Mapping[str, Change],
    problem: RepositoryProblem | None = None,
    secret: RepositoryHidden | None = None,
) -> Verdict:
    item = Grading(problem or lab.problem(), secret or hidden(), Submission(changes=dict(changes)))
    verdict = asyncio.run(lab.environment.grade([item]))[0]
    assert isinstance(verdict, Verdict), verdict
    return verdict


def test_what_the_runner_imported_is_no_garbage_to_look_through_and_candidates_cannot_list_it(lab: Laboratory) -> None:
    text = """import gc


def test_modules_are_frozen():
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000
    assert not any(type(one).__name__ == "Recorder" for one in gc.get_objects())
"""
    secret = hidden(
        fail_to_pass=["tests/test_frozen.py::test_modules_are_frozen"],
        pass_to_pass=[],
        tests={"tests/test_frozen.py": Change(text=text)},
    )
    found = grade(lab, {}, secret=secret)
    assert found.solved, found


def naive(lab: Laboratory, changes: Mapping[str, Change]) -> CommandResult:
    """A grader that puts the hidden tests and the submission into the tree and believes pytest's exit status."""

    async def run() -> CommandResult:
        problem = lab.problem()
        tree = lab.environment._trees.folder(problem.tree)
        base = runtime.base(lab.places.cache, tree, ".")
        environment = {
            **base.environment,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "",
            "PYTHONPATH": f"/workspace:{runtime.SITE}",
        }
        base = replace(base, environment=environment)
        assert lab.places.sandboxes is not None
        sandbox = await lab.places.sandboxes.open(base, Limits(memory_mb=2048, processes=64))
        try:
            files = Files(sandbox)
            await apply_inside(hidden().tests, files, "/workspace")
            await apply_inside(changes, files, "/workspace")
            session = await sandbox.session()
            return await session.run(f"{runtime.python()} -m pytest -q tests", time_s=60)
        finally:
            await sandbox.close()

    return asyncio.run(run())


def in_source(text: str) -> dict[str, Change]:
    return {"calc.py": Change(text=f"{CALC}\n{text}")}


EXIT = "import os\nos._exit(0)\n"
CHEATS: dict[str, dict[str, Change]] = {
    "empty tests": {"tests/test_calc.py": Change(text="".join(f"def {n.split('::')[1]}(): pass\n" for n in ALL))},
    "easier tests": {"tests/test_calc.py": Change(text=HIDDEN.replace("== 3", "== -1").replace("2000", "200"))},
    "another test in place of the deleted": {
        "tests/test_calc.py": Change(),
        "tests/test_other.py": Change(text="def test_add(): pass\n"),
    },
    "conftest passes all": {"tests/conftest.py": Change(text=cheats.ALL_PASS)},
    "conftest skips all": {"conftest.py": Change(text=cheats.SKIP_ALL)},
    "conftest expects failures": {"conftest.py": Change(text=cheats.SKIP_ALL.replace("mark.skip", "mark.xfail"))},
    "conftest deselects": {
        "conftest.py": Change(text="def pytest_collection_modifyitems(items):\n    items[:] = items[:1]\n"),
    },
    "pytest.ini collects only": {"pytest.ini": Change(text="[pytest]\naddopts = --collect-only\n")},
    "setup.cfg selects": {"setup.cfg": Change(text="[tool:pytest]\naddopts = -k zero\n")},
    "tox.ini loads a plugin": {
        "tox.ini": Change(text="[pytest]\naddopts = -p helper\n"),
        "helper.py": Change(text=cheats.ALL_PASS),
    },
    "pyproject.toml ignores": {"pyproject.toml": Change(text="[tool.pytest.ini_options]\naddopts = '--co'\n")},
    "sitecustomize exits": {"sitecustomize.py": Change(text=EXIT)},
    "pytest is replaced": {"pytest.py": Change(text="")},
    "pluggy is replaced": {"pluggy.py": Change(text=EXIT)},
    "an entry point loads a plugin": {
        "evil-1.0.dist-info/METADATA": Change(text="Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n"),
        "evil-1.0.dist-info/entry_points.txt": Change(text="[pytest11]\nevil = helper\n"),
        "helper.py": Change(text=cheats.ALL_PASS),
    },
    "source exits": in_source(EXIT),
    "source exits at the end": in_source("import atexit, os\natexit.register(os._exit, 0)\n"),
    "source ends pytest": in_source("import pytest\ndef add(a, b):\n    pytest.exit('done', 0)\n"),
    "source exits from a thread": in_source(
        "import os, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), os._exit(0))).start()\ntime.sleep(1)\n"
    ),
    "source skips": in_source(
        "import pytest\ndef add(a, b):\n    pytest.skip() if a else None\n    return 0\nscaled = add\n"
        "def scale(*a): pytest.skip()\n"
    ),
    "source patches reports": in_source(cheats.PATCH_REPORTS),
    "source patches runs": in_source(cheats.PATCH_RUN),
    "source patches calls": in_source(
        "import _pytest.runner as r\n"
        "r.CallInfo.from_call = classmethod(lambda c, func, when, reraise=None: c(None, None, 0, 0, 0, when, _ispytest=True))\n"
    ),
}


def test_an_honest_solution_is_solved_and_parts_of_it_are_counted(lab: Laboratory) -> None:
    assert grade(lab, SOLUTION) == Verdict(solved=True, passed=3, total=3)
    part = grade(lab, {"calc.py": SOLUTION["calc.py"]})
    assert part == Verdict(solved=False, passed=2, total=3, failed=part.failed)
    none = grade(lab, {})
    assert none == Verdict(solved=False, passed=1, total=3, failed=none.failed)
    assert (len(part.failed), len(none.failed)) == (1, 2)
    assert set(part.failed) < set(none.failed) < {*hidden().fail_to_pass, *hidden().pass_to_pass}
    assert naive(lab, SOLUTION).exit_code == 0
    assert naive(lab, {}).exit_code == 1


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_that_convinces_a_naive_grader_scores_nothing_here(lab: Laboratory, name: str) -> None:
    control = naive(lab, CHEATS[name])
    assert control.exit_code == 0, control.stdout.decode() + control.stderr.decode()
    verdict = grade(lab, CHEATS[name])
    assert not verdict.solved
    assert verdict.passed <= 1  # test_zero passes in the tree as it is given


def test_a_solution_is_solved_whatever_else_lies_in_the_tree(lab: Laboratory) -> None:
    """What is not applied does no harm either: the agent's own tests and settings."""
    extra = {
        "tests/test_mine.py": Change(text="def test_mine(): assert False\n"),
        "pytest.ini": Change(text="[pytest]\naddopts = --nonsense\n"),
        "notes.txt": Change(text="x"),
        "data.bin": Change(data=b"\xff\0"),
    }
    assert grade(lab, {**SOLUTION, **extra}).solved


def test_the_tree_s_own_settings_and_conftest_stay_in_force(lab: Laboratory) -> None:
    files = {
        **{path: text for path, text in FILES.items() if path not in ("calc.py", "units.py")},
        "src/inner/calc.py": CALC,
        "src/inner/units.py": UNITS,
        "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['src/inner']\naddopts = '--cov --strict-markers'\n",
        "tests/conftest.py": "import pytest\n@pytest.fixture\ndef one(): return 1\n",
    }
    secret = hidden(
        tests={"tests/test_calc.py": Change(text=HIDDEN.replace("def test_add():", "def test_add(one):"))},
        solution={},
    )
    work = {f"src/inner/{path}": change for path, change in SOLUTION.items()}
    assert grade(lab, work, lab.problem(files), secret).solved


@pytest.mark.parametrize("name", ["iniconfig", "pluggy", "packaging", "pygments"])
def test_a_tree_may_hold_a_package_that_pytest_uses(lab: Laboratory, name: str) -> None:
    files = {**FILES, f"src/{name}/__init__.py": "def broken():\n    return 1\n"}
    text = f"import {name}\n\ndef test_own():\n    assert {name}.broken() == 2\n"
    secret = hidden(
        fail_to_pass=["tests/test_own.py::test_own"],
        tests={"tests/test_own.py": Change(text=text)},
        pass_to_pass=[],
        solution={},
    )
    problem = lab.problem(files)
    work = {f"src/{name}/__init__.py": Change(text="def broken():\n    return 2\n")}
    assert grade(lab, work, problem, secret).solved
    assert not grade(lab, {}, problem, secret).solved


def test_unittest_cases_parameters_and_classes_have_their_pytest_names(lab: Laboratory) -> None:
    text = (
        "import unittest\nimport pytest\nfrom calc import add\n"
        "class Cases(unittest.TestCase):\n"
        "    def test_one(self): self.assertEqual(add(1, 1), 2)\n"
        "    def test_zero(self): self.assertEqual(add(0, 0), 0)\n"
        "    @unittest.skip('no')\n    def test_skipped(self): pass\n"
        "    def test_parts(self):\n        for i in range(2):\n            with self.subTest(i=i):\n"
        "                self.assertEqual(add(i, i), i + i)\n"
        "@pytest.mark.parametrize('a', [1, 'x::y [z]'])\ndef test_param(a): assert add(1, 1) == 2\n"
        "@pytest.mark.xfail\ndef test_expected(): assert add(1, 1) == 0\n"
        "@pytest.fixture\ndef broken():\n    yield\n    raise RuntimeError\n"
        "def test_teardown(broken): pass\n"
    )
    at = "tests/test_kinds.py::"
    good = [f"{at}Cases::test_one", f"{at}Cases::test_parts", f"{at}test_param[1]", f"{at}test_param[x::y [z]]"]
    bad = [f"{at}Cases::test_skipped", f"{at}test_expected", f"{at}test_teardown", f"{at}test_missing"]

    def verdict(names: list[str], changes: Mapping[str, Change]) -> Verdict:
        secret = hidden(fail_to_pass=names, pass_to_pass=[], tests={"tests/test_kinds.py": Change(text=text)})
        return grade(lab, changes, secret=secret)

    assert verdict(good, SOLUTION) == Verdict(solved=True, passed=4, total=4)
    assert verdict(good, {}) == Verdict(solved=False, passed=0, total=4, failed=sorted(good))
    assert verdict([*good, *bad], SOLUTION) == Verdict(solved=False, passed=4, total=8, failed=sorted(bad))


def test_what_a_test_replaces_for_itself_is_not_blamed_on_the_submission(lab: Laboratory) -> None:
    text = (
        "import random\nfrom calc import add\n"
        "def test_own():\n    random.randint = lambda a, b: a\n    assert add(random.randint(1, 9), 2) == 3\n"
        "def test_fails():\n    assert add(1, 1) == 3\n"
    )
    names = ["tests/test_own.py::test_own", "tests/test_own.py::test_fails"]
    secret = hidden(fail_to_pass=names, pass_to_pass=[], tests={"tests/test_own.py": Change(text=text)})
    found = grade(lab, SOLUTION, secret=secret)
    assert found == Verdict(solved=False, passed=1, total=2, failed=names[1:])


def test_a_solved_verdict_says_which_tests_no_audit_has_seen(lab: Laboratory) -> None:
    text = (
        "import functools\nfrom calc import add\ndef odd(f):\n    @functools.wraps(f)\n    def g(): return f()\n    return g\n"
        "def test_plain():\n    assert add(1, 1) == 2\n@odd\ndef test_odd():\n    assert add(1, 2) == 3\n"
    )
    names = ["tests/test_odd.py::test_plain", "tests/test_odd.py::test_odd"]
    secret = hidden(fail_to_pass=names, pass_to_pass=[], tests={"tests/test_odd.py": Change(text=text)})
    note = "Unaudited: no change is known to 1 of 2 hidden tests"
    assert grade(lab, SOLUTION, secret=secret) == Verdict(solved=True, passed=2, total=2, notes=[note])


def test_grading_past_its_limit_is_the_agent_s_doing(lab: Laboratory) -> None:
    problem = lab.problem(limits=RepositoryLimits(grading_s=1.5))
    verdict = grade(lab, in_source("import time\ntime.sleep(60)\n"), problem)
    assert verdict == Verdict(solved=False, passed=0, total=3, error="Timeout")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"../x": Change(text="")}, "Refused: '../x'"),
        ({"/etc/x": Change(text="")}, "Refused: '/etc/x'"),
        ({"calc.py/x": Change(text="")}, "Refused: 'calc.py/x': found a file"),
        ({"data": Change(data=b"\xff" * ((32 << 20) + 1))}, "Refused: found 33554433 bytes"),
    ],
)
def test_a_submission_that_cannot_be_applied_is_not_solved(
    lab: Laboratory, changes: dict[str, Change], said: str
) -> None:
    verdict = grade(lab, changes)
    assert not verdict.solved
    assert verdict.error.startswith(said)


def test_a_tree_that_is_gone_and_a_set_up_that_fails_are_infrastructure(lab: Laboratory) -> None:
    from shared.contracts.run import Ref

    gone = lab.problem(tree=Ref(key="trees/none", size=1, checksum="0" * 32))
    failing = lab.problem(setup=["echo reason >&2; false"])
    items = [Grading(problem, hidden(), Submission()) for problem in (gone, failing)]
    first, second = asyncio.run(lab.environment.grade(items))
    assert isinstance(first, Ungradable)
    assert "trees/none" in first.reason
    assert isinstance(second, Ungradable)
    assert "reason" in second.reason


def test_admission_proves_a_problem_with_its_solution_and_names_what_is_wrong_with_others(lab: Laboratory) -> None:
    problem = lab.problem()
    pairs = [
        (problem, hidden()),
        (problem, hidden(solution={"calc.py": SOLUTION["calc.py"]})),
        (problem, hidden(fail_to_pass=[ALL[2]], pass_to_pass=[])),
        (lab.problem(prompt=" "), hidden()),
        (problem, hidden(fail_to_pass=[])),
    ]
    outcomes = asyncio.run(lab.environment.admit(pairs))
    assert (outcomes[0].reason, outcomes[0].proven) == ("", True)
    reason, _, printed = outcomes[1].reason.partition("; not passed: ")
    assert reason == "oracle: the solution is not solved: 2 of 3 tests passed; allowed: every named test passes"
    assert printed.startswith(f"{ALL[1]}; pytest: ")
    assert "assert 200 == 2000" in printed
    assert printed.count("FAILED") == 1  # the canary that must fail is not told
    assert [outcome.reason for outcome in outcomes[2:]] == [
        "no-op: the tree as given passes every test: 1 of 1 tests passed; nothing is to be done",
        "field 'prompt': is empty; allowed: an instruction, such as the text of the issue",
        "field 'hidden.fail_to_pass': is empty; allowed: the tests that fail before the solution and pass after it",
    ]


def test_every_objection_names_the_field_what_was_found_and_what_is_allowed(
    lab: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = lab.environment.objection
    assert of(lab.problem()) is None
    assert of(lab.problem(tools=["fly", "submit"])) == (
        "field 'tools': found 'fly'; allowed: edit, grep, list, read, search, shell, submit, todo, web_search, write"
    )
    assert of(lab.problem(tools=["read"])) == "field 'tools': found no 'submit'; allowed: lists that hold it"
    assert "ETUDE_WEB_SEARCH" in str(of(lab.problem(tools=["web_search", "submit"])))
    monkeypatch.setenv("ETUDE_WEB_SEARCH", "http://127.0.0.1:1/search")
    assert of(lab.problem(tools=["web_search", "submit"])) is None
    assert "workdir" in str(of(lab.problem(workdir="../x")))
    assert "network" in str(of(lab.problem(network="all")))


def test_given_returns_text_of_the_base_tree(lab: Laboratory) -> None:
    problem = lab.problem({**FILES, "image": b"\xff\0"})
    assert lab.environment.given(problem, ["calc.py", "image", "none", "../x", "tests"]) == {"calc.py": CALC}


def test_an_environment_is_ready_once_a_command_ran_and_says_why_it_is_not(lab: Laboratory, tmp_path: Path) -> None:
    from shared.sandbox import SandboxUnavailable

    asyncio.run(lab.environment.ready())
    with pytest.raises(SandboxUnavailable, match="no sandboxes"):
        asyncio.run(RepositoryEnvironment(Places(cache=tmp_path)).ready())


class Once(random.Random):
    """Chance whose first draw is known: below one half, the audit comes first."""

    def __init__(self, first: float) -> None:
        super().__init__(0)
        self.first: float | None = first

    def random(self) -> float:
        first, self.first = self.first, None
        return super().random() if first is None else first


@pytest.mark.parametrize("cores", [0, 2])
@pytest.mark.parametrize("first", [0.0, 0.9])
def test_the_order_of_the_run_and_its_audit_changes_no_verdict(
    lab: Laboratory, first: float, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))  # with two, they go on side by side
    assert lab.places.sandboxes is not None
    problem = lab.problem()
    forged = "class Any:\n    def __eq__(self, other):\n        return True\n\n\n"
    forged += "def add(*given):\n    return Any()\n\n\nscaled = add\n"
    tree = lab.environment._trees.folder(problem.tree)
    works = (SOLUTION, {"calc.py": Change(text=CALC + "#")}, {"calc.py": Change(text=forged)})

    async def verdicts() -> list[Verdict]:
        sandboxes, cache = lab.places.sandboxes, lab.places.cache
        assert sandboxes is not None
        return [
            (await grading.graded(sandboxes, cache, tree, problem, hidden(), Submission(changes=work), Once(first)))[0]
            for work in works
        ]

    solved, unsolved, cheated = asyncio.run(verdicts())
    assert solved == Verdict(solved=True, passed=3, total=3)
    assert (unsolved.solved, unsolved.passed, unsolved.error) == (False, 1, "")
    assert not cheated.solved
    assert str(cheated.error).startswith("Forged: 2 of 2 tests passed")
