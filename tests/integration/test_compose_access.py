"""Kafka, MinIO and `access` of docker-compose.yml by their own variables, without containers around them: on volumes that knew
neither logins nor rules, `access` makes users and keys, and every service is held to what is declared."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from minio import Minio
from minio.error import S3Error
from typer.testing import CliRunner

import infra.servers.minio
from etude import access, topics
from infra.servers.kafka import Kafka
from infra.servers.ports import free_ports
from shared.bus import BusUnavailable, connect, kafka_cluster
from shared.bus.kafka_admin import administration, make
from shared.bus.kafka_cluster import Cluster
from shared.contracts.messages import AttemptKey, RolloutFailed
from shared.contracts.topics import ACCESS, ROLLOUTS_FINISHED, ROLLOUTS_SCORED
from tests.patience import patient, until
from tests.servers import need

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
IMAGE = ROOT / "infra" / "docker" / "local" / "kafka"
READY_WITHIN_S = 180.0
PORTS = ("kafka:9092", "kafka:9093", "minio:9000")
MESSAGE = RolloutFailed(
    run="r-0", key=AttemptKey(attempt="a-0", epoch=0, group="g-0", problem="p-0"), reason="a test", worker="w"
)
BEFORE = {  # what an earlier release said of listeners: whoever came might do anything
    "KAFKA_LISTENERS": "PLAINTEXT://:9092,CONTROLLER://:9093",
    "KAFKA_ADVERTISED_LISTENERS": "PLAINTEXT://kafka:9092",
    "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
}
RULES = re.compile(r"SASL|AUTHORIZER|ALLOW|SUPER|INTER_BROKER")
PUBLIC, HIDDEN = "packs/a-pack/rl.public.jsonl.zst", "packs/a-pack/rl.hidden.jsonl.zst"


class Here:
    """This machine in the place of the containers: their variables with the values of an .env, and addresses of here."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._secrets = folder, dict[str, str]()
        free = free_ports(len(PORTS))
        self._ports = {name: f"127.0.0.1:{port}" for name, port in zip(PORTS, free, strict=True)}
        self.kafka_at, _, self.minio_at = self._ports.values()

    def variables(self, service: str) -> dict[str, str]:
        return {name: self.of_here(str(value)) for name, value in COMPOSE[service]["environment"].items()}

    def of_here(self, value: str) -> str:
        value = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value)
        value = re.sub(r"\$\{(\w+)[^}]*\}", lambda m: self._secrets.setdefault(m[1], secrets.token_hex(24)), value)
        for name, here in self._ports.items():
            host, port = name.split(":")
            value = re.sub(rf"(?:{host})?:{port}\b", here, value)
        return value.replace("/var/lib/kafka/data", str(self.folder / "kafka-data"))

    @contextlib.contextmanager
    def kafka(self, variables: Mapping[str, str], url: str) -> Iterator[Cluster]:
        """Runs meanwhile, by the entry of the local image, and answers whom the URL names."""
        server, cluster = Kafka(), Cluster.parse(url)
        server.install()
        for name in ("config", "bin"):
            (self.folder / name).mkdir(exist_ok=True)
        shutil.copy(IMAGE / "kafka-tool", self.folder / "bin" / "kafka-storage.sh")
        places = {"config": self.folder / "config", "bin": self.folder / "bin", "libs": server._libraries}
        binds = [part for name, path in places.items() for part in ("--bind", str(path), f"/opt/kafka/{name}")]
        command = ["bwrap", "--dev-bind", "/", "/", "--tmpfs", "/opt", *binds, "--die-with-parent", str(IMAGE / "run")]
        path = f"{server._java.parent}:{os.environ['PATH']}"

        def answers() -> bool:  # its port opens earlier: so long compose starts `access` again
            with administration(cluster) as admin:
                return bool(admin.describe_cluster()["brokers"])

        with self._running("kafka", command, {"PATH": path, **variables}, answers):
            yield cluster

    @contextlib.contextmanager
    def minio(self) -> Iterator[Minio]:
        """Runs meanwhile, with the variables that the compose file gives it; the client is its root's."""
        server, root = infra.servers.minio.Minio(), self.variables("minio")
        server.install()
        command = [
            str(server.program),
            "server",
            "--quiet",
            "--address",
            self.minio_at,
            str(self.folder / "minio-data"),
        ]
        client = Minio(self.minio_at, root["MINIO_ROOT_USER"], root["MINIO_ROOT_PASSWORD"], secure=False)
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
        }
        with self._running("minio", command, {**variables, **root}, lambda: client.list_buckets() is not None):
            yield client

    @contextlib.contextmanager
    def _running(
        self, name: str, command: list[str], variables: Mapping[str, str], answers: Callable[[], bool]
    ) -> Iterator[None]:
        log = self.folder / f"{name}.log"
        with log.open("a") as file:
            process = subprocess.Popen(command, env=dict(variables), stdout=file, stderr=subprocess.STDOUT)
        try:
            try:
                until(lambda: process.poll() is not None or _true(answers), name, READY_WITHIN_S, every=0.2)
            except TimeoutError:
                pytest.fail(f"{name} does not answer: {log.read_text()[-3000:]}")
            if process.poll() is not None:
                pytest.fail(f"{name} ended: {log.read_text()[-3000:]}")
            yield
        finally:
            inside = psutil.Process(process.pid).children(recursive=True)  # bubblewrap hands on no signal
            for each in inside or [process]:
                each.send_signal(signal.SIGTERM)
            process.wait(patient(60))


