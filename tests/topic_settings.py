"""Change the settings of a topic at a real Kafka, as an operator does on a living cluster."""

from __future__ import annotations

from kafka.admin import ConfigResource

from shared.bus.kafka_admin import administration
from shared.bus.kafka_cluster import Cluster
from tests.patience import until


def change(bus: str, topic: str, settings: dict[str, str]) -> dict[str, str]:
    """Change `settings` of a topic, a dotted Kafka name to its value, and return what they were. Wait until the broker tells the
    new ones: KRaft's controller takes a change before its brokers know it. `bus`: its address. `topic`: our name for it."""
    cluster = Cluster.parse(bus)
    name = cluster.physical(topic)
    with administration(cluster) as admin:

        def now() -> dict[str, str]:
            found = admin.describe_configs([ConfigResource("TOPIC", name)], config_filter="all")["topic"][name]
            return {setting: found[setting]["value"] for setting in settings}

        before = now()
        admin.alter_configs([ConfigResource("TOPIC", name, configs=settings)])
        until(lambda: now() == settings, f"the broker to tell the new settings of {name}: {settings}")
    return before
