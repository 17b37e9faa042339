"""Tests wait for events, measure no time, take no fixed port and install nothing: tests/steady.py looks for what does not.

tests/steady.toml holds what may stay: kind, file, function, and the reason in one sentence.
"""

from __future__ import annotations

import functools
import textwrap
import tomllib
from pathlib import Path

import pytest

from tests.steady import KINDS, Finding, findings

ROOT = Path(__file__).resolve().parents[3]
ALLOWED = ROOT / "tests" / "steady.toml"
Entry = tuple[str, str, str]  # kind, file, function


def allowed() -> dict[Entry, str]:
    rows = tomllib.loads(ALLOWED.read_text())
    return {
        (kind, file, function): reason
        for kind, files in rows.items()
        for file, functions in files.items()
        for function, reason in functions.items()
    }


def entry(finding: Finding) -> Entry:
    return finding.kind, finding.file, finding.function


@functools.cache
def everywhere() -> list[Finding]:
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        found += findings(path.read_text(), path.relative_to(ROOT).as_posix())
    return found


def test_no_test_waits_for_time_measures_it_takes_a_fixed_port_or_installs_anything() -> None:
    known = allowed()
    unsteady = [str(finding) for finding in everywhere() if entry(finding) not in known]
    assert not unsteady, "mend it, or say in tests/steady.toml why it may stay:\n" + "\n".join(unsteady)


def test_every_entry_of_the_list_is_needed_and_gives_its_reason_in_a_sentence() -> None:
    needed = {entry(finding) for finding in everywhere()}
    for (kind, file, function), reason in allowed().items():
        where = f"tests/steady.toml: {kind}, {file}, {function or 'the module'}"
        assert kind in KINDS, where
        assert (kind, file, function) in needed, f"{where}: nothing like this is there: take the entry out"
        assert len(reason.split()) > 4, f"{where}: the reason is no sentence: {reason!r}"
        assert reason.endswith("."), f"{where}: the reason is no sentence: {reason!r}"


def found(source: str) -> list[str]:
    return [finding.kind for finding in findings(textwrap.dedent(source))]


@pytest.mark.parametrize(
    "source",
    [
        "time.sleep(0.2)",
        "await asyncio.sleep(3)",
        "sleep(1.0)",
        "await asyncio.sleep(0.1 if quick else 8.0)",
        "WAIT_S = 0.5\ntime.sleep(2 * WAIT_S)",
        "from world import WAIT_S\ntime.sleep(WAIT_S)",
        "time.sleep(patient(0.1))",
        "def wait(seconds=0.01):\n    time.sleep(seconds)",
        "def test():\n    wait = 0.01\n    wait = 1.0\n    time.sleep(wait)",
    ],
)
def test_a_long_sleep_and_one_of_unknown_length_are_found(source: str) -> None:
    assert found(source) == ["sleep"]


@pytest.mark.parametrize(
    "source",
    [
        "await asyncio.sleep(0)",
        "time.sleep(0.05)",
        "LOOK_S = 0.05\ntime.sleep(2 * LOOK_S)",
        "def test():\n    look_s, limit_s = 0.1, 60.0\n    time.sleep(look_s)",
        "clock.sleep(60)",
        "await quiet(3.0, 'nothing is given a second time')",
        "still(0.5, 'the file stays as it is')",
        "'time.sleep(60)'",
    ],
)
def test_a_pause_between_two_looks_a_window_with_its_reason_and_a_clock_of_the_test_may_be(source: str) -> None:
    assert found(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "assert time.monotonic() - began < 5",
        "assert 5 >= time.perf_counter() - began",
        "assert time.monotonic() < deadline",
        "assert loop.time() <= due",
        "assert 1 < took < 2",
        "assert answer.elapsed_s < 2",
        "def test():\n    used = time.process_time() - before\n    assert used < 1.0, used",
        "assert answered and time.time() - began < 5",
    ],
)
def test_an_assertion_that_something_was_quick_is_found(source: str) -> None:
    assert found(source) == ["elapsed"]


@pytest.mark.parametrize(
    "source",
    [
        "assert time.monotonic() - began > 0.5",
        "assert loop.time() >= due - 0.01",
        "assert count < 5",
        "while time.monotonic() < deadline:\n    look()",
        "assert clock.time() < 5",
        "assert datetime.time(3) < noon",
    ],
)
def test_an_assertion_that_something_was_not_too_quick_may_be(source: str) -> None:
    assert found(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "serve(port=8700)",
        "serve(ports=[8700, 0])",
        "environment(ETUDE_ENGINE_PORT='8700')",
        "PORT = 8700",
        "serve({'port': 8700})",
        "connect(('127.0.0.1', 8700))",
        "run(['etude', '--base-port', '8700'])",
        "get('http://127.0.0.1:8700/readyz')",
        "get(f'http://localhost:8700/{name}')",
    ],
)
def test_a_fixed_port_of_this_machine_is_found(source: str) -> None:
    assert found(source) == ["port"]


@pytest.mark.parametrize(
    "source",
    [
        "serve(port=0)",
        "serve(port=free)",
        "connect(('127.0.0.1', 0))",
        "get('http://engine.example:8700')",
        "get(f'http://127.0.0.1:{port}')",
        "get('http://127.0.0.1:9')",
        "ports = count(3)",
        "run(['--base-port', '0'])",
    ],
)
def test_a_port_that_the_system_gives_or_that_lies_elsewhere_may_be(source: str) -> None:
    assert found(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run(['apt-get', 'install', '-y', 'chromium'])",
        "subprocess.run(['/usr/bin/apt-get', '-y', 'update'])",
        "subprocess.run([sys.executable, '-m', 'pip', 'install', 'x'])",
        "command = [sys.executable, '-m', 'pip', 'download']\nsubprocess.run([*command, 'x'])",
        "os.system('cd /tmp && npm install')",
        "await asyncio.create_subprocess_exec('go', 'mod', 'download')",
        "subprocess.check_output(['playwright', 'install', 'chromium'])",
        "subprocess.run(['uv', 'pip', 'sync'])",
        "subprocess.run(['pip3', 'install', 'x'])",
        "from infra.servers.debian import program\nprogram('promtool', 'prometheus')",
        "debian.installed('chromium', 'chromium')",
    ],
)
def test_a_package_manager_that_is_called_is_found(source: str) -> None:
    assert found(source) == ["packages"]


@pytest.mark.parametrize(
    "source",
    [
        "missing.skip(['Chromium'], 'apt-get install chromium')",
        "assert dockerfile == 'RUN apt-get install -y tmux'",
        "subprocess.run(['go', 'version'])",
        "subprocess.run([sys.executable, '-m', 'pytest', 'pip'])",
        "from infra.servers.debian import present\npresent('promtool', 'prometheus')",
        "run.program('install')",
    ],
)
def test_a_package_manager_that_is_only_mentioned_may_be(source: str) -> None:
    assert found(source) == []


def test_a_finding_names_the_file_the_line_and_the_function_that_holds_it() -> None:
    source = "class World:\n    def wait(self):\n        async def inner():\n            await asyncio.sleep(1)\n"
    (one,) = findings(source, "tests/x.py")
    assert str(one) == "tests/x.py:4: sleep in World.wait.inner: asyncio.sleep(1)"
