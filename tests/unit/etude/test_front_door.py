"""The front door: what it refuses, and that it says so before anything is written."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from etude import commands, room, service_logs
from etude import supervisor as s
from etude.demo.conduct import Conductor, Stalled
from etude.demo.prepare import BASE, DemoError, own_problems
from etude.status import collect, show
from shared import bus as buses
from shared import objects as stores
from shared.settings import ServiceSettings
from shared.telemetry import Health
from tests.patience import patient


@pytest.fixture
def sleeper() -> s.ServiceSpec:
    """A service of the standard library's: it prints and ends, and is started again."""
    return s.ServiceSpec("sleeper", "this")


def test_a_second_supervisor_of_the_same_folder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    with s.Supervisor(tmp_path), pytest.raises(s.AlreadyRunning, match=str(os.getpid())):
        s.Supervisor(tmp_path).__enter__()
    assert s.holder(tmp_path) is None


def test_the_file_of_a_killed_supervisor_is_not_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (tmp_path / s.LOCK).write_text(str(bystander.pid))
        (tmp_path / "supervisor.json").write_text(json.dumps({"pid": bystander.pid, "services": {"x": {}}}))
        s.stop(tmp_path)
        assert "nothing is running" in capsys.readouterr().out
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_who_holds_the_folder_is_told_before_what_the_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, front_door: typer.Typer
) -> None:
    """The services that run hold the memory."""
    monkeypatch.setattr(room, "memory_gib", lambda: 0.5)
    with s.Supervisor(tmp_path):
        for command in ("up", "demo"):
            said = CliRunner().invoke(front_door, [command, "--state", str(tmp_path), "--base-port", "0"])
            assert said.exit_code == 1
            assert f"already in use by the supervisor with process id {os.getpid()}; end it with" in said.output


def test_what_a_terminal_sends_to_the_supervisor_does_not_reach_the_services(tmp_path: Path) -> None:
    (tmp_path / "stays.py").write_text("import time\ntime.sleep(60)\n")
    stays = s.ServiceSpec("stays", "stays", {"PYTHONPATH": str(tmp_path)})
    with s.Supervisor(tmp_path, say=lambda _: None) as supervisor:
        supervisor.start([stays])
        deadline = time.monotonic() + patient(20)
        while not supervisor.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        process = supervisor.processes()["stays"]
        assert os.getpgid(process) == process


def test_detaching_where_another_runs_is_refused(tmp_path: Path, sleeper: s.ServiceSpec) -> None:
    with s.Supervisor(tmp_path, say=lambda _: None) as first:
        first.start([sleeper])
        deadline = time.monotonic() + patient(20)
        while s._written_by(tmp_path) != os.getpid() and time.monotonic() < deadline:
            time.sleep(0.05)
        found = subprocess.run(
            [sys.executable, "-m", "etude.cli", "up", "-d", "--base-port", "0", "--state", str(tmp_path)],
            capture_output=True,
            text=True,
        )
    assert found.returncode == 1
    assert "already in use" in found.stderr
    assert "Running in the background" not in found.stdout


def test_a_port_in_use_is_named_before_a_service_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(s.PortsTaken, match=f"{port}.*--base-port"):
            s.require_ports([s.ServiceSpec("a", "this", port=port)], "give another with --base-port")
    s.require_ports([s.ServiceSpec("a", "this", port=port), s.ServiceSpec("b", "this")], "")


def test_a_service_that_cannot_be_started_does_not_end_the_watching(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "logs").write_text("in the way: no log can be opened")
    with s.Supervisor(tmp_path, say=said.append) as supervisor:
        supervisor.start([s.ServiceSpec("a", "this")])
        deadline = time.monotonic() + patient(20)
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
        (tmp_path / "logs").unlink()
        while not (tmp_path / "logs" / "a.log").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "a cannot be started" in said[0]
    assert (tmp_path / "logs" / "a.log").exists()


