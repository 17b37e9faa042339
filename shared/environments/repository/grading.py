"""Grades a submission: runs the hidden tests in a fresh sandbox, and audits a run in which all of them passed.

Order: the base tree is copied; the problem's set-up commands run; the submission is applied as data, except for paths that
decide how tests run; the hidden tests are put in last; the problem's runner runs them.

Candidate code shares a process with the tests and may deceive the runner. So a run that says "solved" counts only with a second
one in another fresh sandbox, where some tests must fail (`audit`). Anything else that goes wrong (an early exit, a skip, an
xfail, a test that is not collected) counts as not passed.

Where a core is free, the two runs go on side by side, so that the audit costs no time; it ends with the first run that is
unsolved. Else one follows the other. Chance decides which of the two begins: candidate code may find out that it has run on
this machine before, and must not learn from that which run it is in. So half of the unsolved submissions at least are audited in
vain. The order changes no verdict.

A sandbox that is killed says nothing about the submission: that is SandboxUnavailable, never a verdict.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.contracts.messages import Verdict
from shared.contracts.trajectory import Change, Submission
from shared.environments import InfrastructureError
from shared.environments.repository import audit, cores, graders, rooms, runtime
from shared.environments.repository.files import FileError, Files
from shared.environments.repository.graders import Report
from shared.environments.repository.infrastructure_files import split
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.environments.repository.submission import SubmissionError, apply_inside
from shared.sandbox.contract import WORKSPACE, CommandResult, Limits, Sandbox, Sandboxes

SETUP_S = 600.0  # of one set-up command
RUNS = 2  # of a solved submission: the run that counts, and its audit
OUTPUT_BYTES = 8 << 20
_SPARE_S = 600.0  # of a sandbox, for what is no command: a busy machine
AUDITS = 3  # changes that are tried where changed tests give no result
FAILED_NAMED = 20  # tests that a verdict names
_NAMED = 3  # paths or functions that a verdict names


# Why a solved run does not count (None: it does), and what its audit left open.
_Audited = tuple[str | None, list[str]]


def verdict(
    hidden: RepositoryHidden, report: Report, ignored: Sequence[str] = (), notes: Sequence[str] = ()
) -> Verdict:
    """Return the verdict: solved if every named test passed in a report that counts. `ignored`: paths of the submission that
    were not applied."""
    expected = {*hidden.fail_to_pass, *hidden.pass_to_pass}
    passed = len(expected & report.passed) if not report.wrong else 0
    solved = not report.wrong and bool(hidden.fail_to_pass) and passed == len(expected)
    error = report.wrong if solved or report.wrong else _said(ignored, report.restored)
    failed = [] if report.wrong else sorted(expected - report.passed)[:FAILED_NAMED]
    return Verdict(solved=solved, passed=passed, total=len(expected), error=error, failed=failed, notes=list(notes))


def _said(ignored: Sequence[str], restored: Sequence[str]) -> str:
    """Return which changes were ignored and which functions restored, and why; empty: none was."""
    said = []
    if ignored:
        said.append(f"Ignored: changes to {_list([repr(path) for path in ignored])}, which decide how the tests run")
    if restored:
        said.append(f"Restored: {_list(restored)}, which the code had replaced")
    return "; ".join(said)


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(f"{name:.80}" for name in names[:_NAMED]) + more


async def graded(
    sandboxes: Sandboxes,
    cache: Path,
    tree: Path,
    problem: RepositoryProblem,
    hidden: RepositoryHidden,
    work: Submission,
    choose: random.Random | None = None,
) -> tuple[Verdict, Report]:
    """Grade one submission. `choose`: decides the order of the runs and the audit's changes; None: chance does. Raises
    SandboxUnavailable, InfrastructureError, OSError."""
    runner = graders.runner(hidden.runner)
    changes, ignored = split(work.changes, hidden, runner)
    case = _Case(sandboxes, cache, tree, problem, hidden, runner)
    choose = choose or secrets.SystemRandom()
    early = bool(changes) and choose.random() < 0.5  # without changes nothing can tell the runs apart
    with cores.claimed(cache / "cores", RUNS if changes else 1) as free:
        report, audited = await case.runs(changes, choose, early, free == RUNS)
    if audited is None:
        return verdict(hidden, report, ignored), report
    objection, notes = audited
    if objection:
        report = Report(frozenset(), objection, report.output)
    return verdict(hidden, report, ignored, notes), report


def _text(tree: Path, path: str) -> str | None:
    """Return the text of a regular file of the base tree. None: it has none there."""
    target = tree / path
    try:
        return None if target.is_symlink() else target.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return None


@dataclass(frozen=True, slots=True)
class _Case:
    """A problem, and the means to run its tests."""

    sandboxes: Sandboxes
    cache: Path
    tree: Path
    problem: RepositoryProblem
    hidden: RepositoryHidden
    runner: graders.Runner

    async def runs(
        self, changes: Mapping[str, Change], choose: random.Random, early: bool, beside: bool
    ) -> tuple[Report, _Audited | None]:
        """Run the tests, and audit a solved run. `early`: the audit begins first. `beside`: the two go on side by side. Return the
        report of the tests, and the audit's; None: the run is unsolved, and an audit that still went on was ended."""

        plan = await self._plan(choose) if beside else None  # so that both runs begin with the same steps

        def begin_audit() -> asyncio.Task[_Audited]:
            return asyncio.create_task(self.objection(changes, choose, plan))

        auditing = begin_audit() if early else None
        try:
            if auditing is not None and not beside:
                await auditing
            running = asyncio.create_task(self.run(changes, self.hidden.tests))
            if auditing is None and beside:
                auditing = begin_audit()
            report = await running
            if not verdict(self.hidden, report).solved:
                return report, None
            auditing = auditing or begin_audit()
            return report, await auditing
        finally:
            if auditing is not None:
                auditing.cancel()
                await asyncio.gather(auditing, return_exceptions=True)

    async def _plan(self, choose: random.Random) -> audit.Audit | None:
        return await asyncio.to_thread(
            audit.planned, self.runner, self.hidden, lambda path: _text(self.tree, path), choose
        )

    async def objection(
        self, changes: Mapping[str, Change], choose: random.Random, plan: audit.Audit | None
    ) -> _Audited:
        """Audit the changes. Return why a solved run of them does not count (None: it does), and what the audit left open."""
        for left in reversed(range(AUDITS)):
            plan = plan or await self._plan(choose)
            if plan is None:
                return None, ["Unaudited: no change is known to any hidden test"]
            report = await self.run(changes, {**self.hidden.tests, **plan.files})
            objection = plan.objection(report)
            if not left or report.wrong or not plan.silent(report):  # else the change may be none that compiles
                break
            plan = None
        assert plan is not None
        total = len({*self.hidden.fail_to_pass, *self.hidden.pass_to_pass})
        open_ = [f"Unaudited: no change is known to {plan.unchanged} of {total} hidden tests"] if plan.unchanged else []
        return objection, open_

    async def run(self, changes: Mapping[str, Change], tests: Mapping[str, Change]) -> Report:
        """Run the tests once over the changes, in a fresh sandbox."""
        problem = self.problem
        base = await asyncio.to_thread(runtime.base, self.cache, self.tree, problem.workdir, problem.image)
        try:
            sandbox = await self.sandboxes.open(base, sandbox_limits(problem, problem.limits.grading_s, OUTPUT_BYTES))
        except ValueError as error:
            raise InfrastructureError(str(error)) from None
        try:
            await rooms.require_python(sandbox, problem.image)
            await set_up(sandbox, problem)
            if wrong := await _filled(sandbox, problem, changes, tests):
                return Report(frozenset(), f"Refused: {wrong}", "")
            run = self.runner.run(problem, self.hidden, runtime.own(self.tree, problem.workdir))
            return run.read(await _results(sandbox, problem, run))
        finally:
            await sandbox.close()


