"""Attacks on the grading of functions. Each first convinces a grader that calls the candidate beside the expected values."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from shared.contracts.messages import Verdict
from shared.contracts.trajectory import Submission
from shared.environments import Grading, Places, Ungradable
from shared.environments.function import FunctionEnvironment
from shared.problems import Case, FunctionHidden, FunctionProblem
from shared.sandbox import connect
from tests.contract.sandboxes import NO_BWRAP
from tests.patience import patient

pytestmark = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)
BROKEN = "def f(a, b):\n    return a - b\n"
CASES = [((1, 2), 3), ((20, 22), 42), ((7, 5), 12)]
PROBLEM = FunctionProblem(
    id="add", files={"f.py": BROKEN}, entry="f", visible=[Case(args="[0,0]", expected="0")], prompt="Add."
)
SECRET = FunctionHidden(id="add", cases=[Case(args=json.dumps(args), expected=str(value)) for args, value in CASES])

# It imports the candidate, compares with `==`, and believes what its own process says.
NAIVE = """
import json, sys
cases = json.loads(sys.argv[1])
import f as candidate
def check():
    passed = 0
    for arguments, expected in cases:
        found = candidate.f(*arguments)
        if found == expected:
            passed += 1
    return passed
passed = check()
print(f"passed {passed} of {len(cases)}")
sys.exit(0 if passed == len(cases) else 1)
"""
_ANY = "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = None\n"


@dataclass(frozen=True)
class Attack:
    """`errors`: the true grader's reasons; the empty string: the wrong values say enough."""

    source: str
    errors: tuple[str, ...] = ("",)


ATTACKS = {
    "equals everything": Attack(f"{_ANY}def f(a, b): return Any()\n", ("Unprintable", "")),
    "a string that equals everything": Attack(
        "class S(str):\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef f(a, b): return S()\n",
        ("Unprintable", ""),
    ),
    "reads the expectation from the caller": Attack(
        "import sys\ndef f(a, b): return sys._getframe(1).f_locals['expected']\n", ("KeyError",)
    ),
    "reads the expectation from the caller's globals": Attack(
        "import sys\ndef f(a, b):\n    for args, value in sys._getframe(1).f_globals['cases']:\n"
        "        if args == [a, b]: return value\n",
        ("KeyError",),
    ),
    "reads the expectation from the main module": Attack(
        "import __main__\ndef f(a, b): return next(v for args, v in __main__.cases if args == [a, b])\n",
        ("AttributeError",),
    ),
    "reads the expectation from memory": Attack(
        "import gc\ndef f(a, b):\n    for one in gc.get_objects():\n"
        "        if isinstance(one, list) and len(one) == 2 and one[0] == [a, b]: return one[1]\n    return None\n"
    ),
    "reads the expectation from the command line": Attack(
        "import json\ndef f(a, b):\n    text = open('/proc/self/cmdline').read().split('\\0')\n"
        "    cases = next(json.loads(t) for t in text if t.startswith('[['))\n"
        "    return next(v for args, v in cases if args == [a, b])\n",
        ("StopIteration", "FileNotFoundError", "PermissionError", "JSONDecodeError", "OtherError"),
    ),
    "replaces the check": Attack("import __main__, sys\ndef f(a, b): sys.exit(0)\n", ("SystemExit", "Died", "Error")),
    "exits": Attack("import os\nos._exit(0)\n", ("Died",)),
    "exits when called": Attack("import os\ndef f(a, b): os._exit(0)\n", ("Died",)),
    "exits in a finaliser": Attack(
        "import os\nclass D:\n    def __del__(self, end=os._exit): end(0)\nd = D()\ndef f(a, b): return 0\n"
    ),
    "exits at the end": Attack("import atexit, os\natexit.register(os._exit, 0)\ndef f(a, b): return 0\n"),
    "becomes another program": Attack(
        "import os\ndef f(a, b): os.execv('/bin/true', ['true'])\n", ("Died", "FileNotFoundError", "PermissionError")
    ),
    "patches the exit": Attack(
        "import sys\n_exit = sys.exit\nsys.exit = lambda code: _exit(0)\ndef f(a, b): return 0\n"
    ),
    "changes the expectation": Attack(
        "import sys\ndef f(a, b):\n    found = sys._getframe(1).f_globals.get('cases', [])\n    found.clear()\n    return 0\n"
    ),
}


@pytest.fixture(scope="module")
def answers() -> Mapping[str, Verdict | Ungradable]:
    async def run() -> list[Verdict | Ungradable]:
        functions = connect("bubblewrap", 2)
        try:
            sources = ["def f(a, b):\n    return a + b\n", BROKEN, *(attack.source for attack in ATTACKS.values())]
            environment = FunctionEnvironment(Places(functions=functions))
            return await environment.grade(
                [Grading(PROBLEM, SECRET, Submission(files={"f.py": source})) for source in sources]
            )
        finally:
            await functions.close()

    return dict(zip(("oracle", "no-op", *ATTACKS), asyncio.run(run()), strict=True))


def naive(source: str, tmp_path_factory: pytest.TempPathFactory) -> bool:
    folder = tmp_path_factory.mktemp("naive")
    (folder / "f.py").write_text(source)
    (folder / "grade.py").write_text(NAIVE)
    argv = [sys.executable, "-B", "grade.py", json.dumps(CASES)]
    return subprocess.run(argv, cwd=folder, capture_output=True, timeout=patient(60), check=False).returncode == 0


def test_honest_work_is_scored_by_both_graders(
    answers: Mapping[str, Verdict | Ungradable], tmp_path_factory: pytest.TempPathFactory
) -> None:
    total = len(CASES) + 1
    assert answers["oracle"] == Verdict(solved=True, passed=total, total=total)
    assert isinstance(answers["no-op"], Verdict)
    assert answers["no-op"] == Verdict(solved=False, passed=1, total=total, failed=answers["no-op"].failed)
    assert naive("def f(a, b):\n    return a + b\n", tmp_path_factory)
    assert not naive(BROKEN, tmp_path_factory)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_on_a_function_s_grader_is_not_paid(
    answers: Mapping[str, Verdict | Ungradable], tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    attack = ATTACKS[name]
    assert naive(attack.source, tmp_path_factory), "the naive grader is not convinced: the attack is none"
    found = answers[name]
    assert isinstance(found, Verdict), found
    assert not found.solved, found
    assert found.error in attack.errors, found
