"""`go test -json`. Names: `import/path::TestName` or `import/path::TestName/subtest`.

Every `*_test.go` is test infrastructure: one file of a package can hold a `TestMain` that decides for all. `go.mod`, with
its `replace`, comes from the base commit unless the known solution changes it.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from shared.environments.repository.graders import Command, Report, Run, ended, ending
from shared.environments.repository.graders.altering import lines
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.sandbox.contract import CommandResult

_NAME = re.compile(r"[\w.~/-]+::(?:Test|Example|Fuzz)\w*(?:/.+)?")
# `if got := f(); got != 3 {`. Another number makes the condition true, if no `&&` or `!(` stands in it.
_INEQUALITY = re.compile(
    r"\s*if (?:[\w, ]+ := [^;{}&`]*; )?(?:(?!!\()[^;{}&`])*?[\w)\]] != "
    r"""(?P<literal>-?\d+|"[^"\\]*")(?: \|\| (?:(?!!\()[^;{}&`])*)? \{\s*"""
)
_NONE = re.compile(r"(?!)")
_FAILING = ("Fatal", "Fatalf", "Error", "Errorf", "Fail", "FailNow")
# A user's settings, another toolchain and the network have no say.
_ENVIRONMENT = (
    "GOENV=off",
    "GOFLAGS=",
    "GOTOOLCHAIN=local",
    "GOPROXY=off",
    "GOWORK=off",
    "GOCACHE=/tmp/go-build",
    "GOPATH=/tmp/go",
)


class GoRunner:
    """See shared.environments.repository.graders.Runner."""

    infrastructure = ("*_test.go", "go.work", "go.work.sum", "go.env")
    builds = ("go.mod", "go.sum", "vendor")

    def wrong_name(self, name: str) -> str | None:
        return None if _NAME.fullmatch(name) else "import/path::TestName or import/path::TestName/subtest"

    def file_of(self, name: str, hidden: RepositoryHidden) -> str | None:
        """Return the hidden test file that has the function; the name alone does not say it."""
        heading = re.compile(rf"(?m)^func {re.escape(_function(name))}\(")
        files = [path for path, change in hidden.tests.items() if change.text and heading.search(change.text)]
        return files[0] if len(files) == 1 else None

    def run(self, problem: RepositoryProblem, hidden: RepositoryHidden, own: Sequence[str]) -> Run:
        packages = sorted({name.partition("::")[0] for name in (*hidden.fail_to_pass, *hidden.pass_to_pass)})
        options = ("-json", "-count=1", "-vet=off", *hidden.command)
        return Run((Command(("/usr/bin/env", *_ENVIRONMENT, "go", "test", *options, *packages)),), _read)

    def altered(self, text: str, name: str, choose: random.Random) -> str | None:
        found = list(re.finditer(rf"(?m)^func {re.escape(_function(name))}\((\w+) \*testing\.T\) *\{{", text))
        if len(found) != 1 or found[0][1] == "_":
            return None
        case = found[0][1]
        sentinel = _sentinel(case, choose)
        # A subtest ends before the lines after it: only a statement in front of all makes it fail.
        equality = _NONE if "/" in name.partition("::")[2] else _INEQUALITY
        return lines.altered(text, found[0], equality, sentinel, choose, partial(_fails, case))


RUNNER = GoRunner()


def _fails(case: str, text: str, end: int) -> bool:
    """Say whether the next line, the first of the block, fails the test. `case`: its name of `*testing.T`."""
    line = text[end + 1 :].partition("\n")[0].strip()
    return any(line.startswith(f"{case}.{name}(") for name in _FAILING)


def _sentinel(case: str, choose: random.Random) -> str:
    """Return a statement that fails, in one of the forms that people write."""
    got, want = lines.two(choose)
    verb = choose.choice(("Fatalf", "Fatalf", "Errorf"))
    stop = f" {case}.FailNow();" if verb == "Errorf" else ""
    return choose.choice(
        (
            f'{case}.{verb}("got %d, want %d", {got}, {want});{stop}',
            f'{case}.{verb}("expected %v, got %v", {want}, {got});{stop}',
            f'{case}.Fatal("unexpected value", {got});',
            f'if want := {want}; want != {got} {{ {case}.{verb}("= %d, want %d", {got}, want);{stop} }};',
        )
    )


def _function(name: str) -> str:
    return name.partition("::")[2].partition("/")[0]


def _read(results: Sequence[CommandResult]) -> Report:
    done = results[0]
    wrong = ended(results)
    if not wrong and done.exit_code not in (0, 1):
        wrong = f"Exited: go ended with exit code {done.exit_code}"
    passed, failed = outcomes(done.stdout.decode(errors="replace"))
    return Report(passed, wrong, ending(results), failed=failed)


def outcomes(events: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the tests that passed and have no other result, and those that failed, in packages that ended. Pure."""
    results: defaultdict[str, set[str]] = defaultdict(set)
    whole: set[str] = set()
    for line in events.splitlines():
        try:
            event = json.loads(line)
            action, package, test = str(event["Action"]), str(event["Package"]), event.get("Test")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if action in ("pass", "fail", "skip"):
            if test is None:
                whole.add(package)
            else:
                results[f"{package}::{test}"].add(action)
    ended_ = {name: found for name, found in results.items() if name.partition("::")[0] in whole}
    passed = frozenset(name for name, found in ended_.items() if found == {"pass"})
    return passed, frozenset(name for name, found in ended_.items() if "fail" in found)
