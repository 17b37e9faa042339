"""Node's own runner, `node --test`, one file at a time. Names: `path/of/file.test.js::suite > test`.

It runs no script of `package.json`, so a submission cannot change the command. The results are read from TAP.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import partial

from shared.environments.repository.graders import Command, Run, read_each
from shared.environments.repository.graders.altering import lines
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.environments.repository.trees import wrong_path
from shared.sandbox.contract import WORKSPACE

_LEVEL = 4  # blanks by which TAP indents a nested test
_POINT = re.compile(r"( *)(not ok|ok) \d+ - (.*?)( # (?:SKIP|TODO)\b.*)?")
_SUBTEST = re.compile(r"( *)# Subtest: (.*)")
_EQUALITY = re.compile(  # two arguments, the first a name or one call: a third would be a message
    r"\s*assert\.(?:strictEqual|equal|deepEqual|deepStrictEqual)\([\w.$]+(?:\([^()]*\))?, "
    r"""(?P<literal>-?\d+|'[^'"\\]*'|"[^'"\\]*")\);?\s*"""
)
# A changed test leaves its servers and timers open, which would keep the process alive until the time limit. Node 22 and 20.14
# can end it when the tests have; earlier ones do not know the option.
_START = 'node --help | grep -q -e --test-force-exit && set -- --test-force-exit "$@"; exec node "$@"'
_ASSERT = re.compile(r"(?m)^\s*(?:import assert from|(?:const|let|var) assert = require\()")


class NodeRunner:
    """See shared.environments.repository.graders.Runner."""

    infrastructure = (
        ".npmrc",
        ".node_repl_history",
        ".mocharc*",
        "jest.config.*",
        "vitest.config.*",
        "node.config.json",
    )
    builds = ("package.json", "package-lock.json", "tsconfig.json", "node_modules")

    def wrong_name(self, name: str) -> str | None:
        path, mark, rest = name.partition("::")
        if not mark or not rest or not re.search(r"\.[cm]?[jt]s$", path) or wrong_path(path):
            return "path/of/file.test.js::suite > test"
        return None

    def file_of(self, name: str, hidden: RepositoryHidden) -> str | None:
        return name.partition("::")[0]

    def run(self, problem: RepositoryProblem, hidden: RepositoryHidden, own: Sequence[str]) -> Run:
        files = sorted({name.partition("::")[0] for name in (*hidden.fail_to_pass, *hidden.pass_to_pass)})
        options = ("--test", "--test-reporter=tap", *hidden.command)
        start = ("/usr/bin/env", "-u", "NODE_OPTIONS", "/bin/sh", "-c", _START, "node")
        commands = tuple(Command((*start, *options, f"{WORKSPACE}/{file}")) for file in files)
        return Run(commands, partial(read_each, files, (0, 1), outcomes))

    def altered(self, text: str, name: str, choose: random.Random) -> str | None:
        test = re.escape(name.partition("::")[2].rpartition(" > ")[2])
        pattern = (
            rf"(?m)^[ \t]*(?:test|it)\(\s*(['\"`]){test}\1\s*,\s*(?:\{{[^{{}}]*\}}\s*,\s*)?"
            r"(?:async\s+)?(?:function\s*\w*\s*)?(?:\(\w*\)|\w+)?\s*(?:=>)?\s*\{"
        )
        found = list(re.finditer(pattern, text))
        if len(found) != 1:
            return None
        one, other = lines.two(choose)
        asserts = ("assert.strictEqual({}, {});", "assert.deepStrictEqual([{}], [{}]);")
        throws = ('throw new Error("expected {}, got {}");', 'throw new Error("{} is not {}");')
        form = choose.choice(asserts if _ASSERT.search(text) else throws)
        return lines.altered(text, found[0], _EQUALITY, form.format(one, other), choose)


RUNNER = NodeRunner()


def outcomes(tap: str) -> tuple[set[str], set[str]]:
    """Return the tests that passed and those that failed, `suite > test`. A name with two results, one of them bad, did not pass.
    One that was skipped did neither. Pure."""
    open_: dict[int, str] = {}  # level -> name of the test that is running
    good: set[str] = set()
    bad: set[str] = set()
    skipped: set[str] = set()
    block = ""  # the line that ends a test's details, which may quote anything
    for line in tap.splitlines():
        if block:
            block = "" if line == block else block
        elif line.strip() == "---":
            block = line.replace("---", "...")
        elif started := _SUBTEST.fullmatch(line):
            level = len(started[1]) // _LEVEL
            open_ = {one: name for one, name in open_.items() if one < level} | {level: started[2]}
        elif point := _POINT.fullmatch(line):
            level = len(point[1]) // _LEVEL
            name = " > ".join([*(open_[one] for one in sorted(open_) if one < level), point[3]])
            (skipped if point[4] else good if point[2] == "ok" else bad).add(name)
    return good - bad - skipped, bad
