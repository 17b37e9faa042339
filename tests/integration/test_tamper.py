"""Attacks on grading. Each one first convinces a grader that trusts the tree; the true one then gives the honest score."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from shared.contracts.messages import Verdict
from shared.contracts.trajectory import Change, Submission
from shared.environments import Grading, Ungradable
from shared.environments.repository import runtime
from shared.environments.repository.problem import RepositoryLimits, RepositoryProblem
from shared.sandbox.contract import Limits, Sandbox
from shared.together import together
from tests.contract.sandboxes import NO_BWRAP
from tests.integration.tamper_attacks import ATTACKS, JUNIT, Attack, Judge
from tests.integration.tamper_problem import FILES, FREE, SECRET, SOLVED
from tests.laboratory import Laboratory
from tests.patience import patient

pytestmark = [pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP), pytest.mark.timeout(1200)]
AT_A_TIME = 4
ORACLE, NO_OP = Submission(changes=SECRET.solution), Submission()
_INSTALLED = "installed"  # a folder of the naive grader's packages, with the released version of the package under test


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def problem(lab: Laboratory) -> RepositoryProblem:
    return lab.problem(FILES, limits=RepositoryLimits(grading_s=60.0, memory_mb=512, processes=64))


@pytest.fixture(scope="module")
def answers(lab: Laboratory, problem: RepositoryProblem) -> Mapping[str, Verdict | Ungradable]:
    """Grade every attack, and the true solution and no change before them."""
    short = replace_limits(problem, 8.0)
    endless = ("endless output", "a slow loris")
    items = [Grading(problem, SECRET, ORACLE), Grading(problem, SECRET, NO_OP)]
    items += [
        Grading(short if name in endless else problem, SECRET, Submission(changes=attack.changes))
        for name, attack in ATTACKS.items()
    ]
    found = asyncio.run(lab.environment.grade(items))
    return dict(zip(("oracle", "no-op", *ATTACKS), found, strict=True))


def replace_limits(problem: RepositoryProblem, seconds: float) -> RepositoryProblem:
    return msgspec.structs.replace(problem, limits=msgspec.structs.replace(problem.limits, grading_s=seconds))


@pytest.fixture(scope="module")
def believed(lab: Laboratory, problem: RepositoryProblem) -> Mapping[str, bool]:
    """Let the naive grader judge every attack, and the true solution and no change by each of its ways."""
    cases = dict(ATTACKS)
    for judge in COMMANDS:
        cases[f"oracle by {judge}"] = Attack(dict(SECRET.solution), judge)
        cases[f"no-op by {judge}"] = Attack({}, judge)
    found = asyncio.run(limited([partial(naive, lab, problem, case) for case in cases.values()]))
    return dict(zip(cases, found, strict=True))


async def limited(works: list[Callable[[], Awaitable[bool]]]) -> list[bool]:
    room = asyncio.Semaphore(AT_A_TIME)

    async def one(work: Callable[[], Awaitable[bool]]) -> bool:
        async with room:
            return await work()

    return await together(one(work) for work in works)


_PYTEST = f"{runtime.python()} -m pytest -q -p no:cacheprovider --tb=no tests"
COMMANDS: dict[Judge, str] = {
    "exit code": _PYTEST,
    "no failure": f"timeout -s KILL 15 {_PYTEST} | head -c 100000",
    "junit": f"{_PYTEST} --junitxml=junit.xml",
    "reward": f"{_PYTEST} && echo 1 > reward.txt",
    "script": "./bin/check.sh",
    "path": "pytest -q tests",
}


async def naive(lab: Laboratory, problem: RepositoryProblem, attack: Attack) -> bool:
    """Say whether a grader is convinced that puts the hidden tests into the tree, the submission over them, and looks at one
    sign of success."""
    changes, judge = attack.changes, attack.judge
    assert lab.places.sandboxes is not None
    tree = lab.environment._trees.folder(problem.tree)
    base = runtime.base(lab.places.cache, tree, ".")
    environment = {
        **base.environment,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "",
        "PYTHONPATH": f"/workspace:/tmp/site:{runtime.SITE}",
        "PYTHONUSERBASE": "/workspace/user",
        "PATH": f"/workspace/bin:{base.environment['PATH']}",
    }
    sandbox = await lab.places.sandboxes.open(
        replace(base, environment=environment), Limits(memory_mb=512, processes=64)
    )
    try:
        await put(sandbox, {**SECRET.tests, **changes}, "/workspace")
        await put(sandbox, {f"{_INSTALLED}/calc.py": Change(text=SOLVED)}, "/tmp/site")
        session = await sandbox.session()
        done = await session.run(COMMANDS[judge], time_s=patient(60), cwd="/workspace")
        if attack.mark:
            await session.run(f"until [ -e {attack.mark} ]; do sleep 0.05; done", time_s=patient(30), cwd="/workspace")
        if judge == "no failure":
            return not any(word in done.stdout for word in (b"failed", b"error"))
        if judge in ("junit", "reward"):
            name = "junit.xml" if judge == "junit" else "reward.txt"
            found = (await session.run(f"cat {name}", time_s=10, cwd="/workspace")).stdout
            return b'failures="0"' in found.replace(b"'", b'"') if judge == "junit" else found.strip() == b"1"
        return done.exit_code == 0
    finally:
        await sandbox.close()


async def put(sandbox: Sandbox, changes: Mapping[str, Change], folder: str) -> None:
    """Write changes as they come, without a check."""
    session = await sandbox.session()
    for path, change in changes.items():
        data = (change.data or b"") if change.text is None else change.text.encode()
        target = f"{folder}/{path}"
        script = f"mkdir -p $(dirname '{target}'); rm -f '{target}'; "
        if not change.deleted:
            script += f"cat > '{target}'; chmod {'755' if change.executable else '644'} '{target}'"
        done = await session.run(script, time_s=30, stdin=data)
        assert done.exit_code == 0, done.stderr
    await session.close()


def test_the_suite_is_as_large_as_it_says() -> None:
    assert len(ATTACKS) >= 60


@pytest.mark.parametrize("judge", COMMANDS)
def test_the_naive_grader_is_right_about_honest_work(believed: Mapping[str, bool], judge: Judge) -> None:
    assert believed[f"oracle by {judge}"]
    assert not believed[f"no-op by {judge}"]


def test_the_solution_scores_one_and_no_change_nothing(answers: Mapping[str, Verdict | Ungradable]) -> None:
    total = len(SECRET.fail_to_pass) + len(SECRET.pass_to_pass)
    assert answers["oracle"] == Verdict(solved=True, passed=total, total=total)
    assert isinstance(answers["no-op"], Verdict)
    assert answers["no-op"] == Verdict(solved=False, passed=FREE, total=total, failed=answers["no-op"].failed)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_that_convinces_a_naive_grader_is_not_paid(
    answers: Mapping[str, Verdict | Ungradable], believed: Mapping[str, bool], name: str
) -> None:
    attack: Attack = ATTACKS[name]
    assert believed[name], "the naive grader is not convinced: the attack is none"
    found = answers[name]
    assert isinstance(found, Verdict), found
    assert not found.solved, found
    assert found.error.startswith(attack.says), found


def test_reports_look_as_a_runner_writes_them() -> None:
    assert 'failures="0"' in JUNIT.replace("'", '"')