def test_a_full_disk_under_the_supervisors_own_log_ends_no_service_and_no_watching(tmp_path: Path) -> None:
    (tmp_path / "stays.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "ends.py").write_text("")
    stays, ends = (s.ServiceSpec(name, name, {"PYTHONPATH": str(tmp_path)}) for name in ("stays", "ends"))
    with (
        open("/dev/full", "wb", buffering=0) as full,
        s.Supervisor(tmp_path, say=lambda text: full.write(text.encode()) and None) as supervisor,
    ):
        supervisor.start([stays])
        deadline = time.monotonic() + patient(60)
        while not supervisor.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        before = supervisor.processes()
        supervisor.start([ends])
        while supervisor.restarts()["ends"] < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert supervisor.restarts()["ends"] >= 2
        assert before["stays"] == supervisor.processes()["stays"]


def test_the_log_of_a_service_that_runs_on_and_on_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_logs, "LOG_BYTES", 1000)
    monkeypatch.setattr(s, "LOOK_AT_LOGS_S", 0.0)
    (tmp_path / "talks.py").write_text("import time\nfor i in range(10**9): print(f'line {i}'); time.sleep(0.001)\n")
    log, kept = tmp_path / "logs" / "talks.log", tmp_path / "logs" / "talks.log.1"
    with s.Supervisor(tmp_path, say=lambda _: None) as supervisor:
        supervisor.start([s.ServiceSpec("talks", "talks", {"PYTHONPATH": str(tmp_path)})])
        deadline = time.monotonic() + patient(60)
        generations: set[str] = set()
        while len(generations) < 3 and time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                generations.add(kept.read_text().partition("\n")[0])
            time.sleep(0.02)
        assert supervisor.restarts() == {"talks": 0}
    assert len(generations) >= 3
    assert "\0" not in log.read_text()  # it goes on at the beginning, not where it was


def test_a_service_that_cannot_use_its_settings_is_not_started_again_and_status_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    with s.Supervisor(tmp_path, say=said.append) as supervisor:
        supervisor.start([s.ServiceSpec("rollout", "services.rollout", {"ETUDE_ROLLOUT_CONCURRENCY": "none"})])
        deadline = time.monotonic() + patient(60)
        while not supervisor.refused() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert supervisor.refused() == ["rollout"]
        while collect(tmp_path)[0]["state"] != "refused" and time.monotonic() < deadline:
            time.sleep(0.05)
        (row,) = collect(tmp_path)
    assert (row["state"], row["restarts"]) == ("refused", 0)
    assert said == ["rollout cannot use its settings and is not started again; the last lines of rollout.log say why"]
    assert "setting ETUDE_ROLLOUT_CONCURRENCY: found 'none'" in (tmp_path / "logs" / "rollout.log").read_text()


def test_nothing_is_waited_for_without_a_service_whose_settings_are_bad(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = ServiceSettings(state=tmp_path)
        bus = buses.connect(settings.bus_url, client="test")
        objects = stores.connect(settings.objects_url)
        try:
            async with Conductor(bus, objects, "r-1", refused=lambda: ["rollout"]) as conductor:
                await conductor.served(0)
        finally:
            await bus.close()

    with pytest.raises(Stalled, match="bad settings of rollout while waiting for a replica"):
        asyncio.run(scenario())


@pytest.mark.parametrize("command", ["up", "demo", "eval", "dlq list", "runs", "ledger audit"])
def test_bad_settings_are_told_before_anything_is_written(command: str, tmp_path: Path) -> None:
    problems = ["--checkpoint", str(BASE), "--pack", str(tmp_path)] if command == "eval" else []
    done = subprocess.run(
        [sys.executable, "-m", "etude.cli", *command.split(), *problems],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "ETUDE_PORT": "abc"},
    )
    assert done.returncode in (1, 2)
    assert "ETUDE_PORT: found 'abc': Input should be a valid integer" in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())


def test_down_ends_the_supervisor_that_holds_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys, threading, signal\nfrom pathlib import Path\nfrom etude.supervisor import Supervisor\n"
        "leave = threading.Event()\nsignal.signal(signal.SIGTERM, lambda *_: leave.set())\n"
        "with Supervisor(Path(sys.argv[1])):\n    print('up', flush=True)\n    leave.wait()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        s.stop(tmp_path)
        assert capsys.readouterr().out == "Stopped.\n"
        assert process.wait(patient(10)) == 0
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)


