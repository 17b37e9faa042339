"""Real Kafka and MinIO hold every service to what is declared: no less, no more, and nobody else gets in."""

from __future__ import annotations

import asyncio
import fnmatch
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kafka import KafkaAdminClient, TopicPartition
from kafka.errors import CoordinatorNotAvailableError, GroupAuthorizationFailedError
from kafka.structs import OffsetAndMetadata
from minio import Minio
from minio.error import S3Error
from typer.testing import CliRunner

from etude import letters, topic_rules
from etude.object_keys import Bucket
from etude.object_rules import OBJECTS
from etude.topic_rules import Rule
from shared import objects as stores
from shared.bus import BusUnavailable, connect, dead_letters
from shared.bus.kafka_admin import administration
from shared.bus.kafka_cluster import Cluster
from shared.contracts import ids
from shared.contracts.messages import AttemptKey, RolloutFailed
from shared.contracts.topics import (
    ACCESS,
    GROUPS_READY,
    ROLLOUTS_FINISHED,
    ROLLOUTS_SCORED,
    RUNS_STATE,
    TOPICS,
    Access,
)
from shared.objects import ObjectMissing, Objects, ObjectsUnavailable
from tests.integration.access_world import World, settings, world
from tests.patience import patient, until

USERS = [who for who, access in ACCESS.items() if access != Access()]
IMPLIED = {"READ": {"READ", "DESCRIBE"}, "WRITE": {"WRITE", "DESCRIBE"}, "DESCRIBE": {"DESCRIBE"}}
RUN = ids.new_run_id()
ATTEMPT = ids.attempt_prefix(RUN, ids.attempt_id(RUN, "g-0", 0), 0)
MESSAGE = RolloutFailed(
    run=RUN, key=AttemptKey(attempt="a-0", epoch=0, group="g-0", problem="p-0"), reason="a test", worker="w"
)
KEYS = {  # one of every kind that lies in the store, and some that nobody has
    "public": "packs/own-pack/rl.public.jsonl.zst",
    "hidden": "packs/own-pack/rl.hidden.jsonl.zst",
    "config": f"runs/{RUN}/config.json",
    "later config": f"runs/{RUN}/config-0123456789ab.json",
    "surprise": f"runs/{RUN}/surprise.json",
    "probe": f"runs/{RUN}/probe.json",
    "base": f"runs/{RUN}/base/model.safetensors",
    "imported": "checkpoints/small/checkpoint.json",
    "trajectory": f"{ATTEMPT}/trajectory-0123456789abcdef.safetensors.zst",
    "routing": f"{ATTEMPT}/routing-0123456789abcdef.safetensors.zst",
    "verdict": f"{ATTEMPT}/verdict-0123456789abcdef.json",
    "answer": "grading/reward-0/0123.json",
    "policy": f"{ids.policy_prefix(RUN, 3)}/manifest.json",
    "checkpoint": f"{ids.checkpoint_prefix(RUN, 0, 3)}/manifest.json",
    "incarnation": f"runs/{RUN}/incarnations/000000",
    "open": ids.open_evaluation(RUN, "e-0"),
    "part": f"runs/{RUN}/evals/e-0/parts/0123.jsonl",
    "report": f"runs/{RUN}/evals/e-0/report.json",
    "reach": "reach/0123",
    "elsewhere": "elsewhere/0123",
    "a policy that looks like an attempt": f"runs/{RUN}/policies/attempts/trajectory-/manifest.json",
    "a run that is none": "runs/attempts/trajectory-0",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("access") / "keys") as one:
        yield one


# Kafka


@pytest.mark.parametrize("who", USERS)
def test_each_user_may_do_with_topics_what_is_declared_and_no_more(made: World, who: str) -> None:
    access, declared = ACCESS[who], dict[str, set[str]]()
    letters = [dead_letters(topic) for topic in access.taken if not topic.holds_letters]
    counted = [topic for topics in access.counts.values() for topic in topics]
    for operation, topics in (
        ("WRITE", [*access.writes, *letters]),
        ("READ", [*access.hears, *access.taken]),
        ("DESCRIBE", counted),
    ):
        for topic in topics:
            declared.setdefault(topic.name, set()).update(IMPLIED[operation])
    names = {made.cluster.physical(name): name for one in TOPICS.values() for name in (one.name, one.dead_letter)}
    with administration(made.as_(who)) as admin:
        found = {names[row["name"]]: row["authorized_operations"] for row in admin.describe_topics(list(names))}
        assert {name: set(may) for name, may in found.items() if may} == declared
        assert {name for name in admin.list_topics() if name in names} == {made.cluster.physical(n) for n in declared}


