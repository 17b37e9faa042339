"""`make test`: a test that failed gets a second chance, and everybody sees that it needed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient

ROOT = Path(__file__).parents[3]
FLAKY = """
from pathlib import Path
def test_flaky():
    seen = Path("seen")
    if not seen.exists():
        seen.touch()
        raise ValueError("not yet")
"""
AUDITED = "from tests.failures import AuditFailed\ndef test_audited():\n    raise AuditFailed('1 lost')"
CRASHING = "import os\ndef test_crashing():\n    os._exit(3)"
BROKEN = "def test_broken():\n    assert 1 == 2"
GOOD = "def test_good(): pass"
HEAVY = "import pytest\n@pytest.mark.heavy\ndef test_heavy(): pass"
COUNTED = (
    "from pathlib import Path\nwith Path('imported').open('a') as file:\n    file.write('x')\ndef test_counted(): pass"
)


def run(folder: Path, workers: int = 1, **files: str) -> tuple[int, str]:
    """Run the project's tests in a project of these files. Return the exit code and the output."""
    (folder / "tests").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    heavy: x\n    nightly: x\n")
    (folder / "tests/conftest.py").write_text(
        "from tests.failures import pytest_addoption, pytest_configure\nfrom tests.order import pytest_xdist_make_scheduler"
    )
    for name, text in files.items():
        (folder / f"tests/test_{name}.py").write_text(text)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.run", "-n", str(workers)],
        cwd=folder, env={**inherited, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=patient(240),
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_test_that_passes_alone_is_named_with_its_first_error(tmp_path: Path) -> None:
    code, text = run(tmp_path, workers=2, flaky=FLAKY, good=GOOD)
    assert code == 0, text
    assert "SECOND CHANCE: tests/test_flaky.py::test_flaky: ValueError: not yet; load " in text
    (line,) = (tmp_path / ".cache/tests/second_chances.jsonl").read_text().splitlines()
    assert json.loads(line)["test"] == "tests/test_flaky.py::test_flaky"


def test_a_test_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    code, text = run(tmp_path, flaky=FLAKY, broken=BROKEN)
    assert code == 1, text
    assert "SECOND CHANCE: tests/test_flaky.py::test_flaky" in text
    assert "SECOND CHANCE: tests/test_broken.py" not in text
    assert "FAILED FIRST: tests/test_broken.py::test_broken: assert 1 == 2" in text


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"audited": AUDITED}, "an audit failed"),
        ({"crashing": CRASHING}, "its worker died"),
        ({"good": GOOD, "nonsense": "import nonsense"}, "not collected"),
        ({f"broken{n}": BROKEN for n in range(5)}, "6 tests failed; at most 5 get one"),
    ],
)
def test_some_failures_get_no_second_chance(files: dict[str, str], why: str, tmp_path: Path) -> None:
    code, text = run(tmp_path, flaky=FLAKY, **files)
    assert code != 0, text
    assert why in text
    assert "SECOND CHANCE" not in text


def test_the_worker_that_replaces_the_only_one_runs_what_is_left(tmp_path: Path) -> None:
    """Each file has one test, and a worker keeps its last test until it is told that no more comes."""
    code, text = run(tmp_path, crashing=CRASHING, good=GOOD, fine=GOOD)
    assert code != 0, text
    assert "1 failed, 2 passed" in text  # and the test that kills its worker runs once


def test_workers_of_heavy_tests_import_only_files_that_have_some(tmp_path: Path) -> None:
    code, text = run(tmp_path, counted=COUNTED, heavy=HEAVY)
    assert code == 0, text
    assert "tests: 2 ended, none failed" in text
    assert (tmp_path / "imported").read_text() == "x"  # by the worker of the part `most`
