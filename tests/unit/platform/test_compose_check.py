"""What a platform team meets with docker compose is told in one line, with the way out.

`docker` is a program on the PATH that answers as a real engine has answered; the check is a process of its own, and its Python
has nothing installed.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from etude.finding import Finding, report

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = f"""#!{sys.executable} -IS
import json, pathlib, sys
answers = json.loads(pathlib.Path(__file__).with_name("answers.json").read_text())
words = " ".join(sys.argv[1:])
code, out, err = next((answer for start, answer in answers if words.startswith(start)), (1, "", f"docker: unknown: {{words}}"))
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""
CONSOLE, GRAFANA = 18708, 13000


def ago(span: timedelta) -> str:
    return (datetime.now(UTC) - span).strftime("%Y-%m-%dT%H:%M:%S.123456789Z")


def container(
    service: str, *, health: str = "healthy", one_off: bool = False, restart: str = "unless-stopped", **state: Any
) -> dict[str, Any]:
    """As `docker inspect` says it. `state`: what is different from one that runs and is well."""
    labels = {"project": "etude", "service": service, "oneoff": str(one_off)}
    return {
        "Id": service,
        "Name": f"/etude-{service}-1",
        "RestartCount": state.pop("RestartCount", 0),
        "HostConfig": {"RestartPolicy": {"Name": restart}},
        "Config": {"Labels": {f"com.docker.compose.{name}": value for name, value in labels.items()}},
        "State": {
            "Status": "running",
            "ExitCode": 0,
            "OOMKilled": False,
            "Error": "",
            "StartedAt": ago(timedelta(minutes=5)),
            "FinishedAt": "0001-01-01T00:00:00Z",
            "Health": {"Status": health, "FailingStreak": 0, "Log": []},
            **state,
        },
    }


class Place:
    """A checkout with its check, an `.env`, and an engine that answers as told."""

    def __init__(self, root: Path) -> None:
        self.root, self.bin = root / "checkout", root / "bin"
        self.bin.mkdir()
        (self.root / "infra/docker").mkdir(parents=True)
        for name in ("infra/docker/check.py", "docker-compose.yml", ".env.example"):
            shutil.copy(ROOT / name, self.root / name)
        for name in ("etude/__init__.py", "etude/finding.py", "etude/compose"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            (self.root / "etude").mkdir(exist_ok=True)
            copy(ROOT / name, self.root / name)
        self.info: dict[str, Any] = {
            "ServerVersion": "20.10.24+dfsg1",
            "DockerRootDir": str(root),
            "MemTotal": 16 << 30,
            "NCPU": 2,
            "KernelVersion": "another machine's",
        }
        self.services: dict[str, Any] = {
            "console": self.port("etude/light:0.1.0", CONSOLE),
            "grafana": self.port("grafana/grafana:12.1.1", GRAFANA),
            "trainer": {"image": "etude/trainer:0.1.0", "cpus": 2},
        }
        self.containers: list[dict[str, Any]] = []
        self.logs: dict[str, str] = {}
        self.others = ""  # of `docker ps`: name, tab, ports
        self.answers: dict[str, tuple[int, str, str]] = {"compose version": (0, "2.40.3\n", "")}
        self.docker = True
        self.environment: dict[str, str] = {}
        example = (ROOT / ".env.example").read_text().splitlines()
        self.env: str | None = "\n".join(f"{line}s3cret" if line.endswith("=") else line for line in example)

    @staticmethod
    def port(image: str, published: int) -> dict[str, Any]:
        ports = [
            {"mode": "ingress", "host_ip": "127.0.0.1", "target": 8700, "published": str(published), "protocol": "tcp"}
        ]
        return {"image": image, "cpus": 1, "ports": ports}

    def call(self, *command: str) -> tuple[int, str]:
        """Exit code and what was printed."""
        if self.env is not None:
            (self.root / ".env").write_text(self.env)
        answers = [
            *self.answers.items(),
            ("info", (0, json.dumps(self.info), "")),
            ("compose config", (0, json.dumps({"name": "etude", "services": self.services}), "")),
            ("image inspect", (0, "sha256:1\n", "")),
            ("ps --all", (0, "".join(one["Id"] + "\n" for one in self.containers), "")),
            ("ps --format", (0, self.others, "")),
            ("inspect", (0, json.dumps(self.containers), "")),
            *((f"logs --tail 20 {name}", (0, "", text)) for name, text in self.logs.items()),
        ]
        (self.bin / "answers.json").write_text(json.dumps(answers))
        if self.docker:
            (self.bin / "docker").write_text(PROGRAM)
            (self.bin / "docker").chmod(0o755)
        done = subprocess.run(
            command or [sys.executable, "-IS", str(self.root / "infra/docker/check.py")],
            cwd=self.root,
            env={"PATH": str(self.bin), "PYTHONPATH": str(ROOT), "COLUMNS": "200", **self.environment},
            capture_output=True,
            text=True,
        )
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout

    def objection(self) -> tuple[str, str]:
        """The only thing that stands in the way, and the way out of it."""
        code, text = self.call()
        assert code == 1, text
        lines = text.splitlines()
        (at,) = [number for number, line in enumerate(lines) if line.startswith("no ")]
        assert lines[at + 1].startswith("    way out: ")
        return lines[at], lines[at + 1]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_machine_that_has_all_it_needs_is_told_so(place: Place) -> None:
    code, text = place.call()
    assert code == 0, text
    assert "docker compose has all it needs." in text
    assert "platform: not started" in text
    assert "s3cret" not in text


def test_the_command_says_the_same_as_the_check_without_an_environment(place: Place) -> None:
    place.answers["compose version"] = (0, "v2.10.2\n", "")
    command = place.call(sys.executable, "-P", "-m", "etude.cli", "doctor", "--compose")
    assert command == place.call()
    assert command[0] == 1


def test_without_docker_the_way_to_it_is_told_and_the_settings_are_still_read(place: Place) -> None:
    place.docker, place.env = False, None
    code, text = place.call()
    assert code == 1
    assert "docker: not on the PATH" in text
    assert "https://docs.docker.com/engine/install/" in text
    assert "ETUDE_S3_SECRET_KEY" in text


@pytest.mark.parametrize(
    ("said", "way_out"),
    [
        (
            "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
            "systemctl",
        ),
        ("Got permission denied while trying to connect to the Docker daemon socket", "usermod -aG docker"),
    ],
)
def test_an_engine_that_cannot_be_reached_is_told_by_its_own_words(place: Place, said: str, way_out: str) -> None:
    place.answers["info"] = (1, json.dumps({"ServerVersion": "", "MemTotal": 0}), f"{said}\n")
    line, way = place.objection()
    assert said in line
    assert way_out in way


def test_the_engine_that_the_environment_names_is_named_when_it_is_away(place: Place) -> None:
    place.environment["DOCKER_HOST"] = "tcp://build:2375"
    place.answers["info"] = (1, "", "error during connect\n")
    assert "DOCKER_HOST says tcp://build:2375" in place.objection()[1]


def test_an_engine_that_is_too_old_is_told_with_what_is_allowed(place: Place) -> None:
    place.info["ServerVersion"] = "19.03.15"
    line, way = place.objection()
    assert line == "no  docker engine: 19.03.15; allowed: 20.10 or newer"
    assert "install a newer one" in way


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ((0, "2.6.0\n", ""), "docker compose: 2.6.0; allowed: 2.17 or newer"),
        ((1, "", "docker: 'compose' is not a docker command.\n"), "docker has no command `compose`"),
    ],
)
def test_compose_that_is_too_old_or_absent_is_told(place: Place, answer: tuple[int, str, str], found: str) -> None:
    place.answers["compose version"] = answer
    assert found in place.objection()[0]