@pytest.mark.parametrize("who", USERS)
def test_each_user_may_join_its_groups_and_no_other(made: World, who: str) -> None:
    access = ACCESS[who]
    known = {group for one in ACCESS.values() for group in (*one.takes, *one.counts)} | {"somebody", "trainerx"}
    declared = {group: {"READ", "DESCRIBE"} for group in access.takes}
    declared |= {group: {"DESCRIBE"} for group in access.counts if group not in access.takes}
    with administration(made.as_(who)) as admin:
        found = {group: may(admin, made.cluster, group) for group in known}
    assert {group: rights for group, rights in found.items() if rights} == declared


def may(admin: KafkaAdminClient, cluster: Cluster, group: str) -> set[str]:
    name = cluster.physical(group) + (RUN if group.endswith(".") else "")
    at = TopicPartition(cluster.physical(RUNS_STATE.name), 0)

    def asked() -> list[set[str]]:
        """The rights, once a coordinator answers: a broker makes its topic of offsets when somebody first asks for a group."""
        try:
            answer = admin.alter_group_offsets(name, {at: OffsetAndMetadata(0, "", -1)})
        except GroupAuthorizationFailedError:
            return [set()]
        except CoordinatorNotAvailableError:
            return []
        return [{"DESCRIBE"} if answer[at] is GroupAuthorizationFailedError else {"READ", "DESCRIBE"}]

    return until(asked, "the group's coordinator")[0]


def test_a_service_speaks_for_itself_alone(made: World) -> None:
    async def publish(who: str, topic: str) -> None:
        bus = connect(made.keys[who]["ETUDE_BUS"], client=f"test-{who}")
        try:
            await bus.publish(TOPICS[topic], "a-0", MESSAGE)
        finally:
            await bus.close()

    asyncio.run(publish("reward", ROLLOUTS_SCORED.name))  # which it may; it made no topic, and could not
    for who in ("rollout", "console", "cli"):
        with pytest.raises(BusUnavailable, match=r"TopicAuthorizationFailed|may neither use nor make"):
            asyncio.run(publish(who, ROLLOUTS_SCORED.name))
    with pytest.raises(BusUnavailable, match=r"may neither use nor make .*etude topics acl check"):
        asyncio.run(publish("inference", ROLLOUTS_FINISHED.name))


def test_who_may_not_read_a_topic_hears_nothing_of_it(made: World) -> None:
    async def heard(url: str, within_s: float) -> bool:
        bus = connect(url, client="test")
        try:
            async with asyncio.timeout(within_s):
                await anext(bus.deliveries([ROLLOUTS_FINISHED], None, 8))
            return True
        except TimeoutError:
            return False
        finally:
            await bus.close()

    async def write() -> None:
        bus = connect(made.keys["rollout"]["ETUDE_BUS"], client="test")
        await bus.publish(ROLLOUTS_FINISHED, "a-0", MESSAGE)
        await bus.close()

    asyncio.run(write())
    assert asyncio.run(heard(made.keys["console"]["ETUDE_BUS"], patient(30)))
    assert not asyncio.run(
        heard(made.keys["inference"]["ETUDE_BUS"], 5.0)
    )  # a window: what is not heard sends no event


@pytest.mark.parametrize("who", ["console", "cli", "scaler", "dlq"])
def test_who_counts_is_answered(made: World, who: str) -> None:
    async def count() -> None:
        bus = connect(made.keys[who]["ETUDE_BUS"], client="test")
        try:
            for group, topics in ACCESS[who].counts.items():
                assert set(await bus.lag(topics, group)) == {topic.name for topic in topics}
        finally:
            await bus.close()

    asyncio.run(count())


def test_what_cannot_be_read_is_buried_and_put_back_by_those_who_may(made: World) -> None:
    async def bury() -> None:
        worker = connect(made.keys["rollout"]["ETUDE_BUS"], client="test-rollout")
        reader = connect(made.keys["reward"]["ETUDE_BUS"], client="test-reward")
        await worker.publish(ROLLOUTS_FINISHED, "a-0", MESSAGE)
        async with asyncio.timeout(patient(60)):
            delivery = await anext(aiter(reader.deliveries([ROLLOUTS_FINISHED], "reward", 8)))
        delivery.bury("a test")
        await reader.close()
        await worker.close()

    def dlq(who: str, *words: str) -> tuple[int, str]:
        done = CliRunner().invoke(letters.app, list(words), env={"ETUDE_CONFIG": "", **made.keys[who]})
        return done.exit_code, done.output

    asyncio.run(bury())
    assert dlq("dlq", "show", ROLLOUTS_FINISHED.name)[1].count("reason: a test") == 1
    assert dlq("dlq", "replay", ROLLOUTS_FINISHED.name) == (0, f"{ROLLOUTS_FINISHED.name}: 1 put back.\n")
    code, said = dlq("cli", "replay", ROLLOUTS_FINISHED.name)
    assert (code, "may neither use nor make" in said) == (1, True)