def test_a_problem_of_ones_own_is_refused_with_its_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    good = {
        "id": "a",
        "files": {"f.py": "def f(x):\n    return x\n"},
        "entry": "f",
        "visible": [{"args": "[1]", "expected": "2"}],
        "hidden": [{"args": "[2]", "expected": "3"}],
    }
    path.write_text(json.dumps(good) + "\n" + json.dumps({**good, "id": "b", "entry": "g"}) + "\n")
    with pytest.raises(DemoError, match=r"line 2: field 'files\[f.py\]': defines no function 'g'"):
        own_problems(path)


def test_status_leaves_out_a_replica_whose_machine_is_gone_and_names_one_that_does_not_answer(tmp_path):
    (tmp_path / "run").mkdir()
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        for name, host in (
            ("rollout-a", "replaced.invalid:8700"),
            ("rollout-b", f"127.0.0.1:{closed.getsockname()[1]}"),
        ):
            told = {"service": "rollout", "name": name, "pid": 7, "url": f"http://{host}"}
            (tmp_path / "run" / f"{name}.json").write_text(json.dumps(told))
        rows = collect(tmp_path)
    assert [(row["name"], row["state"]) for row in rows] == [("rollout-b", "down")]


def test_status_says_what_a_service_waits_on_and_for_how_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with Health("trainer", ServiceSettings(state=tmp_path, name="trainer")) as health:
            health.wait_on("groups")
            health.wait_on("the bus")
            await asyncio.to_thread(show, tmp_path, as_json=False)

    monkeypatch.setenv("COLUMNS", "160")
    asyncio.run(scenario())
    assert "groups, for 0 s; the bus, for 0 s" in capsys.readouterr().out


@pytest.fixture
def front_door() -> typer.Typer:
    app = typer.Typer()
    commands.register(app)
    return app


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "found neither"),
        (["--problems", "own.jsonl", "--pack", "."], "found both"),
        (["--problems", "own.jsonl", "--split", "dev"], "goes with --pack"),
        (["--pack", ".", "--split", "rl"], "'dev', 'held_out'"),
    ],
)
def test_an_evaluation_is_of_a_file_or_of_a_split_and_says_so(
    front_door: typer.Typer, arguments: list[str], said: str
) -> None:
    result = CliRunner().invoke(front_door, ["eval", "--checkpoint", ".", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("command", ["demo", "start"])
def test_practice_is_on_a_file_or_on_a_pack_and_says_so(front_door: typer.Typer, command: str) -> None:
    said = CliRunner().invoke(front_door, [command, "--problems", "p.jsonl", "--pack", "."], env={"COLUMNS": "200"})
    assert said.exit_code == 2
    assert "found both; give one of them" in said.output


@pytest.mark.parametrize("found", ["inf", "nan", "1e999"])
@pytest.mark.parametrize("command", [["demo", "--minutes"], ["start", "--minutes"], ["rollback", "1", "--within"]])
def test_a_number_without_an_end_is_refused(front_door: typer.Typer, command: list[str], found: str) -> None:
    said = CliRunner().invoke(front_door, [*command, found], env={"COLUMNS": "200"})
    assert said.exit_code == 2
    assert "allowed: a finite number" in said.output or found == "nan"  # which is not at least 0 either


@pytest.mark.parametrize(("found", "allowed"), [("-1", "or equal to 0"), (str(2**63), f"or equal to {2**63 - 1}")])
@pytest.mark.parametrize("command", ["demo", "start"])
def test_a_seed_that_is_none_is_refused(front_door: typer.Typer, command: str, found: str, allowed: str) -> None:
    said = CliRunner().invoke(front_door, [command, "--seed", found], env={"COLUMNS": "200"})
    assert said.exit_code == 2
    assert allowed in said.output


def test_an_evaluation_of_a_folder_that_is_no_pack_names_what_is_missing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "etude.cli", "eval", "--checkpoint", str(BASE), "--pack", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "held_out.public.jsonl.zst: missing" in done.stderr.replace("\n", "")


def test_the_options_of_the_demo_are_grouped_and_its_examples_shown(front_door: typer.Typer) -> None:
    text = CliRunner().invoke(front_door, ["demo", "--help"], env={"COLUMNS": "100"}).output
    assert "etude demo --minutes 2 --eval-problems 50" in text
    titles = ["Options", *(commands.PROBLEMS, commands.FIGURES, commands.RECIPE, commands.MACHINE)]
    places = [text.index(f"─ {title} ─") for title in titles]
    assert places == sorted(places)
