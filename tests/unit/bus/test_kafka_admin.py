"""A change of a topic's settings: the controller takes it before the brokers tell it."""

from __future__ import annotations

from typing import Any

import pytest

from shared.bus import kafka_admin
from shared.bus.kafka_admin import INSYNC, protect, told
from shared.bus.kafka_cluster import Cluster
from shared.contracts.topics import ALERTS


class Late:
    """An administration client whose cluster tells a change only after it was asked `lag` times."""

    def __init__(self, lag: int) -> None:
        self.lag, self.value, self.next = lag, "1", "1"

    def list_topics(self) -> list[str]:
        return ["etude.alerts"]

    def describe_topics(self, names: list[str]) -> list[dict[str, Any]]:
        return [{"name": name, "partitions": [{"replica_nodes": [1, 2, 3]}]} for name in names]

    def describe_configs(self, resources: list[Any], config_filter: str) -> dict[str, Any]:
        if self.value != self.next:
            self.lag -= 1
            self.value = self.value if self.lag else self.next
        return {"topic": {resource.name: {INSYNC: {"value": self.value}} for resource in resources}}

    def alter_configs(self, resources: list[Any]) -> None:
        ((self.next,),) = [resource.configs.values() for resource in resources]


def test_protecting_a_topic_ends_when_the_brokers_tell_the_new_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_admin, "TOLD_LOOK_S", 0.0)
    late, cluster = Late(3), Cluster.parse("kafka://k:9092/etude")
    assert protect(late, cluster, [ALERTS]) == 1  # type: ignore[arg-type]
    assert (late.value, late.lag) == ("2", 0)
    assert protect(late, cluster, [ALERTS]) == 0  # type: ignore[arg-type]


def test_brokers_that_never_tell_a_change_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_admin, "TOLD_WITHIN_S", 0.01)
    assert not told(lambda: False)
