"""Runners of hidden tests: pytest, unittest, node, go and cargo, behind one Protocol. `hidden.runner` names one.

Invariants of every runner:
- It starts from files of the base commit and the hidden tests. Files that decide how it runs (`infrastructure`) never come from
  a submission.
- Only a test that it reports as passed counts. A test that was skipped, expected to fail, deselected or cut short did not pass.
- It may be deceived: candidate code runs in the process that runs the tests. So a solved run is always followed by an audit, in
  which some hidden tests must fail (`shared.environments.repository.audit`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.plugins import Plugins
from shared.sandbox.contract import Cause, CommandResult


@dataclass(frozen=True, slots=True)
class Report:
    """A run of the hidden tests. `passed`, `failed`: names of tests with that result; one in neither had none. `wrong`: why nothing
    in the report counts; empty: it counts. `output`: the end of what the runner printed, for people. `restored`: what the
    candidate had replaced, such as `random.randint`, and the runner put back before the tests."""

    passed: frozenset[str]
    wrong: str
    output: str
    restored: tuple[str, ...] = ()
    failed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Command:
    """A program that runs in the problem's folder. `stdin`: its input."""

    argv: tuple[str, ...]
    stdin: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the hidden tests. `read`: takes one result for each command and returns the report. It is pure."""

    commands: tuple[Command, ...]
    read: Callable[[Sequence[CommandResult]], Report]


class Runner(Protocol):
    """`infrastructure`: patterns for one part of a path; changes to a matching path are ignored. `builds`: the same, except for
    files that the known solution changes too, such as `go.mod`."""

    infrastructure: tuple[str, ...]
    builds: tuple[str, ...]

    def wrong_name(self, name: str) -> str | None:
        """Return which names of tests are allowed, where this is none of them. None: it is one."""
        ...

    def file_of(self, name: str, hidden: RepositoryHidden) -> str | None:
        """Return the path of the file that holds the test. None: the name does not say it."""
        ...

    def run(self, problem: RepositoryProblem, hidden: RepositoryHidden, own: Sequence[str]) -> Run:
        """Return how to run all named tests. `own`: packages of the tree that the runner itself uses (runtime.own)."""
        ...

    def altered(self, text: str, name: str, choose: random.Random) -> str | None:
        """Return the test file with one change after which the named test must fail, whatever honest code it tests. None: no
        such change is known."""
        ...


PLUGINS = Plugins(
    "etude.graders",
    {
        name: f"shared.environments.repository.graders.{name}_runner:RUNNER"
        for name in ("pytest", "unittest", "node", "go", "cargo")
    },
)


def runner(name: str) -> Runner:
    """Return the runner of this name. Raises UnknownName."""
    found: Runner = PLUGINS.load(name)
    return found


LIMITS = {
    Cause.time_limit: "Timeout",
    Cause.memory_limit: "Exited: the tests ran out of memory",
    Cause.disk_limit: "Exited: the tests filled the disk",
    Cause.process_limit: "Exited: the tests started too many processes",
}


def ended(results: Sequence[CommandResult]) -> str:
    """Return which limit ended a command, so that no results count. Empty: none did."""
    return next((LIMITS.get(one.cause, "Exited: the shell ended") for one in results if one.exit_code is None), "")


def ending(results: Sequence[CommandResult]) -> str:
    """Return the end of what the commands printed, for people."""
    return "\n".join((one.stdout[-2000:] + b"\n" + one.stderr[-2000:]).decode(errors="replace") for one in results)[
        -4000:
    ]


def read_each(
    names: Sequence[str],
    statuses: Sequence[int],
    outcomes: Callable[[str], tuple[set[str], set[str]]],
    results: Sequence[CommandResult],
) -> Report:
    """Return the report of one command for each of `names`, where tests are called `name::test`. `statuses`: exit codes of a run
    that reached its end. `outcomes`: the tests that passed and those that failed, by what the command printed."""
    passed: set[str] = set()
    failed: set[str] = set()
    for name, done in zip(names, results, strict=True):
        if done.exit_code in statuses and not done.lost_bytes:
            good, bad = outcomes(done.stdout.decode(errors="replace"))
            passed |= {f"{name}::{test}" for test in good}
            failed |= {f"{name}::{test}" for test in bad}
    return Report(frozenset(passed), ended(results), ending(results), failed=frozenset(failed))
