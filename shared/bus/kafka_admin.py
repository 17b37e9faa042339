"""Looking after a Kafka cluster: does it let us in, and do its topics stand as `shared.contracts.topics` declares them?"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kafka import KafkaAdminClient
from kafka.admin import ConfigResource
from kafka.errors import (
    ClusterAuthorizationFailedError,
    KafkaError,
    SaslAuthenticationFailedError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
)

from shared.bus import BusUnavailable, dead_letters
from shared.bus.kafka_batches import unreadable
from shared.bus.kafka_clients import connected
from shared.bus.kafka_cluster import Cluster
from shared.contracts.topics import TOPICS, Topic

REQUEST_MS = 10_000
READY_WITHIN_MS = 60_000  # new topics: all of ours are above a thousand partitions, which a busy broker makes slowly
TOLD_WITHIN_S, TOLD_LOOK_S = 15.0, 0.05

INSYNC, REPLICATION = "min.insync.replicas", "default.replication.factor"
MOST_INSYNC = 2  # of three copies, say: one broker may be away, and what was published is with two
CODEC = "compression.type"
# Settings with a lower bound: below it a topic refuses what our producers send. Bytes: Kafka's own default. Milliseconds: a
# publication is retried for half a minute, and clocks differ.
LEAST = {
    "max.message.bytes": 1_048_588,
    "message.timestamp.before.max.ms": 3_600_000,
    "message.timestamp.after.max.ms": 3_600_000,
}


@dataclass(frozen=True, slots=True)
class Found:
    """A topic as it is. `replicas`: copies of each partition. `configs`: those that `settings` names."""

    partitions: int
    replicas: int
    configs: dict[str, str]


def declared(topic: Topic, replicas: int) -> dict[str, str]:
    """The configuration that a topic must have, with so many copies (0: unknown, nothing is said of them). A message that two
    copies have outlives any one broker: with the usual limit of one, acks=all returns while only the leader has it."""
    durable = {INSYNC: str(min(MOST_INSYNC, replicas))} if replicas > 0 else {}
    lag = {"min.compaction.lag.ms": str(topic.compact_after_h * 3_600_000)} if topic.compact_after_h else {}
    return {
        **lag,
        "cleanup.policy": "compact,delete" if topic.compacted else "delete",
        "retention.ms": str(topic.retention_h * 3_600_000),
        "retention.bytes": "-1",  # a broker's own limit would delete what nobody has read yet
        "unclean.leader.election.enable": "false",  # a copy that lags behind must not become the log
        **durable,
    }


def settings(topic: Topic) -> list[str]:
    """Return the names of all settings that are compared."""
    return [*declared(topic, 1), *LEAST, CODEC]


def obstacles(topic: Topic, found: Found) -> list[str]:
    """Return why nothing can be read from the topic or published to it; empty: nothing is in the way. Pure."""
    wrong = []
    if found.partitions != topic.partitions:
        wrong.append(f"{found.partitions} partitions, declared {topic.partitions}")
    for name, least in LEAST.items():
        if int(found.configs.get(name, least)) < least:
            wrong.append(f"{name} {found.configs[name]}, at least {least}: what we publish is refused")
    if int(found.configs.get(INSYNC, 1)) > found.replicas > 0:
        wrong.append(f"{INSYNC} {found.configs[INSYNC]}, with {found.replicas} replicas: what we publish is refused")
    if why := unreadable(found.configs.get(CODEC, "")):
        wrong.append(f"{CODEC} {found.configs[CODEC]}: {why}")
    return wrong


def differences(topic: Topic, found: Found | None, replication: int = -1) -> list[str]:
    """What is not as declared, in words; empty: nothing. `replication`: copies that the URL asks for; -1: any number."""
    if found is None:
        return ["missing"]
    wrong = obstacles(topic, found)
    if replication not in (-1, found.replicas):
        wrong.append(f"{found.replicas} replicas, declared {replication}")
    for name, value in declared(topic, found.replicas).items():
        if found.configs.get(name) != value:
            wrong.append(f"{name} {found.configs.get(name, 'unset')}, declared {value}")
    return wrong


HUNG_UP = "socket disconnected"


class _Overheard(logging.Handler):
    """What the client says to itself while it looks for its first broker: its error would only be that it found none."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.login_refused = False
        self.hung_up = False

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.login_refused |= SaslAuthenticationFailedError.__name__ in text
        # The broker says no and hangs up at once. The client forgets what it read where it finds both together.
        self.hung_up |= HUNG_UP in text


