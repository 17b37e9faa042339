"""Sandboxes open fast: a shell is prepared, and the loop imports few modules. After a script the loop takes a short look."""

from __future__ import annotations

import importlib.util
import marshal
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.sandbox import bubblewrap
from shared.sandbox.inside import shell, tree

PROJECT = Path(__file__).parents[3]
KEEPER = """
import os, sys
from shared.sandbox.inside import cell
cell.adopt()
pid = os.fork()
if pid == 0:
    os.execv("/bin/sh", ["/bin/sh"])
sys.stdout.write(f"{pid}\\n")
sys.stdout.flush()
os.waitpid(pid, 0)
"""
IMPORTED = """
import sys, types
for name, path in (("shared", "shared"), ("shared.sandbox", "shared/sandbox")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
import shared.sandbox.inside.box
print(*sys.modules)
"""


@contextmanager
def keeper() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A keeper and its shell, which reads what is written to the keeper's standard input."""
    command = [sys.executable, "-c", KEEPER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=PROJECT) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def tell(process: subprocess.Popen[bytes], script: bytes) -> bytes:
    """Run a script in the shell. Return the line that it writes."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(script + b"\n")
    process.stdin.flush()
    return process.stdout.readline()


def test_a_keeper_and_its_shell_are_alone_unless_anything_else_lives_below() -> None:
    with keeper() as (process, shell_pid):
        try:
            pair = tree.Pair(process.pid, shell_pid)
        except OSError:
            pytest.skip("this kernel does not list children")
        assert tell(process, b"echo well") == b"well\n"
        assert pair.alone()
        child = int(tell(process, b"sleep 600 & echo $!"))
        assert not pair.alone()
        assert tell(process, b"kill -9 %d; wait; echo" % child) == b"\n"
        assert pair.alone()
        orphan = int(tell(process, b"(sleep 600 >/dev/null & echo $!)"))
        assert not pair.alone()
        os.kill(orphan, 9)
    assert not pair.alone()  # both are gone
    pair.close()


def test_a_shell_that_became_a_program_with_threads_is_not_alone() -> None:
    threads = "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); print(1, flush=True)"
    with keeper() as (process, shell_pid):
        try:
            pair = tree.Pair(process.pid, shell_pid)
        except OSError:
            pytest.skip("this kernel does not list children")
        assert tell(process, f"exec '{sys.executable}' -c '{threads}'".encode()) == b"1\n"
        assert not pair.alone()
        pair.close()


def test_a_process_that_is_not_there_has_no_pair_and_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No such file"):
        tree.Pair(os.getpid(), 1 << 30)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    "after", [{}, {"A": "1", "B": "it's\n'\"$(x)"}, {"PATH": "/usr/bin:/bin", "A": "ü"}, {"A": ""}], ids=str
)
def test_a_running_shell_gets_the_environment_that_a_new_one_would_have(after: dict[str, str]) -> None:
    before = {"PATH": "/usr/bin:/bin", "A": "0", "GONE": "1"}
    lines = shell.changed(before, after)
    assert lines is not None
    show = b"/usr/bin/env -0\n"
    changed = subprocess.run(["/bin/sh"], input=lines + show, env=before, capture_output=True, check=True).stdout
    new = subprocess.run(["/bin/sh"], input=show, env=after, capture_output=True, check=True).stdout
    assert {*changed.split(b"\0")} - {b"_=/usr/bin/env"} == {*new.split(b"\0")} - {b"_=/usr/bin/env"}


@pytest.mark.parametrize(
    "after", [{"IFS": "x"}, {"BASH_ENV": "/x"}, {"UID": "0"}, {"PS1": "> "}, {"a-b": "1"}, {"A": "x\0y"}], ids=repr
)
def test_what_a_shell_takes_at_its_start_alone_needs_a_new_one(after: Mapping[str, str]) -> None:
    assert shell.changed({}, after) is None


def test_the_loop_starts_without_the_library_s_slow_modules() -> None:
    command = [sys.executable, *bubblewrap.PYTHON_FLAGS, "-c", IMPORTED]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert {"dataclasses", "inspect", "ast", "secrets", "random", "tempfile", "platform"} & {
        *done.stdout.split()
    } == set()


def test_the_loop_s_modules_come_compiled(tmp_path: Path) -> None:
    bubblewrap.compiled(tmp_path / "inside")
    sources = sorted((tmp_path / "inside").glob("*.py"))
    assert {path.name for path in sources} >= {"box.py", "loop.py", "sessions.py"}
    for source in sources:
        code = marshal.loads(Path(importlib.util.cache_from_source(str(source))).read_bytes()[16:])
        assert code.co_filename == f"{bubblewrap.INSIDE}/{source.name}"
