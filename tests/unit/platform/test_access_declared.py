"""What is declared of who uses which topic and object is what the code does, what the page says, and what tools take."""

from __future__ import annotations

import ast
import fnmatch
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from etude import access, object_rules, topic_rules, topics
from etude.object_rules import OBJECTS
from etude.supervisor import SERVICES as PROCESSES
from etude.topic_rules import Rule, compare, declared
from services.console.flow import WAYS
from shared.bus.kafka_cluster import Cluster
from shared.contracts import ids
from shared.contracts import topics as declaration
from shared.contracts.topics import ACCESS, SERVICES, TOPICS, Access, Topic

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "access.md"
CONSTANTS = {name: one for name, one in vars(declaration).items() if isinstance(one, Topic) and one.name in TOPICS}
POLICY = 2048  # characters that AWS takes of a policy that is a user's own
CLUSTER = Cluster.parse("kafka://a:1,b:1")


def named(folder: Path, *left_out: str) -> set[str]:
    """Topics that the modules below a folder name, by whatever alias."""
    return {
        name
        for path in folder.rglob("*.py")
        if path.name not in left_out
        for name in _names(ast.parse(path.read_text()))
    }


def _names(module: ast.Module) -> Iterator[str]:
    imports = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    modules = [one for node in imports if node.module == "shared.contracts" for one in node.names]
    aliases = {one.asname or one.name for one in modules if one.name == "topics"}
    direct = {
        one.asname or one.name: one.name
        for node in imports
        if node.module == "shared.contracts.topics"
        for one in node.names
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            if node.attr in CONSTANTS:
                yield CONSTANTS[node.attr].name
        elif isinstance(node, ast.Name) and direct.get(node.id) in CONSTANTS:
            yield CONSTANTS[direct[node.id]].name


def of(one: Access) -> set[str]:
    counted = [topic for topics in one.counts.values() for topic in topics]
    return {topic.name for topic in (*one.writes, *one.hears, *one.taken, *counted)}


# The grader lies in the same room as reward. The console's code counts what others take, by their declarations.
@pytest.mark.parametrize("who", [who for who in SERVICES if who not in ("grader", "console")])
def test_a_service_is_allowed_the_topics_that_its_code_names(who: str) -> None:
    by_its_bus = {declaration.ALERTS.name} if ACCESS[who].takes else set()  # that records are gone (shared.bus.gone)
    assert named(ROOT / "services" / who) | by_its_bus == of(ACCESS[who])


def test_the_console_is_allowed_to_use_what_its_code_names_and_to_count_what_every_service_takes() -> None:
    own = ACCESS["console"]
    assert named(ROOT / "services" / "console") == of(Access(writes=own.writes, hears=own.hears)) | {
        way.what for way in WAYS if way.what in TOPICS
    }
    taken = {(group, topic) for one in SERVICES.values() for group, of_it in one.takes.items() for topic in of_it}
    counted = {(group, topic) for group, topics in own.counts.items() for topic in topics}
    assert counted == {(group, topic) for group, topic in taken if not group.endswith(".")}
    assert {(way.what, way.group) for way in WAYS if way.group} <= {(t.name, group) for group, t in counted}


def test_commands_are_allowed_the_topics_that_their_code_names() -> None:
    assert named(ROOT / "etude") == of(ACCESS["cli"])


def test_every_process_has_its_own_user_and_key() -> None:
    assert set(SERVICES) == {name for name, _ in PROCESSES} == set(OBJECTS) - {"cli", "sweep"}


def test_every_topic_is_written_and_read_by_somebody() -> None:
    some = [one for who, one in ACCESS.items() if who not in topic_rules.EVERYWHERE]
    for topic in TOPICS.values():
        assert any(topic in one.writes for one in some), topic.name
        assert any(topic in (*one.hears, *one.taken) for one in some), topic.name


def test_what_follows_is_as_little_as_kafka_needs() -> None:
    reward = [str(rule) for rule in declared(CLUSTER, "etude-") if rule.user == "User:etude-reward"]
    assert reward == [
        "etude-reward may read group reward",
        "etude-reward may read topic alerts",
        "etude-reward may write topic alerts",
        "etude-reward may read topic rollouts.finished",
        "etude-reward may write topic rollouts.finished.dlq",
        "etude-reward may read topic rollouts.scored",
        "etude-reward may write topic rollouts.scored",
        "etude-reward may read topic runs.state",
    ]
    rules = declared(CLUSTER, "etude-")
    assert {rule.operation for rule in rules} == {"READ", "WRITE", "DESCRIBE"}
    assert {rule.kind for rule in rules} == {"TOPIC", "GROUP"}
    assert [rule.name for rule in rules if rule.prefixed and rule.operation == "READ"] == ["trainer."]
    assert not [rule for rule in rules if rule.user == "User:etude-grader"]


def test_platforms_that_share_a_cluster_share_neither_names_nor_users() -> None:
    a, b = (Cluster.parse(f"kafka://k:1/{name}") for name in ("team", "team-a"))
    of_a, of_b = (declared(cluster, topic_rules.users_of(cluster)) for cluster in (a, b))
    assert not {rule.user for rule in of_a} & {rule.user for rule in of_b}
    assert {rule.name.partition(".")[0] for rule in of_a} == {"team"}
    assert compare(of_a, [*of_a, *of_b], "team-") == compare(of_a, of_a, "team-")  # nothing of the other is too much
    assert compare(of_b, [*of_a, *of_b], "team-a-") == compare(of_b, of_b, "team-a-")


@pytest.mark.parametrize(
    ("extra", "where"),
    [
        (Rule("User:etude-rollout", "TOPIC", "rollouts.scored", "WRITE"), "surplus"),
        (Rule("User:etude-rollout", "CLUSTER", "kafka-cluster", "CREATE"), "surplus"),
        (Rule("User:etude-retired", "TOPIC", "alerts", "WRITE"), "surplus"),
        (Rule("User:etude-rollout", "TOPIC", "rollouts.finished", "WRITE", permission="DENY"), "surplus"),
        (Rule("User:*", "TOPIC", "*", "READ"), "surplus"),
        (Rule("User:*", "TOPIC", "somebody.elses", "READ"), None),
        (Rule("User:friend", "TOPIC", "rollouts.", "READ", prefixed=True), "others"),
        (Rule("User:friend", "GROUP", "trainer.r-1", "READ"), "others"),
        (Rule("User:friend", "TOPIC", "somebody.elses", "READ"), None),
    ],
)
def test_a_rule_that_is_too_much_is_told_from_one_that_is_somebody_elses(extra: Rule, where: str | None) -> None:
    wanted = declared(CLUSTER, "etude-")
    found = compare(wanted, [*wanted[1:], extra], "etude-")
    assert found.missing == (wanted[0],)
    assert {name for name in ("surplus", "others") if extra in getattr(found, name)} == ({where} if where else set())


def test_the_commands_name_every_rule_once() -> None:
    rules = declared(Cluster.parse("kafka://a:1/team"), "team-")
    found = []
    for line in topic_rules.commands(rules, CLUSTER):
        words = line.split()
        options = list(itertools.pairwise(words))
        user, operation = (next(v for k, v in options if k == key) for key in ("--allow-principal", "--operation"))
        prefixed = ("--resource-pattern-type", "prefixed") in options
        for kind, name in options:
            if kind in ("--topic", "--group"):
                found.append(Rule(user, kind[2:].upper(), name, operation.upper(), prefixed))
    assert sorted(found) == rules


def test_a_bus_that_is_a_file_has_no_rules_and_says_so(tmp_path: Path) -> None:
    done = CliRunner().invoke(topics.app, ["acl", "check", "--state", str(tmp_path)], env={"ETUDE_BUS": ""})
    assert (done.exit_code, "ETUDE_BUS" in done.output, "rules are Kafka's" in done.output) == (1, True, True)
    assert CliRunner().invoke(topics.app, ["acl", "show"], env={"ETUDE_BUS": ""}).exit_code == 0
    done = CliRunner().invoke(access.app, ["give", str(tmp_path / "keys")], env={"ETUDE_BUS": "", "ETUDE_OBJECTS": ""})
    assert (done.exit_code, "files have no users" in done.output) == (1, True)
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "set ETUDE_SECRET_CURATOR"),
        ({"ETUDE_SECRET_GREADER": "a" * 32}, "ETUDE_SECRET_GREADER: there is no such service"),
        ({"ETUDE_SECRET_GRADER": "short"}, "ETUDE_SECRET_GRADER: found 5 characters"),
        ({"ETUDE_SECRET_GRADER": "a" * 32}, "files have no users"),
    ],
)
def test_secrets_that_cannot_be_set_are_told_by_name_and_never_shown(given: dict[str, str], said: str) -> None:
    done = CliRunner().invoke(access.app, ["set"], env={"ETUDE_BUS": "", "ETUDE_OBJECTS": "", **given})
    assert (done.exit_code, said in done.output) == (1, True)
    assert not [secret for secret in given.values() if secret in done.output]


