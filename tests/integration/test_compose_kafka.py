"""The Kafka of docker-compose.yml, configured by its variables and the entry of the local image, without a container around it:
on a volume that knew neither logins nor rules, `access` makes users, and everybody is held to what is declared."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from etude import access, topics
from infra.servers.kafka import Kafka
from shared.bus import BusUnavailable, connect
from shared.bus.kafka_admin import administration, make
from shared.bus.kafka_cluster import Cluster
from shared.contracts.messages import AttemptKey, RolloutFailed
from shared.contracts.topics import ACCESS, ROLLOUTS_FINISHED, ROLLOUTS_SCORED, Access
from tests.servers import need

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
IMAGE = ROOT / "infra" / "docker" / "local" / "kafka"
READY_WITHIN_S = 180.0
MESSAGE = RolloutFailed(
    run="r-0", key=AttemptKey(attempt="a-0", epoch=0, group="g-0", problem="p-0"), reason="a test", worker="w"
)
BEFORE = {  # what an earlier release said of listeners: whoever came might do anything
    "KAFKA_LISTENERS": "PLAINTEXT://:9092,CONTROLLER://:9093",
    "KAFKA_ADVERTISED_LISTENERS": "PLAINTEXT://kafka:9092",
    "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
}
RULES = re.compile(r"SASL|AUTHORIZER|ALLOW|SUPER|INTER_BROKER")


class Here:
    """This machine in the place of the containers: their variables with the values of an .env, and addresses of here."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.values = folder, {}
        with socket.socket() as one, socket.socket() as two:
            for each in (one, two):
                each.bind(("127.0.0.1", 0))
            self.broker, self.controller = one.getsockname()[1], two.getsockname()[1]
        (folder / "config").mkdir(parents=True)
        (folder / "bin").mkdir()
        shutil.copy(IMAGE / "kafka-tool", folder / "bin" / "kafka-storage.sh")

    def variables(self, service: str) -> dict[str, str]:
        return {name: self._here(str(value)) for name, value in COMPOSE[service]["environment"].items()}

    def _here(self, value: str) -> str:
        value = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value)
        value = re.sub(r"\$\{(\w+)[^}]*\}", lambda m: self.values.setdefault(m[1], secrets.token_hex(24)), value)
        value = value.replace("kafka:9092", f"127.0.0.1:{self.broker}").replace(":9092", f"127.0.0.1:{self.broker}")
        value = value.replace("kafka:9093", f"127.0.0.1:{self.controller}").replace(
            ":9093", f"127.0.0.1:{self.controller}"
        )
        return value.replace("/var/lib/kafka/data", str(self.folder / "data"))

    @contextlib.contextmanager
    def kafka(self, variables: Mapping[str, str], url: str) -> Iterator[Cluster]:
        """Runs meanwhile, by the image's own entry, and answers whom the URL names."""
        server = Kafka()
        server.install()
        inside = [
            "bwrap",
            "--dev-bind",
            "/",
            "/",
            "--tmpfs",
            "/opt",
            "--bind",
            str(self.folder / "config"),
            "/opt/kafka/config",
        ]
        inside += [
            "--bind",
            str(self.folder / "bin"),
            "/opt/kafka/bin",
            "--ro-bind",
            str(server._libraries),
            "/opt/kafka/libs",
        ]
        path = f"{server._java.parent}:{os.environ['PATH']}"
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(
                [*inside, "--die-with-parent", str(IMAGE / "run")],
                env={"PATH": path, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                cluster = Cluster.parse(url)
                self._await(process, cluster)
                yield cluster
            finally:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.terminate()
                process.wait(60)

    def _await(self, process: subprocess.Popen[bytes], cluster: Cluster) -> None:
        """Its port opens before it answers: so long the engine starts `access` again."""
        until = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(BusUnavailable), administration(cluster) as admin:
                if admin.describe_cluster()["brokers"]:
                    return
        pytest.fail((self.folder / "log").read_text()[-3000:])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    need("ETUDE_BUS")  # it was fetched then
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed: it puts files where the image has them")
    one = Here(tmp_path_factory.mktemp("kafka"))
    now = one.variables("kafka")
    earlier = {name: value for name, value in now.items() if not RULES.search(name)}
    earlier |= {name: one._here(value) for name, value in BEFORE.items()}
    with one.kafka(earlier, f"kafka://127.0.0.1:{one.broker}") as cluster, administration(cluster) as admin:
        make(admin, cluster, [ROLLOUTS_FINISHED])
    with one.kafka(now, one.variables("access")["ETUDE_BUS"]):
        yield one


def run_access(here: Here) -> tuple[int, str]:
    """The command of `access` with its variables, of Kafka alone: MinIO's part needs a MinIO (test_access_set.py)."""
    assert COMPOSE["access"]["command"] == ["etude", "access", "set"]
    given = {**here.variables("access"), "ETUDE_OBJECTS": "", "ETUDE_CONFIG": ""}
    done = CliRunner().invoke(access.app, ["set"], env=given)
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def given(here: Here) -> Here:
    code, said = run_access(here)
    assert (code, f"{len(topics.wanted()) - 1} topics made" in said) == (0, True), said  # one is there, of the volume's
    return here


def of(here: Here, service: str) -> Cluster:
    return Cluster.parse(here.variables(service)["ETUDE_BUS"])


@pytest.mark.parametrize(
    "service", [name for name in COMPOSE if "ETUDE_BUS" in (COMPOSE[name].get("environment") or {})]
)
def test_each_service_logs_in_and_sees_the_topics_that_are_its_own(given: Here, service: str) -> None:
    cluster = of(given, service)
    with administration(cluster) as admin:
        seen = {name for name in admin.list_topics() if not name.startswith("__")}
    who = cluster.user.removeprefix("etude-")
    if service == "access":
        assert seen == {topic.name for topic in topics.wanted()}
        return
    one = ACCESS[who]
    counted = {topic.name for each in one.counts.values() for topic in each}
    letters = {topic.dead_letter for topic in one.taken if not topic.holds_letters}
    assert seen == {topic.name for topic in (*one.writes, *one.hears, *one.taken)} | counted | letters
    assert one != Access()


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


def test_who_has_no_password_or_a_guessed_one_is_not_let_in(given: Here) -> None:
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
