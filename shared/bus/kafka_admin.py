"""Looking after a Kafka cluster: does it let us in, and do its topics stand as `shared.contracts.topics` declares them?"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kafka import KafkaAdminClient
from kafka.admin import ConfigResource
from kafka.errors import KafkaError, SaslAuthenticationFailedError, TopicAlreadyExistsError

from shared.bus import BusUnavailable
from shared.bus.kafka_cluster import Cluster
from shared.contracts.topics import Topic

REQUEST_MS = 10_000
READY_WITHIN_MS = 60_000  # new topics: all of ours are above a thousand partitions, which a busy broker makes slowly


@dataclass(frozen=True, slots=True)
class Found:
    """A topic as it is. `configs`: those that `declared` names."""

    partitions: int
    configs: dict[str, str]


def declared(topic: Topic) -> dict[str, str]:
    """The configuration that a topic must have: compacted, or kept for so long."""
    if topic.compacted:
        return {"cleanup.policy": "compact"}
    return {"cleanup.policy": "delete", "retention.ms": str(topic.retention_h * 3_600_000)}


def differences(topic: Topic, found: Found | None) -> list[str]:
    """What is not as declared, in words; empty: nothing."""
    if found is None:
        return ["missing"]
    wrong = []
    if found.partitions != topic.partitions:
        wrong.append(f"{found.partitions} partitions, declared {topic.partitions}")
    for name, value in declared(topic).items():
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
        admin = KafkaAdminClient(**{**cluster.options(), "request_timeout_ms": REQUEST_MS}, client_id="etude-admin")
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
    """What answers, in words. Raises ValueError, BusUnavailable."""
    with administration(Cluster.parse(url)) as admin:
        return f"{len(admin.describe_cluster()['brokers'])} brokers"


def look(admin: KafkaAdminClient, cluster: Cluster, topics: Sequence[Topic]) -> dict[str, Found]:
    """Those of `topics` that exist, by their own name."""
    names = {cluster.physical(topic.name): topic for topic in topics}
    there = sorted(set(admin.list_topics()) & set(names))
    if not there:
        return {}
    wanted = [ConfigResource("TOPIC", name, configs=list(declared(names[name]))) for name in there]
    configs = admin.describe_configs(wanted, config_filter="all")["topic"]
    return {
        names[row["name"]].name: Found(
            len(row["partitions"]), {name: config["value"] for name, config in configs[row["name"]].items()}
        )
        for row in admin.describe_topics(there)
    }


def make(admin: KafkaAdminClient, cluster: Cluster, topic: Topic) -> None:
    """Makes a topic unless it is there."""
    with contextlib.suppress(TopicAlreadyExistsError):
        admin.create_topics(
            {cluster.physical(topic.name): {"num_partitions": topic.partitions, "configs": declared(topic)}}
        )