# Objects


def test_a_run_is_spelled_as_its_id_is_and_cannot_be_taken_for_a_part_of_one() -> None:
    run = ids.new_run_id()
    assert fnmatch.fnmatchcase(f"runs/{run}", object_rules.RUN)
    kinds = {
        object_rules.TRAJECTORIES: f"{ids.attempt_prefix(run, 'a-0', 2)}/trajectory-00.safetensors.zst",
        object_rules.VERDICTS: f"{ids.attempt_prefix(run, 'a-0', 2)}/verdict.json",
        object_rules.POLICIES: f"{ids.policy_prefix(run, 1)}/manifest.json",
        object_rules.CHECKPOINTS: f"{ids.checkpoint_prefix(run, 1, 2)}/manifest.json",
        object_rules.OPEN: ids.open_evaluation(run, "e-0"),
    }
    for pattern, key in kinds.items():
        assert [each for each in kinds if fnmatch.fnmatchcase(key, each)] == [pattern]
    for trap in ("policies/attempts/trajectory-/manifest.json", "x/attempts/a/0/trajectory-0", "policies/packs/x"):
        key = f"runs/{run}/{trap}"
        assert not [each for each in OBJECTS["rollout"].writes if fnmatch.fnmatchcase(key, each)]


@pytest.mark.parametrize("who", list(OBJECTS))
def test_a_policy_is_one_that_aws_takes(who: str) -> None:
    document = object_rules.policy(OBJECTS[who], "a-bucket-with-a-name-of-quite-some-length")
    assert len(json.dumps(document, separators=(",", ":"))) < POLICY
    for statement in document["Statement"]:
        assert (statement["Effect"], set(statement)) == ("Allow", {"Sid", "Effect", "Action", "Resource"})
        assert all(one.startswith("arn:aws:s3:::a-bucket-with") for one in statement["Resource"])
        assert "s3:*" not in statement["Action"]


