"""A folder that cannot be written, or that holds nothing to read, is told at once, with the option's name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from etude.exchange import NotExchanged
from etude.exchange.folder import whole
from services.curator import build
from services.curator.cli import app
from shared.output import NotWritable, require_folder

NOWHERE = Path("/proc/pack")  # nobody makes a folder there, not even root


def test_a_folder_is_asked_for_before_the_work_and_nothing_is_made(tmp_path: Path) -> None:
    require_folder(tmp_path / "a" / "b" / "pack", "--out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for out, why in ((NOWHERE, "/proc"), (tmp_path / "file" / "pack", "Not a directory")):
        with pytest.raises(NotWritable, match=rf"^--out {out}: cannot be written: .*{why}.*; give a folder elsewhere$"):
            require_folder(out, "--out")


def test_a_pack_that_cannot_be_written_is_told_before_anything_is_mined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_workers", None)  # what would follow fails
    done = CliRunner().invoke(app, ["mutate", "--limit", "1", "--out", str(NOWHERE)], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "tasks mutate: --out /proc/pack: cannot be written: /proc: " in done.output
    assert "give a folder elsewhere" in done.output


def test_an_import_that_cannot_be_written_is_told_before_a_problem_is_read(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text("no problem\n")
    done = CliRunner().invoke(app, ["import", str(tmp_path / "own.jsonl"), "--out", str(NOWHERE)])
    assert (done.exit_code, "--out /proc/pack: cannot be written: /proc" in done.output) == (2, True), done.output


def test_a_folder_without_a_distribution_is_refused_before_anything_is_mined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_workers", None)  # what would follow fails
    source, out = tmp_path / "source", tmp_path / "pack"
    source.mkdir()
    (source / "module.py").write_text("def f(x):\n    return x\n")
    done = CliRunner().invoke(app, ["mutate", "--also", str(source), "--out", str(out)], env={"COLUMNS": "400"})
    assert (done.exit_code, out.exists()) == (2, False)
    assert "--also" in done.output
    assert "found no distribution" in done.output
    assert "pip install --target" in done.output


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_an_export_onto_a_full_disk_names_the_option_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    out = tmp_path / "policy"
    with pytest.raises(NotExchanged, match=f"^--out {out}: cannot be written: {os.strerror(number)}; make room"):
        with whole(out) as folder:
            raise OSError(number, os.strerror(number), str(folder / "config.json"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotWritable, match=r"^--out /proc/policy: "):
        with whole(Path("/proc/policy")):
            pass


def test_an_error_of_what_is_exported_is_not_blamed_on_the_place(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        with whole(tmp_path / "policy"):
            (tmp_path / "gone").read_bytes()
