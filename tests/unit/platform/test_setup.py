"""Set-up finds a Python that will do, and says what the system and the machine lack before it downloads."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from etude import room
from infra import setup
from shared import memory
from tests.patience import patient


@pytest.mark.parametrize("version", setup.SUPPORTED)
def test_this_python_makes_the_environment_where_it_will_do(version):
    assert setup.interpreter(version) == sys.executable


@pytest.mark.parametrize("version", [(3, 9), (3, 10), (3, 13)])
def test_another_python_lets_uv_find_one_that_does(version):
    assert setup.interpreter(version) == ">=3.11,<=3.12.99"


@pytest.mark.parametrize(
    "module",
    [
        "setup",
        "docker.env",
        "docker.check",
        "corpus",
        "sglang_cpu",
        "generate",
        "helm.check",
        "grafana.schema",
        "servers",
    ],
)
def test_what_downloads_or_writes_does_neither_when_it_is_asked_for_help(module, tmp_path):
    command = [sys.executable, "-m", f"infra.{module}", "--help"]
    alone = {**os.environ, "PYTHONPATH": str(setup.ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=patient(60))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tools", "ensurepip", "lacks"),
    [
        ({"bwrap"}, True, {}),
        ({"bwrap"}, False, {"python3 -m venv": "python3-venv"}),
        ({"bwrap", "uv"}, False, {}),
        (set(), True, {"bwrap": "bubblewrap"}),
    ],
)
def test_what_the_system_lacks_is_named_with_its_package(monkeypatch, tools, ensurepip, lacks):
    monkeypatch.delenv("ETUDE_SANDBOX", raising=False)
    monkeypatch.setattr(setup.shutil, "which", lambda name: f"/usr/bin/{name}" if name in tools else None)
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: ensurepip or None)
    assert setup.lacking() == lacks


@pytest.mark.parametrize(("fresh", "enough"), [(True, setup.DISK_GIB), (False, setup.AGAIN_GIB)])
def test_a_disk_that_is_too_small_is_told_before_anything_is_downloaded(monkeypatch, capsys, fresh, enough):
    monkeypatch.setattr(room, "memory_gib", lambda: 64.0)
    monkeypatch.setattr(room, "disk_gib", lambda folder: (folder, enough))
    assert setup.lacks_room(fresh) == []
    monkeypatch.setattr(room, "disk_gib", lambda folder: (folder, enough - 0.1))
    (said,) = setup.lacks_room(fresh)
    assert said.startswith(f"disk: {enough - 0.1:.1f} GiB free below {setup.ROOT}; free {enough:g} GiB")


def test_too_little_memory_is_told_where_nothing_is_installed_yet(monkeypatch):
    monkeypatch.setattr(room, "disk_gib", lambda folder: (folder, 100.0))
    monkeypatch.setattr(room, "memory_gib", lambda: 1.5)
    assert setup.lacks_room(True)[0].startswith("memory: 1.5 GiB free; free at least 4 GiB")
    assert setup.lacks_room(False) == []
    monkeypatch.setattr(room, "memory_gib", lambda: None)
    assert setup.lacks_room(True) == []


def test_a_machine_without_namespaces_is_told_unless_sandboxes_were_given_up(monkeypatch, tmp_path):
    refusing(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ETUDE_SANDBOX", raising=False)
    (said,) = setup.lacks_namespaces()
    assert said.startswith(
        "sandbox: bwrap cannot make namespaces: No permissions to create new namespace; allow unpriv"
    )
    monkeypatch.setenv("ETUDE_SANDBOX", "process")
    assert setup.lacks_namespaces() == []


def refusing(folder: Path) -> None:
    """A bubblewrap that says what it says where namespaces are kept from users."""
    bwrap = folder / "bwrap"
    bwrap.write_text(
        "#!/bin/sh\necho 'bwrap: warning' >&2\necho 'No permissions to create new namespace' >&2\nexit 1\n"
    )
    bwrap.chmod(0o755)


def test_who_gave_up_sandboxes_needs_no_bubblewrap(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ETUDE_SANDBOX", raising=False)
    assert "bwrap" in setup.lacking()
    monkeypatch.setenv("ETUDE_SANDBOX", "process")
    assert "bwrap" not in setup.lacking()


@pytest.mark.parametrize("begins", ["#!{}/bin/python\n", '#!/bin/sh\n\'\'\'exec\' "{}/bin/python" "$0" "$@"\n'])
def test_an_environment_that_was_moved_is_known(monkeypatch, tmp_path, begins):
    monkeypatch.setattr(setup, "VENV", tmp_path / "a b" / ".venv")
    assert setup.at_home(), "there is none yet"
    command = setup.VENV / "bin" / "etude"
    command.parent.mkdir(parents=True)
    command.write_text(begins.format(setup.VENV))
    assert setup.at_home()
    for elsewhere in (f"/before{setup.VENV}", "/before/.venv"):
        command.write_text(begins.format(elsewhere))
        assert not setup.at_home()


def test_where_a_cache_can_be_made_is_known(tmp_path):
    (tmp_path / "file").touch()
    assert room.may_write(tmp_path / "not" / "there")
    assert not room.may_write(tmp_path / "file" / "below")


def test_what_is_missing_ends_set_up_unless_it_is_told_to_go_on(monkeypatch):
    monkeypatch.delenv(setup.ANYWAY, raising=False)
    setup.require([])
    with pytest.raises(
        SystemExit, match="nothing was downloaded:\n  disk: none\n  To set up all the same: SETUP_ANYWAY=1"
    ):
        setup.require(["disk: none"])
    monkeypatch.setenv(setup.ANYWAY, "1")
    setup.require(["disk: none"])


@pytest.mark.parametrize("module", [setup, room, memory])
def test_set_up_reads_on_an_old_python_and_needs_nothing_installed(module):
    tree = ast.parse(Path(module.__file__).read_text(), feature_version=(3, 9))
    imported = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert imported - {"etude", "shared"} <= sys.stdlib_module_names
    assert not Path(module.__file__).with_name("__init__.py").read_text().count("import ")


FIRST = {"infra/setup.py": "3.8", "infra/docker/check.py": "3.9", "infra/docker/env.py": ""}


@pytest.mark.parametrize("path", FIRST)
def test_what_runs_before_anything_is_installed_can_be_read_by_an_old_python(path):
    """Python 3.6, the `python3` of RHEL 8, knows neither `:=` nor annotations of the future."""
    text = (setup.ROOT / path).read_text()
    ast.parse(text, feature_version=(3, 6))
    assert "__future__" not in text


@pytest.mark.parametrize("path", [path for path, oldest in FIRST.items() if oldest])
def test_an_old_python_is_told_which_one_is_needed(path, tmp_path):
    as_old = (
        "import runpy, sys\nsys.version_info, sys.version = (3, 7, 16), '3.7.16 (default)'\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    command = [sys.executable, "-c", as_old, str(setup.ROOT / path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 1
    assert f"found Python 3.7.16; needed: {FIRST[path]} or newer" in done.stderr
    assert "Traceback" not in done.stderr
