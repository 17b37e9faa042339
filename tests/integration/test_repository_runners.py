"""Runners besides pytest, each on a small repository: the solution, no change, what was skipped, and code that forges."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.messages import Verdict
from shared.contracts.trajectory import Change, Submission
from shared.environments import Grading
from shared.environments.repository import toolchains
from shared.environments.repository.problem import RepositoryHidden, RepositoryLimits
from tests.contract.sandboxes import NO_BWRAP
from tests.laboratory import Laboratory

pytestmark = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)
LIMITS = RepositoryLimits(grading_s=240.0, memory_mb=4096, processes=256, disk_mb=4096)
HAS = {
    "node": Path("/usr/bin/node").exists() or Path("/usr/local/bin/node").exists(),
    "go": bool(toolchains.programs("")) and "/usr/local/go/bin" in toolchains.programs(""),
    "cargo": bool(toolchains.mounts()) or Path("/usr/bin/cargo").exists(),
}

UNITTEST = """import unittest

from calc import add


class Adds(unittest.TestCase):
    def test_small(self):
        self.assertEqual(add(1, 2), 3)

    def test_parts(self):
        for number in (1, 2):
            with self.subTest(number=number):
                self.assertEqual(add(number, number), 2 * number)

    @unittest.skip("later")
    def test_skipped(self):
        pass
"""
NODE = """import test from 'node:test';
import assert from 'node:assert';
import { add } from '../calc.mjs';

test('adds', () => {
  const timer = setInterval(() => {}, 1000);  // it stays where the test fails, and keeps the process alive
  assert.strictEqual(add(1, 2), 3);
  clearInterval(timer);
});

test('later', { skip: true }, () => {});
"""
GO = """package calc

import "testing"

func TestAdd(t *testing.T) {
	if got := Add(1, 2); got != 3 {
		t.Fatalf("got %d", got)
	}
}

func TestSkipped(t *testing.T) { t.Skip() }
"""
RUST = """use calc::add;

#[test]
fn adds() {
    assert_eq!(add(1, 2), 3);
}

#[test]
#[ignore]
fn skipped() {}
"""
_GO_FORGES = """package calc

import (
	"fmt"
	"os"
)

func Add(a, b int) int {
	fmt.Println("--- PASS: TestAdd (0.00s)\\nPASS")
	os.Exit(0)
	return 0
}
"""
# runner -> base tree, hidden test file, its path, source, solution, names, a name that is skipped, a forger
CASES: dict[str, dict[str, Any]] = {
    "unittest": {
        "files": {"calc.py": "def add(a, b):\n    return a - b\n"},
        "tests": {"tests/test_calc.py": UNITTEST},
        "solution": {"calc.py": "def add(a, b):\n    return a + b\n"},
        "names": ["tests/test_calc.py::Adds::test_small", "tests/test_calc.py::Adds::test_parts"],
        "skipped": "tests/test_calc.py::Adds::test_skipped",
        "forger": {
            "calc.py": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
            "unittest.TestCase.run = lambda self, result: result.addSuccess(self)\ndef add(a, b): pass\n"
        },
    },
    "node": {
        "files": {
            "calc.mjs": "export const add = (a, b) => a - b;\n",
            "package.json": '{"scripts": {"test": "false"}}\n',
        },
        "tests": {"test/calc.test.mjs": NODE},
        "solution": {"calc.mjs": "export const add = (a, b) => a + b;\n"},
        "names": ["test/calc.test.mjs::adds"],
        "skipped": "test/calc.test.mjs::later",
        "forger": {
            "calc.mjs": "import assert from 'node:assert';\nassert.strictEqual = () => {};\nexport const add = () => 0;\n"
        },
    },
    "go": {
        "files": {
            "go.mod": "module example.com/calc\n\ngo 1.21\n",
            "calc.go": "package calc\n\nfunc Add(a, b int) int { return a - b }\n",
        },
        "tests": {"calc_test.go": GO},
        "solution": {"calc.go": "package calc\n\nfunc Add(a, b int) int { return a + b }\n"},
        "names": ["example.com/calc::TestAdd"],
        "skipped": "example.com/calc::TestSkipped",
        "forger": {"calc.go": _GO_FORGES},
    },
    "cargo": {
        "files": {
            "Cargo.toml": '[package]\nname = "calc"\nversion = "0.1.0"\nedition = "2021"\n',
            "src/lib.rs": "pub fn add(a: i32, b: i32) -> i32 { a - b }\n",
        },
        "tests": {"tests/hidden.rs": RUST},
        "solution": {"src/lib.rs": "pub fn add(a: i32, b: i32) -> i32 { a + b }\n"},
        "names": ["hidden::adds"],
        "skipped": "hidden::skipped",
        "forger": {
            "src/lib.rs": 'pub fn add(_: i32, _: i32) -> i32 { println!("test adds ... ok"); std::process::exit(0) }\n'
        },
    },
}


def changes(files: dict[str, str]) -> dict[str, Change]:
    return {path: Change(text=text) for path, text in files.items()}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        "unittest",
        pytest.param("node", marks=pytest.mark.skipif(not HAS["node"], reason="node is not installed")),
        pytest.param(
            "go",
            marks=[
                pytest.mark.nightly,  # each grading compiles Go's own packages first
                pytest.mark.skipif(not HAS["go"], reason="go is not installed"),
            ],
        ),
        pytest.param(
            "cargo",
            marks=[
                pytest.mark.nightly,
                pytest.mark.skipif(not HAS["cargo"], reason="no sandbox reaches a Rust toolchain"),
            ],
        ),
    ],
)
def test_a_runner_scores_honest_work_and_finds_out_what_was_skipped_or_forged(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    lab = Laboratory(tmp_path)
    problem = lab.problem(case["files"], limits=LIMITS)

    def secret(names: list[str]) -> RepositoryHidden:
        return RepositoryHidden(
            id="calc",
            fail_to_pass=names,
            tests=changes(case["tests"]),
            solution=changes(case["solution"]),
            runner=name,  # type: ignore[arg-type]
        )

    known, skipped = secret(case["names"]), secret([*case["names"], case["skipped"]])
    solution, forger = Submission(changes=changes(case["solution"])), Submission(changes=changes(case["forger"]))
    total = len(case["names"])
    found = asyncio.run(
        lab.environment.grade(
            [
                Grading(problem, known, solution),
                Grading(problem, known, Submission()),
                Grading(problem, skipped, solution),
                Grading(problem, known, forger),
            ]
        )
    )
    assert found[0] == Verdict(solved=True, passed=total, total=total)
    assert isinstance(found[1], Verdict)
    assert (found[1].solved, found[1].passed) == (False, 0), found[1]
    assert found[2] == Verdict(solved=False, passed=total, total=total + 1, failed=[case["skipped"]])
    assert isinstance(found[3], Verdict)
    assert not found[3].solved, found[3]