def test_a_policy_is_printed_as_json_and_an_unknown_service_is_told_who_there_is() -> None:
    done = CliRunner().invoke(access.app, ["s3", "policy", "grader", "--bucket", "etude"])
    assert json.loads(done.output) == object_rules.policy(OBJECTS["grader"], "etude")
    done = CliRunner().invoke(access.app, ["s3", "policy", "greader", "--bucket", "etude"])
    assert (done.exit_code, "greader" in done.output, "grader" in done.output) == (2, True, True)
    done = CliRunner().invoke(access.app, ["s3", "policy", "grader"], env={"ETUDE_OBJECTS": ""})
    assert (done.exit_code, "ETUDE_OBJECTS" in done.output) == (1, True)


# The page


@pytest.mark.parametrize("rules", [topic_rules, object_rules], ids=["topics", "objects"])
def test_the_page_shows_what_is_declared(rules: object) -> None:
    rows = [rules.HEAD, *rules.overview()]  # type: ignore[attr-defined]
    lines = PAGE.read_text().splitlines()
    missing = [line for line in map(_line, rows) if line not in lines]
    assert not missing, "\n".join(missing)


def _line(row: tuple[str, ...]) -> str:
    first, *others = row
    return f"| {first if first in ('topic', 'keys') else f'`{first}`'} | " + " | ".join(others) + " |"


def test_the_command_is_registered() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'access = "etude.access:app"' in text


def test_who_only_asks_for_help_waits_for_no_client() -> None:
    """Kafka's and MinIO's take a while to import, and are extras that may be missing."""
    code = "import sys, etude.access, etude.topics; sys.exit(any(m in sys.modules for m in ('kafka', 'minio')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