async def _results(sandbox: Sandbox, problem: RepositoryProblem, run: graders.Run) -> list[CommandResult]:
    """Run the commands one after another within one time limit."""
    results: list[CommandResult] = []
    left = problem.limits.grading_s
    session = await sandbox.session()
    for command in run.commands:
        # Through a pipe: a standard input of the session would be a file that the tests could find.
        script = f"printf %s {shlex.quote(command.stdin.decode())} | {shlex.join(command.argv)}"
        done = await session.run(script, time_s=max(left, 0.1), cwd=problem.folder)
        left -= done.seconds
        results.append(done)
    return results


def sandbox_limits(problem: RepositoryProblem, seconds: float, output_bytes: int = 1 << 20) -> Limits:
    """Return a sandbox's limits. `seconds`: of what is done in it when it is set up."""
    own = problem.limits
    life = seconds + len(problem.setup) * SETUP_S + _SPARE_S
    return Limits(own.memory_mb, own.disk_mb, own.processes, life, output_bytes)


async def _filled(
    sandbox: Sandbox, problem: RepositoryProblem, changes: Mapping[str, Change], tests: Mapping[str, Change]
) -> str:
    """Apply the changes, then the hidden tests. Return why that cannot be; empty: it is done. Raises InfrastructureError."""
    if not changes and not tests:
        return ""  # to start the server of files costs a tenth of a short grading
    files = Files(sandbox, python=runtime.python(problem.image))
    try:
        await apply_inside(changes, files, WORKSPACE)
        try:
            await apply_inside(tests, files, WORKSPACE)
        except SubmissionError as error:
            return f"the hidden tests do not fit: {error}"
    except SubmissionError as error:
        return str(error)
    except FileError as error:
        raise InfrastructureError(f"the changes cannot be applied: {error}") from None
    finally:
        await files.close()
    return ""


async def set_up(sandbox: Sandbox, problem: RepositoryProblem) -> None:
    """Run the problem's set-up commands, each in a session of its own: none leaves a process. Raises InfrastructureError where
    one fails: the problem was admitted with them."""
    for command in problem.setup:
        session = await sandbox.session()
        try:
            done = await session.run(command, time_s=SETUP_S, cwd=problem.folder)
        finally:
            await session.close()
        if done.exit_code != 0:
            code = f"ended with exit code {done.exit_code}"
            ending = f"was killed: {done.cause}" if done.exit_code is None else code
            said = (done.stdout + done.stderr).decode(errors="replace").strip()[-500:]
            raise InfrastructureError(f"setup: {command!r:.200} {ending}: {said}")