def _true(answers: Callable[[], bool]) -> bool:
    try:
        return answers()
    except Exception:  # it is starting: each client has errors of its own
        return False


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    need("ETUDE_BUS", "ETUDE_OBJECTS")  # their programs were fetched then
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed: it puts files where the image has them")
    one = Here(tmp_path_factory.mktemp("compose"))
    now = one.variables("kafka")
    earlier = {name: value for name, value in now.items() if not RULES.search(name)}
    earlier |= {name: one.of_here(value) for name, value in BEFORE.items()}
    with one.kafka(earlier, f"kafka://{one.kafka_at}") as cluster, administration(cluster) as admin:
        make(admin, cluster, [ROLLOUTS_FINISHED])
    with one.minio() as root, one.kafka(now, one.variables("access")["ETUDE_BUS"]):
        root.make_bucket("etude")
        for key in (PUBLIC, HIDDEN):
            root.put_object("etude", key, io.BytesIO(b"{}"), 2)
        yield one


def run_access(here: Here) -> tuple[int, str]:
    """What the container `access` does, with its variables."""
    etude, *words = COMPOSE["access"]["command"]
    assert (etude, words[0]) == ("etude", "access")
    done = CliRunner().invoke(access.app, words[1:], env={"ETUDE_CONFIG": "", **here.variables("access")})
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def given(here: Here) -> Here:
    code, said = run_access(here)
    assert (code, f"{len(topics.wanted()) - 1} topics made" in said) == (0, True), said  # one is there, of the volume's
    return here


def of(here: Here, service: str) -> Cluster:
    return Cluster.parse(here.variables(service)["ETUDE_BUS"])


def holding(variable: str) -> list[str]:
    return [name for name, one in COMPOSE.items() if variable in (one.get("environment") or {})]


@pytest.mark.parametrize("service", [name for name in holding("ETUDE_BUS") if name != "access"])
def test_each_service_logs_in_and_sees_the_topics_that_are_its_own(given: Here, service: str) -> None:
    cluster = of(given, service)
    with administration(cluster) as admin:
        seen = {name for name in admin.list_topics() if not name.startswith("__")}
    one = ACCESS[cluster.user.removeprefix("etude-")]
    counted = {topic.name for each in one.counts.values() for topic in each}
    letters = {topic.dead_letter for topic in one.taken if not topic.holds_letters}
    assert seen == {topic.name for topic in (*one.writes, *one.hears, *one.taken)} | counted | letters


@pytest.mark.parametrize("service", [name for name in holding("ETUDE_S3_SECRET_KEY") if name != "access"])
def test_each_service_s_key_is_let_in_and_hidden_tests_are_opened_by_those_who_run_them(
    given: Here, service: str
) -> None:
    own = given.variables(service)
    client = Minio(given.minio_at, own["ETUDE_S3_ACCESS_KEY"], own["ETUDE_S3_SECRET_KEY"], secure=False)
    assert client.bucket_exists("etude")

    def opens(key: str) -> bool:
        try:
            client.stat_object("etude", key)
        except S3Error as error:
            if error.code != "AccessDenied":
                raise
            return False
        return True

    assert opens(HIDDEN) == (service in ("curator", "grader", "cli", "demo"))
    assert opens(PUBLIC) == (service in ("curator", "grader", "cli", "demo", "rollout", "evaluator", "console"))


def test_a_worker_cannot_score_itself(given: Here) -> None:
    async def publish(service: str) -> None:
        bus = connect(given.variables(service)["ETUDE_BUS"], client="test")
        try:
            await bus.publish(ROLLOUTS_SCORED, "a-0", MESSAGE)
        finally:
            await bus.close()

    asyncio.run(publish("reward"))
    with pytest.raises(BusUnavailable, match=r"TopicAuthorizationFailed|may neither use nor make"):
        asyncio.run(publish("rollout"))


def test_who_has_no_password_or_a_guessed_one_is_not_let_in(given: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_cluster, "FIRST_CONTACT_MS", int(patient(1_000)))
    for stranger in (
        Cluster(of(given, "rollout").servers),
        replace(of(given, "access"), password="guessed"),
        replace(of(given, "rollout"), password="guessed"),
        replace(of(given, "rollout"), mechanism="PLAIN"),  # that is the administrator's alone
    ):
        with pytest.raises(BusUnavailable), administration(stranger) as admin:
            admin.list_topics()


def test_a_second_start_of_the_platform_finds_nothing_to_make(given: Here) -> None:
    code, said = run_access(given)
    assert (code, " 0 topics made" in said) == (0, True)
