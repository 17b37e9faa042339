"""A process is known for ever: by what the kernel says of it, never by a clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from infra.servers import state
from shared.process import identity, lives


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_a_process_lives_until_it_has_ended_and_nobody_else_is_taken_for_it(other: subprocess.Popen[bytes]) -> None:
    known = identity(other.pid)
    assert known
    assert lives(known) is True
    assert lives(msgspec.structs.replace(known, ticks=known.ticks - 1)) is False  # its id was given to another one
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # ended, and its parent has not asked: a zombie
    assert lives(known) is False
    other.wait()
    assert lives(known) is False
    assert identity(other.pid) is None


@pytest.mark.parametrize("elsewhere", [{"boot": "another"}, {"namespace": "pid:[1]"}])
def test_what_cannot_be_seen_is_not_dead(elsewhere: dict[str, str]) -> None:
    known = identity(os.getpid())
    assert known
    assert lives(msgspec.structs.replace(known, pid=2**22 + 1, **elsewhere)) is None


def test_a_name_full_of_parentheses_and_spaces_is_read_over(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "60"])
    try:
        known = identity(process.pid)
        assert known
        assert lives(known)
    finally:
        process.kill()
        process.wait()


def test_a_step_of_the_clock_ends_no_server(
    other: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.write({"s": state.Running("1", (1,), "x", pid=other.pid, identity=identity(other.pid))}, tmp_path)
    began = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: began(process) + 3600)
    (row,) = state.read(tmp_path).values()
    assert row.ports == (1,)
    assert row.process
    assert row.process.pid == other.pid
    other.kill()
    other.wait()
    assert row.process is None


def test_what_an_older_version_remembered_of_a_server_is_read(other: subprocess.Popen[bytes], tmp_path: Path) -> None:
    old = {"version": "1", "ports": [1], "secret": "x", "pid": other.pid, "stop": 15, "settings": None}
    started = psutil.Process(other.pid).create_time()
    rows = {"runs": {**old, "started": started}, "ended": {**old, "started": started - 5}, "never": {**old, "pid": 0}}
    (tmp_path / "state.json").write_text(json.dumps(rows))
    read = state.read(tmp_path)
    assert {name: row.process is not None for name, row in read.items()} == {
        "runs": True,
        "ended": False,
        "never": False,
    }
    state.write(read, tmp_path)
    assert state.read(tmp_path) == read