def test_who_has_no_rule_or_no_password_gets_nothing(made: World) -> None:
    stranger = f"{made.users}stranger"
    from kafka.admin import UserScramCredentialUpsertion

    with administration(made.cluster) as admin:
        admin.alter_user_scram_credentials([UserScramCredentialUpsertion(stranger, "SCRAM-SHA-512", "secret")])
    with administration(replace(made.cluster, user=stranger, password="secret")) as admin:
        assert not [name for name in admin.list_topics() if name.startswith(made.cluster.prefix)]
    with pytest.raises(BusUnavailable, match=r"refuses user|hangs up when user"):
        with administration(replace(made.as_("rollout"), password="guessed")) as admin:
            admin.list_topics()


def test_rules_that_are_missing_or_too_much_are_told_and_mended(made: World) -> None:
    with administration(made.cluster) as admin:
        declared = topic_rules.declared(made.cluster, made.users)
        assert made.etude("topics", "acl", "check") == (0, f"{len(declared)} rules are as declared.\n")
        lost = Rule(f"User:{made.users}reward", "TOPIC", made.cluster.physical(ROLLOUTS_SCORED.name), "WRITE")
        wide = Rule(f"User:{made.users}rollout", "TOPIC", made.cluster.prefix, "WRITE", prefixed=True)
        other = Rule(f"User:{made.users}a-friend", "TOPIC", made.cluster.physical(GROUPS_READY.name), "READ")
        topic_rules.remove(admin, made.cluster, [lost])
        topic_rules.make(admin, made.cluster, [wide, other])
        code, said = made.etude("topics", "acl", "check")
        assert code == 1
        assert f"missing: {lost}" in said
        assert f"too much: {made.users}rollout may write topic {made.cluster.prefix}…" in said
        assert f"of others: {other}" in said
        code, said = made.etude("topics", "acl", "apply")
        assert (code, "1 rules made." in said) == (1, True)  # what is too much is removed on request alone
        code, said = made.etude("topics", "acl", "apply", "--remove")
        assert (code, "1 rules removed." in said) == (0, True)
        left = set(topic_rules.look(admin, made.cluster))
        assert {*declared, other} <= left
        assert wide not in left
        topic_rules.remove(admin, made.cluster, [other])


# MinIO


@pytest.fixture(scope="module")
def filled(made: World) -> tuple[World, Bucket, Minio]:
    bucket = Bucket.parse(settings(made.administrator))
    store = client(bucket)
    for key in KEYS.values():
        put(store, bucket, key)
    return made, bucket, store


@pytest.mark.parametrize("who", list(OBJECTS))
def test_each_key_opens_its_objects_and_no_other(filled: tuple[World, Bucket, Minio], who: str) -> None:
    made, bucket, store = filled
    own = client(Bucket.parse(settings(made.keys[who])))
    keys, found, declared = OBJECTS[who], {}, {}
    for what, key in KEYS.items():
        declared[what] = [
            any(fnmatch.fnmatchcase(key, each) for each in way) for way in (keys.reads, keys.writes, keys.deletes)
        ]
        found[what] = [
            allowed(lambda: own.stat_object(bucket.name, key)),  # noqa: B023
            allowed(lambda: put(own, bucket, key)),  # noqa: B023
            allowed(lambda: own.remove_object(bucket.name, key)),  # noqa: B023
        ]
        if found[what][2]:
            put(store, bucket, key)
    assert found == declared
    assert not allowed(lambda: own.make_bucket(f"{bucket.name}x"))
    assert not allowed(lambda: own.remove_bucket(bucket.name))


