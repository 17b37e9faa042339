"""Submissions that solve nothing: the tests that they replace are those that a grader asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shared.environments.repository.cheats import cheats
from shared.environments.repository.problem import RepositoryHidden

NAMES = [
    "test_a.py::test_plain",
    "test_a.py::TestA::test_x",
    "test_a.py::TestA::TestB::test_y",
    "test_a.py::Sum::test_z",
]


def test_empty_tests_have_the_names_of_the_hidden_ones_in_their_classes(tmp_path: Path) -> None:
    hidden = RepositoryHidden(id="a", fail_to_pass=[*NAMES, "test_a.py::TestA::test_x[1::2]", "test_b.py::test_b"])
    text = cheats(hidden, {})["empty tests"].changes["test_a.py"].text
    assert text is not None
    (tmp_path / "test_a.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--rootdir", tmp_path, "test_a.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    passed = {line.removeprefix("PASSED ") for line in said.splitlines() if line.startswith("PASSED ")}
    assert passed == set(NAMES)