@contextlib.contextmanager
def administration(cluster: Cluster) -> Iterator[KafkaAdminClient]:
    """Raises BusUnavailable: not there, or it does not let us in. The text names the setting and says what to do."""
    where = f"bus (ETUDE_BUS): {','.join(cluster.servers)}"
    overheard, logger = _Overheard(), logging.getLogger("kafka")
    logger.addHandler(overheard)
    admin = None
    try:
        options = {**cluster.options(), "request_timeout_ms": REQUEST_MS, "client_id": "etude-admin"}
        admin = connected(KafkaAdminClient, **options)
        yield admin
    except KafkaError as error:
        if overheard.login_refused:
            text = f"{where} refuses user {cluster.user!r}: set the user and the password that the cluster knows"
        elif overheard.hung_up and cluster.user:
            text = (
                f"{where} hangs up when user {cluster.user!r} logs in. Are user and password those that the cluster knows, and "
                f"does it expect {'TLS' if cluster.tls else 'no TLS'}?"
            )
        else:
            text = (
                f"{where}: {str(error) or type(error).__name__}. Is the address right, does a broker run there, and does "
                f"it expect {'TLS' if cluster.tls else 'no TLS'} and {'a' if cluster.user else 'no'} login?"
            )
        raise BusUnavailable(text) from None
    finally:
        logger.removeHandler(overheard)
        if admin is not None:
            admin.close()


def reach(url: str) -> str:
    """What answers, in words, and which topics may lose records. Raises ValueError, and BusUnavailable also where a setting of
    a topic stops reading or publishing."""
    cluster = Cluster.parse(url)
    with administration(cluster) as admin:
        words = f"{len(admin.describe_cluster()['brokers'])} brokers"
        topics = {one.name: one for each in TOPICS.values() for one in (each, dead_letters(each))}
        try:
            found = look(admin, cluster, list(topics.values()))
        except (ClusterAuthorizationFailedError, TopicAuthorizationFailedError):
            return f"{words}; this user may not look at the topics' settings"
    stopped = [f"{name}: {'; '.join(wrong)}" for name, at in found.items() if (wrong := obstacles(topics[name], at))]
    if stopped:
        raise BusUnavailable(
            f"bus (ETUDE_BUS): topics stand in the way: {' | '.join(stopped)}. Way out: set them as they are declared; "
            "`etude topics check` lists all that differs"
        )
    lossy = [f"{name} {'; '.join(wrong)}" for name, at in found.items() if (wrong := differences(topics[name], at))]
    return (
        f"{words}; NOT as declared, records may be lost (`etude topics check`): {' | '.join(lossy)}" if lossy else words
    )


def look(admin: KafkaAdminClient, cluster: Cluster, topics: Sequence[Topic]) -> dict[str, Found]:
    """Those of `topics` that exist, by their own name."""
    names = {cluster.physical(topic.name): topic for topic in topics}
    there = sorted(set(admin.list_topics()) & set(names))
    if not there:
        return {}
    wanted = [ConfigResource("TOPIC", name, configs=settings(names[name])) for name in there]
    configs = admin.describe_configs(wanted, config_filter="all")["topic"]
    return {
        names[row["name"]].name: Found(
            len(row["partitions"]),
            min((len(partition["replica_nodes"]) for partition in row["partitions"]), default=0),
            {name: config["value"] for name, config in configs[row["name"]].items()},
        )
        for row in admin.describe_topics(there)
    }


def make(admin: KafkaAdminClient, cluster: Cluster, topics: Iterable[Topic]) -> None:
    """Makes those that are not there."""
    replicas = cluster.replication if cluster.replication > 0 else _default_replicas(admin)
    for topic in topics:
        with contextlib.suppress(TopicAlreadyExistsError):
            wanted = {
                "num_partitions": topic.partitions,
                "replication_factor": cluster.replication,
                "configs": declared(topic, replicas),
            }
            admin.create_topics({cluster.physical(topic.name): wanted})


def protect(admin: KafkaAdminClient, cluster: Cluster, topics: Sequence[Topic]) -> int:
    """Sets how many copies must have a message, where it is not as declared; returns of how many topics. It moves and
    deletes nothing, unlike all else that may differ."""
    if wrong := _unprotected(admin, cluster, topics):
        admin.alter_configs(wrong)
        told(lambda: not _unprotected(admin, cluster, topics))
    return len(wrong)


def _unprotected(admin: KafkaAdminClient, cluster: Cluster, topics: Sequence[Topic]) -> list[ConfigResource]:
    wrong = []
    for name, found in look(admin, cluster, topics).items():
        value = str(min(MOST_INSYNC, found.replicas))
        if found.configs.get(INSYNC) != value:
            wrong.append(ConfigResource("TOPIC", cluster.physical(name), configs={INSYNC: value}))
    return wrong


def told(look: Callable[[], bool]) -> bool:
    """Wait until the brokers tell what was changed just now; return whether they do after TOLD_WITHIN_S. The controller takes a
    change before its brokers know it."""
    until = time.monotonic() + TOLD_WITHIN_S
    while not (done := look()) and time.monotonic() < until:
        time.sleep(TOLD_LOOK_S)
    return done


def _default_replicas(admin: KafkaAdminClient) -> int:
    """How many copies the brokers make of a topic of which nothing is said; 0: we may not ask."""
    node = str(admin.describe_cluster()["brokers"][0]["broker_id"])
    try:
        found = admin.describe_configs([ConfigResource("BROKER", node, configs=[REPLICATION])], config_filter="all")
        return int(found["broker"][node][REPLICATION]["value"])
    except (ClusterAuthorizationFailedError, KeyError):
        return 0