@pytest.mark.parametrize(
    ("who", "cannot", "what"),
    [
        ("rollout", "read", "hidden"),
        ("rollout", "write", "verdict"),
        ("rollout", "write", "a policy that looks like an attempt"),
        ("rollout", "write", "policy"),
        ("inference", "read", "hidden"),
        ("inference", "write", "policy"),
        ("trainer", "read", "hidden"),
        ("trainer", "write", "verdict"),
        ("grader", "write", "policy"),
        ("grader", "write", "trajectory"),
        ("grader", "write", "hidden"),
        ("reward", "read", "hidden"),
        ("reward", "write", "verdict"),
        ("evaluator", "read", "hidden"),
        ("console", "read", "hidden"),
        ("console", "write", "policy"),
        ("console", "write", "verdict"),
        ("scheduler", "write", "policy"),
        ("scheduler", "read", "trajectory"),
        ("scheduler", "delete", "checkpoint"),
        ("scheduler", "delete", "base"),
    ],
)
def test_what_must_not_be_is_refused(filled: tuple[World, Bucket, Minio], who: str, cannot: str, what: str) -> None:
    made, bucket, _ = filled
    own = client(Bucket.parse(settings(made.keys[who])))
    attempts: dict[str, Callable[[], object]] = {
        "read": lambda: own.get_object(bucket.name, KEYS[what]),
        "write": lambda: put(own, bucket, KEYS[what]),
        "delete": lambda: own.remove_object(bucket.name, KEYS[what]),
    }
    assert not allowed(attempts[cannot])


def test_a_service_connects_by_its_key_and_is_told_what_it_may_not(
    filled: tuple[World, Bucket, Minio], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, _ = filled
    rollout = connected_as(made, "rollout", monkeypatch)
    trajectory = rollout.put(KEYS["trajectory"], b"what the agent did")
    grader = connected_as(made, "grader", monkeypatch)
    assert grader.get(trajectory) == b"what the agent did"
    assert grader.put_if_absent(KEYS["verdict"], b"solved") is None  # one is there
    assert KEYS["policy"] in list(grader.list("runs/"))  # by name alone
    with pytest.raises(ObjectsUnavailable, match="AccessDenied"):
        grader.head(KEYS["policy"])
    with pytest.raises(ObjectMissing):
        grader.head(KEYS["verdict"].replace("/0/", "/1/"))
    with pytest.raises(ObjectsUnavailable, match="AccessDenied"):
        rollout.put_if_absent(KEYS["verdict"].replace("/0/", "/1/"), b"solved")


def connected_as(made: World, who: str, monkeypatch: pytest.MonkeyPatch) -> Objects:
    for name, value in made.keys[who].items():
        monkeypatch.setenv(name, value)
    return stores.connect(made.keys[who]["ETUDE_OBJECTS"])


def test_policies_that_differ_are_told_and_set_again(made: World) -> None:
    bucket = Bucket.parse(settings(made.administrator))
    assert made.etude("access", "s3", "check")[0] == 0
    with bucket._admin() as admin:
        admin.policy_set("readwrite", user=f"{made.users}grader")
        admin.policy_add(f"{made.users}rollout", policy={"Version": "2012-10-17", "Statement": [
            {"Effect": "Allow", "Action": ["s3:*"], "Resource": [f"arn:aws:s3:::{bucket.name}/*"]}
        ]})  # fmt: skip
    code, said = made.etude("access", "s3", "check")
    assert code == 1
    assert f"{made.users}grader: has the policies readwrite" in said
    assert f"{made.users}rollout: its policy is another" in said
    assert made.etude("access", "s3", "apply")[0] == 0
    assert made.etude("access", "s3", "check")[0] == 0


def test_policies_of_another_platform_are_left_alone(made: World) -> None:
    elsewhere = made.administrator["ETUDE_OBJECTS"].replace("s3://", "s3://x", 1)
    code, said = replace(made, administrator={**made.administrator, "ETUDE_OBJECTS": elsewhere}).etude(
        "access", "s3", "apply"
    )
    assert (code, "choose another beginning" in said) == (1, True)
    assert made.etude("access", "s3", "check")[0] == 0


def test_secrets_are_given_once_and_taken_from_nobody(made: World, tmp_path: Path) -> None:
    before = made.keys
    assert all((made.folder / f"{who}.env").stat().st_mode & 0o77 == 0 for who in before)
    assert made.etude("access", "give", str(made.folder))[0] == 0
    assert made.keys == before
    code, said = made.etude("access", "give", str(tmp_path / "another"))
    assert (code, "--renew" in said) == (1, True)
    assert not (tmp_path / "another").exists()
    code, said = replace(made, administrator=before["rollout"]).etude("access", "give", str(tmp_path / "another"))
    assert (code, "may not look at rules" in said) == (1, True)


def client(bucket: Bucket) -> Minio:
    return Minio(bucket.host, bucket.key, bucket.secret, secure=bucket.secure)


def put(store: Minio, bucket: Bucket, key: str) -> None:
    store.put_object(bucket.name, key, io.BytesIO(b"{}"), 2)


def allowed(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except S3Error as error:
        if error.code != "AccessDenied":
            raise
        return False
    return True
