"""Kafka in KRaft mode, one node that is broker and controller, from the artefacts in Maven Central (`kafka.xml`).

It knows rules (StandardAuthorizer). The user of `settings` is above them; any other may do what a rule allows, and the log
says what was refused to whom.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import signal
import subprocess
import uuid
from pathlib import Path

from infra.servers import CACHE, Unavailable, alone, require_fetching, say
from infra.servers.debian import installed
from infra.servers.place import Launch, Place

POM = Path(__file__).with_name("kafka.xml")
JAVA = 17
USER = "etude"
MECHANISM = "SCRAM-SHA-512"
LOGIN = "org.apache.kafka.common.security.scram.ScramLoginModule"
# Between broker and controller: users by SCRAM lie in the metadata, which must be reached before any of them is known.
INSIDE = "PLAIN"
INSIDE_LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
# A broker for tests: small heap, and neither compiler nor collector beyond what a few thousand messages a second need.
JVM = [
    "-Xms128m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.log.kafka.authorizer.logger=info",  # who was refused what
]


class Kafka:
    name = "kafka"
    ports = 2  # clients; the controller

    def install(self) -> str:
        self._java = _java()
        self._libraries = CACHE / f"kafka-{hashlib.sha256(POM.read_bytes()).hexdigest()[:12]}"
        if not self._libraries.exists():
            require_fetching("kafka")
            with alone("kafka"):
                if not self._libraries.exists():
                    _download(self._libraries)
        (version,) = re.findall(r"<artifactId>kafka_2.13</artifactId><version>(.+?)<", POM.read_text())
        return version

    def prepare(self, place: Place) -> None:
        broker, controller = place.ports
        (place.folder / "server.properties").write_text(
            f"""\
node.id=1
process.roles=broker,controller
listeners=CLIENTS://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=CLIENTS://127.0.0.1:{broker}
inter.broker.listener.name=CLIENTS
controller.listener.names=CONTROLLER
controller.quorum.voters=1@127.0.0.1:{controller}
listener.security.protocol.map=CONTROLLER:SASL_PLAINTEXT,CLIENTS:SASL_PLAINTEXT
listener.name.controller.sasl.enabled.mechanisms={INSIDE}
listener.name.controller.{INSIDE.lower()}.sasl.jaas.config={INSIDE_LOGIN} required {_inside(place)};
sasl.mechanism.controller.protocol={INSIDE}
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:{USER}
sasl.enabled.mechanisms={MECHANISM}
sasl.mechanism.inter.broker.protocol={MECHANISM}
listener.name.clients.{MECHANISM.lower()}.sasl.jaas.config={LOGIN} required username="{USER}" password="{place.secret}";
log.dirs={place.data}
auto.create.topics.enable=false
offsets.topic.num.partitions=4
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
log.cleaner.dedupe.buffer.size=16777216
log.index.size.max.bytes=1048576
"""
        )
        if not (place.data / "meta.properties").exists():
            cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
            login = f"{MECHANISM}=[name={USER},password={place.secret}]"
            arguments = ["format", f"--cluster-id={cluster}", "--config", self._config(place), "--add-scram", login]
            done = subprocess.run(
                [*self._program("kafka.tools.StorageTool"), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode:
                raise Unavailable(f"kafka: its storage cannot be formatted: {done.stdout.strip()[-800:]}")

    def launch(self, place: Place) -> Launch:
        return Launch([*self._program("kafka.Kafka"), self._config(place)], {}, signal.SIGTERM)

    def ready(self, place: Place) -> bool:
        from kafka import KafkaAdminClient

        from shared.bus.kafka_cluster import Cluster

        options = Cluster.parse(self.settings(place)["ETUDE_BUS"]).options()
        admin = KafkaAdminClient(**{**options, "request_timeout_ms": 2000, "bootstrap_timeout_ms": 2000})
        try:
            return bool(admin.describe_cluster()["brokers"])
        finally:
            admin.close()

    def settings(self, place: Place) -> dict[str, str]:
        return {"ETUDE_BUS": f"kafka://{USER}:{place.secret}@127.0.0.1:{place.port}"}

    def _program(self, main: str) -> list[str]:
        return [str(self._java), *JVM, "-cp", f"{self._libraries}/*", main]

    def _config(self, place: Place) -> str:
        return str(place.folder / "server.properties")


def _inside(place: Place) -> str:
    """Broker and controller are one process: it logs in to itself."""
    return f'username="{USER}" password="{place.secret}" user_{USER}="{place.secret}"'


def _java() -> Path:
    home = os.environ.get("JAVA_HOME")
    java = Path(home) / "bin" / "java" if home else installed("java", f"openjdk-{JAVA}-jre-headless")
    text = subprocess.run([str(java), "-version"], capture_output=True, text=True).stderr
    found = re.search(r'version "(\d+)', text)
    if not found or int(found[1]) < JAVA:
        raise Unavailable(
            f"kafka: needs Java {JAVA} or newer, found {text.splitlines()[:1] or 'none'} at {java}. "
            f"Way out: apt-get install openjdk-{JAVA}-jre-headless, or set JAVA_HOME"
        )
    return java


def _download(target: Path) -> None:
    maven = installed("mvn", "maven")
    say("downloading Kafka from Maven Central (once)")
    work = target.with_name(f".{target.name}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    copy = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={work}"]
    done = subprocess.run(
        [str(maven), "-q", "-B", "-f", str(POM), *copy],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise Unavailable(f"kafka: Maven cannot fetch it: {done.stdout.strip()[-800:]}")
    work.rename(target)
