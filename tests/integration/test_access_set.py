"""`etude access set`, as docker compose calls it: users, keys, rules and topics of a platform from nothing but its secrets."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace

import pytest
from minio import Minio
from minio.error import S3Error

from etude import topic_rules
from etude.object_keys import Bucket
from etude.object_rules import OBJECTS
from etude.topic_rules import Rule
from etude.topics import wanted
from shared.bus import BusUnavailable
from shared.bus.kafka_admin import administration
from shared.contracts.topics import ACCESS, ROLLOUTS_SCORED
from tests.integration.access_world import World, empty, settings

WITHOUT = ("sweep", "scaler")  # as in compose, which has neither
SECRETS = {f"ETUDE_SECRET_{who.upper()}": secrets.token_hex(24) for who in {**ACCESS, **OBJECTS} if who not in WITHOUT}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with empty(tmp_path_factory.mktemp("access") / "none") as one:
        platform = replace(one, administrator={**one.administrator, **SECRETS})
        code, said = platform.etude("access", "set")
        assert (code, f"{len(wanted())} topics made" in said) == (0, True), said
        assert not [secret for secret in SECRETS.values() if secret in said]
        yield platform


def heard(made: World, who: str, secret: str) -> set[str]:
    """The topics that this user sees."""
    with administration(replace(made.cluster, user=f"{made.users}{who}", password=secret)) as admin:
        return {name for name in admin.list_topics() if name.startswith(made.cluster.prefix)}


def may_read(made: World, who: str, secret: str, key: str) -> bool:
    bucket = Bucket.parse(settings(made.administrator))
    try:
        Minio(bucket.host, f"{made.users}{who}", secret, secure=bucket.secure).stat_object(bucket.name, key)
    except S3Error as error:
        return error.code == "NoSuchKey"  # it was looked for
    return True


def test_an_empty_platform_gets_all_that_its_services_need(made: World) -> None:
    assert made.etude("topics", "check")[0] == 0
    assert made.etude("topics", "acl", "check")[0] == 0
    assert made.etude("access", "s3", "check")[1] == f"{made.users}sweep: no such user\n"
    with administration(made.cluster) as admin:
        users = {user for user in admin.describe_user_scram_credentials() if user.startswith(made.users)}
    assert users == {f"{made.users}{who}" for who in ACCESS if who not in ("grader", "scaler")}
    rollout, reward, grader = (SECRETS[f"ETUDE_SECRET_{who}"] for who in ("ROLLOUT", "REWARD", "GRADER"))
    assert made.cluster.physical(ROLLOUTS_SCORED.name) in heard(made, "reward", reward)
    assert made.cluster.physical(ROLLOUTS_SCORED.name) not in heard(made, "rollout", rollout)
    hidden = "packs/a-pack/rl.hidden.jsonl.zst"
    assert may_read(made, "grader", grader, hidden)
    assert not may_read(made, "rollout", rollout, hidden)


def test_it_may_be_called_again_and_a_new_secret_takes_the_place_of_the_old_one(made: World) -> None:
    old, new = SECRETS["ETUDE_SECRET_ROLLOUT"], secrets.token_hex(24)
    code, said = made.etude("access", "set")
    assert (code, " 0 topics made" in said) == (0, True)
    seen, key = heard(made, "rollout", old), "packs/a-pack/rl.public.jsonl.zst"
    assert may_read(made, "rollout", old, key)
    other = replace(made, administrator={**made.administrator, "ETUDE_SECRET_ROLLOUT": new})
    assert other.etude("access", "set")[0] == 0
    assert heard(made, "rollout", new) == seen
    assert (may_read(made, "rollout", new, key), may_read(made, "rollout", old, key)) == (True, False)
    with pytest.raises(BusUnavailable):
        heard(made, "rollout", old)
    assert made.etude("access", "set")[0] == 0


def test_what_its_users_may_beyond_the_declaration_is_taken_back(made: World) -> None:
    wide = Rule(f"User:{made.users}rollout", "TOPIC", made.cluster.physical(ROLLOUTS_SCORED.name), "WRITE")
    other = Rule(f"User:{made.users}a-friend", "TOPIC", made.cluster.physical(ROLLOUTS_SCORED.name), "WRITE")
    with administration(made.cluster) as admin:
        topic_rules.make(admin, made.cluster, [wide, other])
        assert made.etude("access", "set")[0] == 0
        left = topic_rules.look(admin, made.cluster)
    assert (wide in left, other in left) == (False, True)
