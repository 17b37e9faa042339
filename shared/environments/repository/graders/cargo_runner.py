"""`cargo test`, one target at a time, read from libtest's text. Names: `TARGET::test` or `TARGET::module::test`, for a
file `tests/TARGET.rs`.

Tests within the library's own sources (`lib::…`) are refused: those files are the candidate's, so a submission would bring its own.

`build.rs`, `Cargo.toml` and its lock come from the base commit unless the known solution changes them; `.cargo` always does, since
its `runner` and `rustc-wrapper` replace the programs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import partial

from shared.environments.repository.graders import Command, Run, read_each
from shared.environments.repository.graders.altering import lines
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem

LIBRARY = "lib"
_NAME = re.compile(r"[\w-]+(?:::\w+)+")
_LINE = re.compile(r"test (\S+)(?: - should panic)? \.\.\. (ok|FAILED|ignored.*)")
# Two arguments, the first a name or one call: a third would be a message.
_EQUALITY = re.compile(r'\s*assert_eq!\([\w.:]+(?:\([^()]*\))?, (?P<literal>-?\d+|"[^"\\{}]*")\);\s*')
_ENVIRONMENT = (
    "CARGO_HOME=/tmp/cargo",
    "CARGO_TARGET_DIR=/tmp/target",
    "CARGO_NET_OFFLINE=true",
    "CARGO_TERM_COLOR=never",
)


class CargoRunner:
    """See shared.environments.repository.graders.Runner."""

    infrastructure = (".cargo", "rust-toolchain", "rust-toolchain.toml", "rustfmt.toml", "clippy.toml")
    builds = ("Cargo.toml", "Cargo.lock", "build.rs", "vendor")

    def wrong_name(self, name: str) -> str | None:
        if _NAME.fullmatch(name) and name.partition("::")[0] != LIBRARY:
            return None
        return "TARGET::test for a file tests/TARGET.rs; tests of src/lib.rs (lib::…) stand in files that a submission may change"

    def file_of(self, name: str, hidden: RepositoryHidden) -> str | None:
        """Return the hidden test file of the target."""
        target = name.partition("::")[0]
        files = [path for path in hidden.tests if path.endswith(f"tests/{target}.rs")]
        return files[0] if len(files) == 1 else None

    def run(self, problem: RepositoryProblem, hidden: RepositoryHidden, own: Sequence[str]) -> Run:
        targets = sorted({name.partition("::")[0] for name in (*hidden.fail_to_pass, *hidden.pass_to_pass)})
        commands = tuple(
            Command(
                (
                    *("/usr/bin/env", *_ENVIRONMENT, "cargo", "test", "--offline", "--quiet"),
                    *("--test", target),
                    *hidden.command,
                    *("--", "--test-threads=1", "--format=pretty", "--color=never"),
                )
            )
            for target in targets
        )
        return Run(commands, partial(read_each, targets, (0, 101), outcomes))

    def altered(self, text: str, name: str, choose: random.Random) -> str | None:
        function = re.escape(name.rpartition("::")[2])
        pattern = rf"(?m)^[ \t]*#\[test\]\s*(?P<more>(?:#\[[^\]]*\]\s*)*)(?:pub )?fn {function}\(\)[^{{;]*\{{"
        found = list(re.finditer(pattern, text))
        if len(found) != 1 or "should_panic" in found[0]["more"] or "ignore" in found[0]["more"]:
            return None
        one, other = lines.two(choose)
        form = choose.choice(("assert_eq!({}, {});", "assert!({} == {});", "assert_eq!({}u32, {});"))
        return lines.altered(text, found[0], _EQUALITY, form.format(one, other), choose)


RUNNER = CargoRunner()


def outcomes(text: str) -> tuple[set[str], set[str]]:
    """Return the tests that passed and have no other result, and those that failed, if libtest wrote its last line. Pure."""
    if not re.search(r"(?m)^test result: ", text):
        return set(), set()
    found = [match for line in text.splitlines() if (match := _LINE.fullmatch(line))]
    other = {match[1] for match in found if match[2] != "ok"}
    return {match[1] for match in found} - other, {match[1] for match in found if match[2] == "FAILED"}