def test_a_missing_env_names_what_is_demanded_and_who_writes_it(place: Place) -> None:
    place.env = None
    line, way = place.objection()
    assert ".env: not there; demanded: ETUDE_CONSOLE_TOKEN, ETUDE_GRAFANA_PASSWORD" in line
    assert "python3 infra/docker/env.py writes it" in way


def test_an_env_that_lacks_a_variable_names_it_whether_it_is_absent_or_empty(place: Place) -> None:
    assert place.env
    place.env = place.env.replace("ETUDE_REDIS_PASSWORD=s3cret", "").replace(
        "ETUDE_CONSOLE_TOKEN=s3cret", "ETUDE_CONSOLE_TOKEN="
    )
    line, way = place.objection()
    assert line.endswith("lacks a value for ETUDE_CONSOLE_TOKEN, ETUDE_REDIS_PASSWORD")
    assert "env.py adds" in way


def test_a_variable_of_the_shell_counts_before_the_file(place: Place) -> None:
    place.environment["ETUDE_CONSOLE_TOKEN"] = ""
    line, way = place.objection()
    assert "the shell has ETUDE_CONSOLE_TOKEN empty" in line
    assert "unset ETUDE_CONSOLE_TOKEN" in way


def test_a_compose_file_that_is_named_and_absent_is_told(place: Place) -> None:
    place.env = f"{place.env}\nCOMPOSE_FILE=docker-compose.yml:mine.yml\n"
    line, way = place.objection()
    assert "mine.yml" in line
    assert "COMPOSE_FILE" in way


def test_what_compose_refuses_is_told_in_its_words(place: Place) -> None:
    place.answers["compose config"] = (15, "", "services.console additional properties 'prots' not allowed\n")
    assert "'prots' not allowed" in place.objection()[0]


