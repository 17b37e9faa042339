"""pytest, started by `inside/grader.py`, which reports over a channel that the candidate is not told of.

Each run adds two canary tests with random names: one passes, one fails. A report with either result wrong counts as forged.
"""

from __future__ import annotations

import json
import random
import re
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from shared.environments.repository import runtime
from shared.environments.repository.graders import LIMITS, Command, Report, Run, ended, python_names
from shared.environments.repository.graders.altering import python as altering
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.sandbox.contract import WORKSPACE, CommandResult

_WORDS = (
    *("again", "also", "both", "edge", "empty", "large", "less", "many", "more", "once", "other", "small", "twice"),
    "with",
)
_COUNT = re.compile(r"\d+ (passed|failed)\b.* in [\d.]+s")
_FAILED = 1  # the status of a whole run: one canary fails


class PytestRunner:
    """See shared.environments.repository.graders.Runner. `engine`: what `inside/grader.py` runs the tests with."""

    infrastructure = python_names.INFRASTRUCTURE
    builds: tuple[str, ...] = ()

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def wrong_name(self, name: str) -> str | None:
        return python_names.wrong_name(name)

    def file_of(self, name: str, hidden: RepositoryHidden) -> str | None:
        return python_names.file_of(name)

    def run(self, problem: RepositoryProblem, hidden: RepositoryHidden, own: Sequence[str]) -> Run:
        nonce = secrets.token_hex(16)
        canaries = canary_names(hidden)
        request = {
            "engine": self._engine,
            "nonce": nonce,
            "canaries": canaries,
            "root": WORKSPACE,
            "args": targets(hidden),
            "site": runtime.SITE,
            "paths": runtime.import_paths(problem.workdir),
            "own": list(own),
        }
        argv = (runtime.python(problem.image), "-I", "-S", "-X", "utf8", runtime.GRADER)
        return Run((Command(argv, json.dumps(request).encode()),), partial(_read, nonce, canaries))

    def altered(self, text: str, name: str, choose: random.Random) -> str | None:
        return altering.altered(text, python_names.function_of(name), choose)


RUNNER = PytestRunner("pytest")


def targets(hidden: RepositoryHidden) -> list[str]:
    """Return the runner's arguments: the files that hold the named tests, unless the problem says others."""
    names = (*hidden.fail_to_pass, *hidden.pass_to_pass)
    return list(hidden.command) or sorted({f"{WORKSPACE}/{python_names.file_of(name)}" for name in names})


def canary_names(hidden: RepositoryHidden) -> list[str]:
    """Return two names that look like the problem's tests but belong to no test."""
    names = (*hidden.fail_to_pass, *hidden.pass_to_pass)
    taken = {name.partition("[")[0].rpartition("::")[2] for name in names}
    stems = sorted(name for name in taken if name.startswith("test")) or ["test"]
    found: list[str] = []
    while len(found) < 2:
        name = f"{secrets.choice(stems)}_{secrets.choice(_WORDS)}_{secrets.randbelow(90) + 10}"
        if name not in taken and name not in found:
            found.append(name)
    return found


def _without_canaries(output: str, canaries: list[str]) -> str:
    """Return the output without the lines of the canaries, and without pytest's count, which includes them."""
    own = (*canaries, runtime.GRADER)
    return "\n".join(line for line in output.splitlines() if not (_COUNT.search(line) or any(x in line for x in own)))


def _read(nonce: str, canaries: list[str], results: Sequence[CommandResult]) -> Report:
    """Read the grader's report, which the candidate may have forged."""
    done = results[0]
    output = _without_canaries(done.stderr.decode(errors="replace")[-4000:], canaries)
    if wrong := ended(results):
        return Report(frozenset(), wrong, output)
    mark = f"\n{nonce} ".encode()
    if done.stdout.count(mark) != 1:
        why = LIMITS.get(done.cause) or f"Exited: the tests ended early, with exit code {done.exit_code}"
        return Report(frozenset(), why, output)
    try:
        found: dict[str, Any] = json.loads(done.stdout.partition(mark)[2])
        collected, passed = list(map(str, found["collected"])), frozenset(map(str, found["passed"]))
        status, restored = found["exit"], tuple(map(str, found["patched"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return Report(frozenset(), "Forged: the report cannot be read", output)
    if status != done.exit_code or status != _FAILED:
        why = f"Exited: the runner gave status {status}, its process {done.exit_code}"
        return Report(frozenset(), f"{why}; allowed: {_FAILED}, as one added test fails", output)
    if not passed <= set(collected):
        return Report(frozenset(), "Forged: a test passed that was not collected", output)
    good, bad = canaries
    ends = {name.rpartition("::")[2]: name for name in collected}
    if passed and (ends.get(good) not in passed or ends.get(bad, "") in passed or bad not in ends):
        return Report(frozenset(), "Forged: a test that must fail passed, or one that must pass failed", output)
    own = {name for name in collected if name.rpartition("::")[2] not in canaries}
    return Report(passed & own, "", output, restored, failed=frozenset(own - passed))
