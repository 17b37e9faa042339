"""What the tests of a project do before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.curator.sources.python.laboratory import Ran, Runs
from services.curator.sources.python.project import Project, SourceError
from shared.environments.repository.graders.python_names import wrong_name

SLOW_S = 2.0  # a test that takes longer names no problem: every grading of every attempt would wait for it
_EACH_S = 2.5 * SLOW_S
_TRACED_EACH_S = 20.0
_WHOLE_S = 480.0
_TRACED_S = 900.0
_MOST_FAILING = 0.25  # of all tests; a project where more fail does not work here
_SHOWN = 3
# Errors that say that a host was asked for; sandboxes have no network.
_NETWORK = frozenset(
    ["gaierror", "URLError", "ConnectionError", "ConnectTimeout", "NewConnectionError", "ConnectError"]
)
_UNREACHABLE = ("Network is unreachable", "Name or service not known", "Temporary failure in name resolution")


@dataclass(frozen=True, slots=True)
class Baseline:
    """`tests`: those that pass in both runs and are quick, by name. `lines`: path -> lines that they run. `notes`: what a person
    should know, such as tests that fail already. `uncollected`: files of tests that pytest cannot collect."""

    tests: Mapping[str, Ran]
    lines: Mapping[str, frozenset[int]]
    notes: tuple[str, ...]
    uncollected: frozenset[str] = frozenset()

    def covering(self, path: str, start: int, end: int) -> list[Ran]:
        """Return the tests that call code between two lines of a module, the quickest first."""
        found = [
            test for test in self.tests.values() if any(p == path and start <= n <= end for p, n in test.functions)
        ]
        return sorted(found, key=lambda test: (test.seconds, test.name))


async def baseline(project: Project, runs: Runs) -> Baseline:
    """Run all tests twice: as they are, and traced. Raises SourceError that says what to do, SandboxUnavailable."""
    if not runs.collected:
        raise SourceError(_uncollected(project, runs))
    first = await runs.run(runs.collected, each_s=_EACH_S, time_s=_WHOLE_S)
    failing = [test for test in first.tests if test.outcome == "failed" and test.kinds[:1] != ("TookTooLong",)]
    if wrong := _objection(project, runs, failing, len(first.tests)):
        raise SourceError(wrong)
    quick = {
        test.name: test
        for test in first.tests
        if test.passed and test.seconds <= SLOW_S and wrong_name(test.name) is None
    }
    second = await runs.run(list(quick), each_s=_TRACED_EACH_S, time_s=_TRACED_S, trace=True)
    tests = {
        test.name: Ran(test.name, "passed", seconds=quick[test.name].seconds, functions=test.functions)
        for test in second.tests
        if test.passed
    }
    if not tests:
        raise SourceError(
            f"{project.label}: no test passes twice within {SLOW_S:g} s each; allowed: projects with quick tests"
        )
    uncollected = frozenset(file for file, _ in runs.errors)
    return Baseline(tests, second.lines, tuple(_notes(runs, first.tests, failing, tests)), uncollected)


def _uncollected(project: Project, runs: Runs) -> str:
    if not runs.errors:
        return f"{project.label}: pytest finds no test in {len(project.tests)} files; allowed: projects whose tests pytest collects"
    shown = "; ".join(f"{file}: {said}" for file, said in runs.errors[:_SHOWN])
    return (
        f"{project.label}: no file of tests can be collected before anything is changed: {shown}. If they import other packages, "
        "`pip install --target FOLDER NAMES` and give --libraries FOLDER; else choose other files with --tests"
    )


def _objection(project: Project, runs: Runs, failing: list[Ran], ran: int) -> str:
    """Return why no problem can be made; empty: some can."""
    network = [test for test in failing if _of_network(test)]
    shown = "; ".join(f"{test.name}: {_error(test)}" for test in (network or failing)[:_SHOWN])
    passing = ran - len(failing)
    if network and (not passing or len(network) > _MOST_FAILING * ran):
        return (
            f"{project.label}: {len(network)} of {ran} tests need the network, which no sandbox of tests has: {shown}. Choose "
            "files of tests that work without it with --tests"
        )
    if not passing or len(failing) > _MOST_FAILING * ran:
        return (
            f"{project.label}: {len(failing)} of {ran} tests fail before anything is changed: {shown}. Repair the project first, "
            "choose files of tests that pass with --tests, or give what they import with --libraries"
        )
    return ""


def _of_network(test: Ran) -> bool:
    return not _NETWORK.isdisjoint(test.kinds) or any(said in test.said for said in _UNREACHABLE)


def _error(test: Ran) -> str:
    return f"{test.kinds[0] if test.kinds else 'failed'}: {test.said.splitlines()[0] if test.said else ''}"[:160]


def _notes(runs: Runs, first: tuple[Ran, ...], failing: list[Ran], kept: Mapping[str, Ran]) -> list[str]:
    notes = [f"{file} cannot be collected and is left out: {said}" for file, said in runs.errors]
    if failing:
        notes.append(
            f"{len(failing)} tests fail before anything is changed and are not asked for, such as {failing[0].name}"
        )
    if slow := [
        test.name for test in first if (test.passed and test.seconds > SLOW_S) or test.kinds[:1] == ("TookTooLong",)
    ]:
        notes.append(f"{len(slow)} tests take more than {SLOW_S:g} s and are not asked for, such as {slow[0]}")
    missing = len(first) - len(kept) - len(failing) - len(slow)
    if missing > 0:
        notes.append(f"{missing} tests are skipped, or do not pass every time, and are not asked for")
    return notes
