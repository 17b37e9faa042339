"""A platform on the real servers whose services each have a user and an object key of their own, and no other rights."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kafka import KafkaAdminClient
from typer.testing import CliRunner

import infra.servers
from etude import access, topic_rules, topics
from etude.object_keys import Bucket
from etude.object_rules import OBJECTS
from shared.bus.kafka_admin import administration
from shared.bus.kafka_cluster import Cluster
from shared.settings import ServiceSettings
from tests.servers import need

AUTHORIZER = "the test broker keeps no rules: it was started by an older version. `make servers-down servers`"


@dataclass(frozen=True, slots=True)
class World:
    """`administrator`: the variables of one who may all; `keys`: by service, its own. `users`: how their names begin."""

    users: str
    administrator: Mapping[str, str]
    folder: Path

    @property
    def keys(self) -> dict[str, dict[str, str]]:
        return {path.stem: access._read(path) for path in self.folder.glob("*.env")}

    @property
    def cluster(self) -> Cluster:
        return Cluster.parse(self.administrator["ETUDE_BUS"])

    def as_(self, who: str) -> Cluster:
        return Cluster.parse(self.keys[who]["ETUDE_BUS"])

    def etude(self, *words: str) -> tuple[int, str]:
        """`etude topics` or `etude access`, called by the administrator: exit code, and what it said."""
        group = {"topics": topics.app, "access": access.app}[words[0]]
        done = CliRunner().invoke(group, list(words[1:]), env={"ETUDE_CONFIG": "", **self.administrator})
        return done.exit_code, done.output

    def refused(self, since: int) -> list[str]:
        """What the broker has refused to users of this world."""
        text = log().read_bytes()[since:].decode(errors="replace")
        return [line for line in text.splitlines() if "Denied" in line and f"User:{self.users}" in line]


def log() -> Path:
    return infra.servers.FOLDER / "kafka" / "log"


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    """Topics, bucket, users, rules and policies are there; all but the bucket and the bus's users are removed afterwards."""
    with empty(folder) as made:
        for words in (("topics", "apply"), ("access", "give", str(folder))):
            code, said = made.etude(*words)
            assert code == 0, AUTHORIZER if "keeps no rules" in said else said
        yield made


@contextlib.contextmanager
def empty(folder: Path) -> Iterator[World]:
    """Nothing is there; what was made meanwhile, all but the bucket and the bus's users, is removed afterwards."""
    found = need("ETUDE_BUS", "ETUDE_OBJECTS")
    name = f"t{secrets.token_hex(4)}"  # an access key may have 20 characters, `-evaluator` among them
    administrator = {
        **found,
        "ETUDE_BUS": f"{found['ETUDE_BUS']}/{name}",
        "ETUDE_OBJECTS": f"s3://{name}@{found['ETUDE_OBJECTS'].partition('@')[2]}",
    }
    made = World(f"{name}-", administrator, folder)
    try:
        yield made
    finally:
        _forget(made)


def _forget(made: World) -> None:
    mine = re.compile(f"User:{made.users}.*")
    with administration(made.cluster) as admin:
        rules = [rule for rule in topic_rules.look(admin, made.cluster) if mine.fullmatch(rule.user)]
        topic_rules.remove(admin, made.cluster, rules)
        # Its users stay. A broker that reads a log with a deleted user from the beginning may forget all users: Kafka's
        # ScramDelta.apply drops the map to which it goes on adding (found in 4.1.0 to 4.3.0, docs/access.md).
        _forget_topics(admin, made.cluster)
    bucket = Bucket.parse(settings(made.administrator))
    there = bucket.users()
    with bucket._admin() as store:
        for who in OBJECTS:
            if f"{made.users}{who}" in there:
                store.user_remove(f"{made.users}{who}")
                store.policy_remove(f"{made.users}{who}")


def _forget_topics(admin: KafkaAdminClient, cluster: Cluster) -> None:
    if names := [topic for topic in admin.list_topics() if topic.startswith(cluster.prefix)]:
        admin.delete_topics(names)


def settings(variables: Mapping[str, str]) -> ServiceSettings:
    return ServiceSettings(
        bus=variables.get("ETUDE_BUS", ""),
        objects=variables.get("ETUDE_OBJECTS", ""),
        s3_access_key=variables.get("ETUDE_S3_ACCESS_KEY", ""),
        s3_secret_key=variables.get("ETUDE_S3_SECRET_KEY", ""),
    )
