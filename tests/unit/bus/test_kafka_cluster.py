"""What a kafka:// URL says, and that no error shows its password."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus import BusUnavailable, connect
from shared.bus.kafka_admin import reach
from shared.bus.kafka_cluster import Cluster


def test_a_url_names_brokers_login_prefix_and_encryption() -> None:
    cluster = Cluster.parse("kafka://me:p%40ss@one:9092,[::1]:9093/team-a?tls=1")
    assert cluster.servers == ("one:9092", "[::1]:9093")
    assert (cluster.user, cluster.password, cluster.tls) == ("me", "p@ss", True)
    assert cluster.physical("rollouts.requested") == "team-a.rollouts.requested"
    options = cluster.options()
    assert (options["security_protocol"], options["sasl_mechanism"]) == ("SASL_SSL", "SCRAM-SHA-512")


def test_without_login_or_prefix_nothing_is_added() -> None:
    cluster = Cluster.parse("kafka://localhost:9092")
    assert cluster.physical("alerts") == "alerts"
    assert cluster.options()["security_protocol"] == "PLAINTEXT"
    assert not any(name.startswith("sasl") for name in cluster.options())


@pytest.mark.parametrize("query", ["?instance=rollout-0", "?tls=1&instance=rollout-0"])
def test_a_replica_with_a_name_of_its_own_is_a_static_member_per_subscription(query: str) -> None:
    cluster = Cluster.parse(f"kafka://h:1{query}")
    assert cluster.member(["b", "a"]) == cluster.member(["a", "b"]) != cluster.member(["a"])
    assert (cluster.member(["a"]) or "").startswith("rollout-0.")
    assert Cluster.parse("kafka://h:1").member(["a"]) is None


@given(st.text(min_size=1).filter(lambda text: text.isprintable()))
def test_any_password_arrives_as_it_was_meant_and_is_never_shown(password: str) -> None:
    cluster = Cluster.parse(f"kafka://me:{quote(password, safe='')}@h:1")
    assert cluster.password == password
    assert "password" not in repr(cluster)


@pytest.mark.parametrize(
    "url",
    [
        "kafka://",
        "kafka://host",
        "kafka://host:x",
        "kafka://a:1,b",
        "kafka://me@h:1",
        "kafka://h:1?tls=2",
        "kafka://h:1&instance=a",
        "kafka://h:1?instance=",
        "kafka://h:1?instance=rôle",
        "http://h:1",
    ],
)
def test_a_url_that_is_none_says_what_is_allowed(url: str) -> None:
    with pytest.raises(ValueError, match="ETUDE_BUS"):
        connect(url, client="t")


def test_the_error_hides_a_password() -> None:
    with pytest.raises(ValueError, match="allowed") as error:
        Cluster.parse("kafka://me:secret@host")
    assert "secret" not in str(error.value)


def test_a_broker_that_hangs_up_at_the_login_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kafka does with a wrong password when the client is slow to read: no answer is left, only the end."""
    monkeypatch.setattr("shared.bus.kafka_cluster.FIRST_CONTACT_MS", 1_000)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(BusUnavailable, match="password") as told:
            reach(f"kafka://me:geheim@127.0.0.1:{port}")
        assert "geheim" not in str(told.value)
        with pytest.raises(BusUnavailable, match="no login"):
            reach(f"kafka://127.0.0.1:{port}")