def test_a_platform_without_a_trainer_or_with_two_names_the_profile(place: Place) -> None:
    trainer = place.services.pop("trainer")
    line, way = place.objection()
    assert "COMPOSE_PROFILES starts no trainer" in line
    assert "COMPOSE_PROFILES=cpu" in way
    place.services.update({"trainer": trainer, "trainer-gpu": trainer})
    assert "COMPOSE_PROFILES starts trainer and trainer-gpu" in place.objection()[0]


def test_a_port_in_use_is_told_with_the_process_and_the_variable_for_another(place: Place) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        place.services["console"] = place.port("etude/light:0.1.0", port)
        line, way = place.objection()
    assert f"port {port}: console wants it; in use by" in line
    assert f"(process {os.getpid()})" in line
    assert "ETUDE_CONSOLE_PORT in .env" in way
    assert place.call()[0] == 0, "free again"


def test_a_port_that_another_container_has_is_told_with_its_name_and_its_own_is_none(place: Place) -> None:
    place.others = (
        f"shop-web-1\t0.0.0.0:{GRAFANA}->80/tcp, :::{GRAFANA}->80/tcp\netude-console-1\t127.0.0.1:{CONSOLE}->8700/tcp\n"
    )
    place.containers = [container("console"), container("trainer"), container("grafana")]
    assert f"port {GRAFANA}: grafana wants it; in use by container shop-web-1" in place.objection()[0]


def test_a_port_that_two_services_ask_for_is_told(place: Place) -> None:
    place.services["grafana"] = place.port("grafana/grafana:12.1.1", CONSOLE)
    code, text = place.call()
    assert code == 1
    assert f"port {CONSOLE}: asked for by grafana and by console" in text


def test_too_little_disk_is_told_where_docker_keeps_its_data(place: Place) -> None:
    place.info["DockerRootDir"] = "/proc"  # a file system without a free byte
    line, way = place.objection()
    assert "disk below /proc: 0.0 GiB free; wanted: 5, for data" in line
    assert "docker system df" in way
    place.answers["image inspect"] = (1, "", "Error: No such image: etude/light:0.1.0\n")
    assert "wanted: 20, to build or pull the images too" in place.objection()[0]
    place.info["DockerRootDir"] = "/a/virtual/machine/has/it"
    assert "unknown: not on this machine" in place.call()[1]


def test_too_little_memory_is_told_unless_the_platform_has_it_already(place: Place) -> None:
    place.info["MemTotal"] = 2 << 30
    line, _ = place.objection()
    assert "memory: 2.0 GiB in all; wanted: 4" in line
    place.containers = [container(name) for name in place.services]
    assert place.call()[0] == 0


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no Linux")
def test_what_is_free_counts_where_the_engine_runs_on_this_machine(place: Place) -> None:
    place.info["KernelVersion"] = platform.release()
    assert "GiB free; wanted: 4" in place.call()[1]


def test_fewer_cores_than_a_service_asks_for_are_told(place: Place) -> None:
    place.info["NCPU"] = 1
    assert "cores: 1; a service asks for 2" in place.objection()[0]


def unhealthy(output: str, *, streak: int = 2) -> dict[str, Any]:
    looks = [
        {"Start": ago(timedelta(minutes=minutes)), "End": "", "ExitCode": 1, "Output": output} for minutes in (3, 2)
    ]
    passed = {"Start": ago(timedelta(minutes=9)), "End": "", "ExitCode": 0, "Output": ""}
    return {"Status": "unhealthy", "FailingStreak": streak, "Log": [passed, *looks]}


def test_a_service_that_is_not_well_is_told_with_since_when_its_check_and_the_end_of_its_log(place: Place) -> None:
    place.containers = [
        container("console", Health=unhealthy('/readyz: 503 {"waits_on": "messages"}\n')),
        container("grafana"),
        container("trainer", health=""),
        container("demo", one_off=True, Status="exited", ExitCode=1),
    ]
    place.logs = {"etude-console-1": "started\n\x1b[31mbus.away\x1b[0m kafka:9092\n\n"}
    line, way = place.objection()
    assert line.startswith("no  etude-console-1: unhealthy, for 3 min (since 20")
    assert '/readyz: 503 {"waits_on": "messages"}' in line
    assert line.endswith("its log ends: [31mbus.away [0m kafka:9092"), "nothing steers the terminal"
    assert "docker compose logs --tail 50 console" in way


