"""`etude doctor`: what stands in the way of the demo is found, with the way out."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from etude import doctor, room

GIB = 2**30


def test_without_bubblewrap_the_way_out_is_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ETUDE_SANDBOX", raising=False)
    found = doctor.sandbox()
    assert (found.ok, found.found) == (False, "bubblewrap (bwrap) is not installed")
    assert "install bubblewrap" in found.way_out


def test_without_user_namespaces_what_bubblewrap_says_is_told_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ETUDE_SANDBOX", raising=False)
    found = doctor.sandbox()
    assert not found.ok
    assert found.found.startswith("bwrap cannot make namespaces: bwrap: setting up uid map: Permission denied")
    assert "unprivileged user namespaces" in found.way_out
    monkeypatch.setenv("ETUDE_SANDBOX", "process")
    assert doctor.sandbox().ok
    assert "NOT isolated" in doctor.sandbox().found


@pytest.mark.skipif(not shutil.which("bwrap"), reason="bwrap is not installed")
def test_the_adapter_for_agents_is_tried_and_says_how_it_limits_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ETUDE_SANDBOX", raising=False)
    found = doctor.agents()
    assert found.ok, found
    assert found.found.startswith("bubblewrap, memory by ")


def test_an_engine_that_does_not_answer_is_found_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("docker", reason="the extra docker is not installed")
    monkeypatch.setenv("ETUDE_SANDBOX", "docker")
    assert "allowed: docker:<reference>" in doctor.agents().found
    monkeypatch.setenv("ETUDE_SANDBOX_IMAGE", "docker:busybox")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    found = doctor.agents()
    assert not found.ok
    assert "docker" in found.found


def test_below_a_masked_proc_functions_run_and_commands_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text(
        "#!/bin/sh\ncase \"$*\" in *--proc*) echo 'bwrap: Can'\\''t mount proc on /newroot/proc: denied' >&2; exit 1;; esac\n"
    )
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ETUDE_SANDBOX", raising=False)
    found = doctor.sandbox()
    assert found.ok
    assert "for functions alone" in found.found
    assert "systempaths=unconfined" in found.found


@pytest.mark.parametrize(("free", "ok"), [(3.9, False), (4.1, True)])
def test_too_little_memory_is_found(monkeypatch: pytest.MonkeyPatch, free: float, ok: bool) -> None:
    monkeypatch.setattr(room, "memory_gib", lambda: free)
    found = doctor.memory()
    assert (found.ok, found.found) == (ok, f"{free} GiB free")
    assert ("free at least 4 GiB" in found.way_out) is not ok


def test_where_nobody_says_how_much_memory_is_free_nothing_is_held_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "memory_gib", lambda: None)
    assert (doctor.memory().ok, doctor.memory().found) == (True, "unknown")


@pytest.mark.parametrize(("free", "ok"), [(1.9, False), (2.1, True)])
def test_too_little_disk_is_found_where_the_state_will_lie(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: float, ok: bool
) -> None:
    asked: list[Path] = []
    usage = shutil.disk_usage(tmp_path)

    def disk_usage(folder: Path) -> object:
        asked.append(folder)
        return usage._replace(free=int(free * GIB))

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    found = doctor.disk(tmp_path / "not" / "there" / "yet")
    assert (found.ok, found.found, asked) == (ok, f"{free} GiB free", [tmp_path])
    assert ("with --state" in found.way_out) is not ok


def test_a_folder_that_cannot_be_made_is_found_where_it_would_lie(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = doctor.writable(tmp_path / "file" / "state")
    assert (found.ok, found.what, found.way_out) == (
        False,
        f"folder {tmp_path}/file",
        "give another folder with --state",
    )
    assert doctor.writable(tmp_path / "a" / "b").ok


def test_elsewhere_than_on_linux_the_way_out_is_told_and_no_more_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.report(tmp_path) == 1
    said = capsys.readouterr().out
    assert "no  Linux" in said
    assert "in a Linux virtual machine, or on Windows in WSL2" in said
    assert "ports" not in said
