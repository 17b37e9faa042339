"""The file server's own searches, with ripgrep where it is installed and without."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.environments.repository.inside import files
from shared.environments.repository.inside.files import MAX_MORE, grep, listing
from shared.environments.tools import grep as tool


@pytest.fixture(params=["rg", "python"])
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Which program searches."""
    if request.param == "python":
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    elif shutil.which("rg") is None:
        pytest.skip("ripgrep is not installed")
    return str(request.param)


def test_a_search_counts_no_more_matches_than_it_says(program: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\n" * 3 * MAX_MORE)
    found = grep("x", str(tmp_path), "", False, 2)
    assert [list(match) for match in found["matches"]] == [[f"{tmp_path}/a", number, "x"] for number in (1, 2)]
    assert found["more"] == MAX_MORE == tool.MAX_MORE
    assert grep("x", str(tmp_path), "", False, 3 * MAX_MORE - 5)["more"] == 5


def test_a_search_reads_no_further_than_it_counts() -> None:
    assert files._first(itertools.repeat(("a", 1, "x")), 3)["more"] == MAX_MORE


def test_matches_are_lines_of_text_by_path(program: str, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, data in (
        ("b/one\ntwo:3", b"n\nxe:7:x\r\nx"),
        ("a.txt", b"\xff x\n"),
        ("long", b"x" + "é".encode() * 5000),
        ("binary", b"x\0"),
        (".hidden", b"x"),
    ):
        (tmp_path / name).write_bytes(data)
    found = [(Path(name).name, number, text.rstrip("\r")) for name, number, text in _matches("x", tmp_path)]
    assert found == [
        (".hidden", 1, "x"),
        ("a.txt", 1, "\ufffd x"),
        ("one\ntwo:3", 2, "xe:7:x"),
        ("one\ntwo:3", 3, "x"),
        ("long", 1, "x" + "é" * 399),
    ]
    assert _matches("x", tmp_path / "binary") == []
    assert _matches("nowhere", tmp_path) == []
    with pytest.raises(ValueError, match=r"regex|regular expression"):
        _matches("(", tmp_path)


def _matches(pattern: str, path: Path) -> list[list[Any]]:
    return [list(match) for match in grep(pattern, str(path), "", False, 100)["matches"]]


@pytest.fixture
def forbidden() -> Iterator[Path]:
    """A folder with a file and a folder that this process may not read."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        for path in ("closed/x", "file", "good", "open/x"):
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text("x")
        folder.chmod(0o755)
        for closed in (folder / "closed", folder / "file"):
            closed.chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(user)
            (folder / "closed").chmod(0o700)


def test_what_cannot_be_read_is_passed_over(program: str, forbidden: Path) -> None:
    assert listing(str(forbidden), 2, 10)["paths"] == ["closed/", "file", "good", "open/", "open/x"]
    assert _matches("x", forbidden) == [[f"{forbidden}/good", 1, "x"], [f"{forbidden}/open/x", 1, "x"]]
    with pytest.raises(PermissionError):
        listing(str(forbidden / "closed"), 1, 10)


@pytest.mark.skipif(shutil.which("rg") is None, reason="ripgrep is not installed")
def test_a_search_of_a_large_file_needs_little_memory(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"all work and no play\n" * 500_000)
    (tmp_path / "line").write_bytes(b"x" * 8_000_000)
    program = "\n".join(
        [
            "import resource, runpy",
            f"runpy.run_path({files.__file__!r})['grep']('.', {str(tmp_path)!r}, '', False, 100)",
            "whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)",
            "print(max(resource.getrusage(who).ru_maxrss for who in whose))",
        ]
    )
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 120_000  # KiB


def test_the_target_of_a_link_can_be_kept_as_a_note(tmp_path: Path) -> None:
    os.symlink(b"\xff", os.fsencode(tmp_path / "link"))
    assert dict(files.entries(str(tmp_path)))["link"][1] == "\\xff"
