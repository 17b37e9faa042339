"""What a kafka:// URL says, and that no error shows its password."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus import BusUnavailable, connect
from shared.bus.kafka_admin import Found, declared, differences, reach
from shared.bus.kafka_cluster import Cluster
from shared.contracts.messages import Alert
from shared.contracts.topics import Topic


def test_a_url_names_brokers_login_prefix_and_encryption() -> None:
    cluster = Cluster.parse("kafka://me:p%40ss@one:9092,[::1]:9093/team-a?tls=1")
    assert cluster.servers == ("one:9092", "[::1]:9093")
    assert (cluster.user, cluster.password, cluster.tls) == ("me", "p@ss", True)
    assert cluster.physical("rollouts.requested") == "team-a.rollouts.requested"
    options = cluster.options()
    assert (options["security_protocol"], options["sasl_mechanism"]) == ("SASL_SSL", "SCRAM-SHA-512")


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_the_login_goes_by_the_mechanism_that_is_named(mechanism: str) -> None:
    options = Cluster.parse(f"kafka://me:p@h:1?mechanism={mechanism}").options()
    assert (options["security_protocol"], options["sasl_mechanism"]) == ("SASL_PLAINTEXT", mechanism)


def test_files_of_authorities_and_of_our_own_certificate_reach_the_client(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("the ca.pem", "us.pem", "us.key")]
    for path in paths:
        path.touch()
    ca, certificate, key = (quote(str(path)) for path in paths)
    options = Cluster.parse(f"kafka://h:1?ca={ca}&certificate={certificate}&key={key}&tls=1").options()
    assert options["security_protocol"] == "SSL"
    assert [options[f"ssl_{name}"] for name in ("cafile", "certfile", "keyfile")] == [str(path) for path in paths]
    assert not any(name.startswith("ssl") for name in Cluster.parse("kafka://h:1?tls=1").options())


def test_a_broker_of_an_authority_of_ones_own_is_trusted_with_its_certificate_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.kafka_cluster.FIRST_CONTACT_MS", 1_000)
    ca, key = tmp_path / "ca.pem", tmp_path / "key.pem"
    openssl = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=broker -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*openssl.split(), "-keyout", key, "-out", ca], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ca, key)
    asked: list[bytes] = []

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the server is closed
            while True:
                connection = server.accept()[0]
                with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as secured:
                    asked.append(secured.recv(100))

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"kafka://127.0.0.1:{server.getsockname()[1]}?tls=1"
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        with pytest.raises(BusUnavailable):
            reach(url)
        assert not any(asked)  # it was refused before a word was said
        for within_ms in (1_000, 10_000):  # a busy machine may need longer for the handshake
            monkeypatch.setattr("shared.bus.kafka_cluster.FIRST_CONTACT_MS", within_ms)
            with pytest.raises(BusUnavailable):  # it hangs up on all questions
                reach(f"{url}&ca={ca}")
            if any(asked):
                break
        assert any(asked)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("tsl=1", "'tsl'; allowed: tls, mechanism, instance, replication, ca, certificate, key"),
        ("mechanism=GSSAPI", "found 'GSSAPI'; allowed: SCRAM-SHA-512, SCRAM-SHA-256, PLAIN"),
        ("replication=0", "allowed: 1 to 99"),
        ("tls=1&tls=0", "'tls' comes twice"),
        ("tls=1&ca=/nowhere/ca.pem", "there is no file '/nowhere/ca.pem'"),
        ("ca=/etc/hostname", "'ca' says nothing without 'tls'"),
        ("tls=0&certificate=/etc/hostname", "'certificate' says nothing without 'tls'"),
        ("tls=1&key=/etc/hostname", "'key' says nothing without 'certificate'"),
    ],
)
def test_a_parameter_that_is_none_is_named_with_what_is_allowed(query: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        Cluster.parse(f"kafka://me:secret@h:1?{query}")
    assert "secret" not in str(error.value)


def test_a_mechanism_without_a_login_is_refused() -> None:
    with pytest.raises(ValueError, match="mechanism= is of a login"):
        Cluster.parse("kafka://h:1?mechanism=PLAIN")


def test_a_message_must_be_with_two_brokers_where_a_topic_has_more_than_one_copy() -> None:
    topic = Topic("t", (Alert,), partitions=2, retention_h=1)
    kept = declared(topic, 0)
    for replicas, insync in ((1, "1"), (2, "2"), (3, "2")):
        assert differences(topic, Found(2, replicas, {**kept, "min.insync.replicas": insync})) == []
    careless = Found(2, 3, {**kept, "min.insync.replicas": "1"})
    assert differences(topic, careless) == ["min.insync.replicas 1, declared 2"]
    assert differences(topic, careless, replication=2)[0] == "3 replicas, declared 2"
    assert Cluster.parse("kafka://h:1?replication=3&tls=1").replication == 3
    assert Cluster.parse("kafka://h:1").replication == -1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("retention.bytes", "1000000", "retention.bytes 1000000, declared -1"),
        ("unclean.leader.election.enable", "true", "unclean.leader.election.enable true, declared false"),
        ("cleanup.policy", "compact", "cleanup.policy compact, declared delete"),
        ("max.message.bytes", "5000", "max.message.bytes 5000, at least 1048588: what we publish is refused"),
        (
            "message.timestamp.before.max.ms",
            "1",
            "message.timestamp.before.max.ms 1, at least 3600000: what we publish",
        ),
        ("compression.type", "brotli", "compression.type brotli: records compressed with brotli cannot be read"),
    ],
)
def test_a_setting_that_stops_a_topic_or_loses_records_is_named(name: str, value: str, words: str) -> None:
    topic = Topic("t", (Alert,), partitions=2)
    good = {**declared(topic, 1), "compression.type": "producer", "max.message.bytes": "1048588"}
    assert differences(topic, Found(2, 1, good)) == []
    (wrong,) = differences(topic, Found(2, 1, {**good, name: value}))
    assert wrong.startswith(words)


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