def test_a_failure_longer_than_the_engine_remembers_is_told_as_at_least(place: Place) -> None:
    looks = unhealthy("no", streak=40)
    looks["Log"] = looks["Log"][1:]
    place.containers = [container("console", Health=looks), container("grafana"), container("trainer")]
    assert "unhealthy, at least for 3 min" in place.objection()[0]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {"Status": "restarting", "ExitCode": 1, "RestartCount": 7, "FinishedAt": timedelta(seconds=3601)},
            "restarting again and again (7 times), exit code 1, for 1 h",
        ),
        (
            {"Status": "exited", "ExitCode": 137, "OOMKilled": True, "FinishedAt": timedelta(days=2.1)},
            "exited, exit code 137, killed for memory: its mem_limit is too low, or the machine's memory, for 2 d",
        ),
        (
            {"Status": "created", "Error": "Bind for 127.0.0.1:13000 failed: port is already allocated"},
            "was never started: Bind for 127.0.0.1:13000 failed: port is already allocated",
        ),
        ({"Status": "created"}, "was never started: what it waits for was not well"),
        ({"health": "starting", "StartedAt": timedelta(minutes=2)}, "starting, for 2 min"),
    ],
)
def test_a_half_started_platform_names_the_service_that_is_behind(
    place: Place, state: dict[str, Any], words: str
) -> None:
    now = {name: ago(value) if isinstance(value, timedelta) else value for name, value in state.items()}
    place.containers = [container("console"), container("grafana", **now), container("trainer")]
    assert f"etude-grafana-1: {words}" in place.objection()[0]


def test_what_had_one_thing_to_do_and_did_it_is_no_trouble(place: Place) -> None:
    ended = container("access", restart="on-failure", Status="exited", ExitCode=0, FinishedAt=ago(timedelta(minutes=4)))
    place.containers = [container(name) for name in place.services] + [ended]
    code, text = place.call()
    assert code == 0, text
    drained = container("grafana", Status="exited", ExitCode=0, FinishedAt=ago(timedelta(minutes=4)))
    place.containers = [container("console"), drained, container("trainer")]
    assert "etude-grafana-1: exited, exit code 0, for 4 min" in place.objection()[0]


def test_a_service_without_a_container_is_told_where_others_have_one(place: Place) -> None:
    place.containers = [container("console"), container("trainer")]
    line, way = place.objection()
    assert line == "no  grafana: has no container, others have"
    assert "docker compose up -d --wait grafana" in way


def test_a_trainer_of_the_other_profile_that_still_runs_is_told_with_the_way_to_end_it(place: Place) -> None:
    """docker compose stops nothing whose profile was taken away."""
    place.services["trainer-gpu"] = place.services.pop("trainer")
    place.services["inference-gpu"] = {"image": "etude/inference-sglang:0.1.0", "cpus": 2}
    place.containers = [container(name) for name in (*place.services, "trainer", "inference")]
    line, way = place.objection()
    assert line == "no  trainer: runs, and COMPOSE_PROFILES does not ask for it"
    assert way.endswith("docker compose stop trainer inference")
    ended = [container(name, Status="exited", ExitCode=0) for name in ("trainer", "inference")]
    place.containers = [container(name) for name in place.services] + ended
    code, text = place.call()
    assert code == 0, text


def test_an_engine_that_was_started_by_its_name_beside_the_other_kind_is_no_trouble(place: Place) -> None:
    place.containers = [container(name) for name in (*place.services, "inference-serving", "inference-gpu")]
    code, text = place.call()
    assert code == 0, text


def test_a_service_of_which_there_shall_be_none_is_not_missed(place: Place) -> None:
    place.services["kafka"] = {"image": "apache/kafka:4.1.0", "scale": 0}
    place.containers = [container(name) for name in place.services if name != "kafka"]
    code, text = place.call()
    assert code == 0, text


def test_known_words_of_a_log_lead_to_the_page_that_mends_it(place: Place) -> None:
    place.services["grader"] = {"image": "etude/worker:0.1.0", "cpus": 2}
    place.containers = [container(name) for name in ("console", "grafana", "trainer")]
    place.containers.append(container("grader", health="starting"))
    place.logs = {"etude-grader-1": '{"event": "sandbox_unavailable"}\n{"event": "again"}\n'}
    line, way = place.objection()
    assert '{"event": "again"}' in line
    assert "docs/sandboxes.md, In containers" in way


def test_a_platform_that_was_stopped_is_no_trouble(place: Place) -> None:
    place.containers = [container(name, Status="exited", ExitCode=143) for name in place.services]
    code, text = place.call()
    assert code == 0
    assert "platform: 3 containers, all stopped" in text


def test_one_line_is_printed_for_a_check_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    found = [Finding("a", False, "[red]no markup[/]", "b")]
    assert report(found, "well") == 1
    assert capsys.readouterr().out == "no  a: [red]no markup[/]\n    way out: b\n1 thing stands in the way.\n"


def test_the_check_is_written_in_words_that_python_3_9_knows() -> None:
    """What a host has beside Docker is often old."""
    for path in (ROOT / "infra/docker/check.py", ROOT / "etude/finding.py", *(ROOT / "etude/compose").glob("*.py")):
        assert ast.parse(path.read_text(), feature_version=(3, 9))
