"""The rules of a Kafka cluster (ACLs) that follow from `shared.contracts.topics.ACCESS`, and what a cluster has instead.

Invariants
- A rule allows one user one operation on one topic or group, from anywhere. Whatever is not allowed is refused: there is no
  rule that forbids, and none for the making of topics, for configurations or for the cluster.
- To read or write includes to describe; such a rule is not doubled.
- What somebody else made for users that are not ours is looked at, never touched.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.bus import BusUnavailable, dead_letters
from shared.bus.kafka_cluster import Cluster
from shared.contracts.topics import ACCESS, TOPICS, Access, Topic

if TYPE_CHECKING:
    from kafka import KafkaAdminClient
    from kafka.admin import ACL

USERS = "etude-"  # what the names of our users begin with, where the platform has no prefix
EVERYBODY = "User:*"
ANYTHING = "*"  # a resource's name that stands for all of its kind, in Kafka
TOLD_WITHIN_S, LOOK_S = 10.0, 0.1  # until a broker has heard of new rules: milliseconds, on a busy machine more


@dataclass(frozen=True, slots=True, order=True)
class Rule:
    """`kind`, `operation`, `permission` as Kafka names them, in capitals. `prefixed`: `name` is how names begin."""

    user: str  # "User:NAME"
    kind: str
    name: str
    operation: str
    prefixed: bool = False
    permission: str = "ALLOW"
    host: str = ANYTHING

    def __str__(self) -> str:
        where = "" if self.host == ANYTHING else f" from {self.host}"
        whom = self.user.removeprefix("User:")
        may = "may" if self.permission == "ALLOW" else "must not"
        what = f"{self.name}…" if self.prefixed else self.name
        return f"{whom} {may} {self.operation.lower()} {self.kind.lower()} {what}{where}"

    def covers(self, kind: str, name: str) -> bool:
        """Whether it is about this topic or group."""
        if self.kind != kind:
            return False
        return name.startswith(self.name) if self.prefixed else self.name in (name, ANYTHING)


def users_of(cluster: Cluster) -> str:
    """What the names of a platform's users begin with: platforms that share a cluster share no user."""
    return f"{cluster.prefix.removesuffix('.')}-" if cluster.prefix else USERS


def declared(cluster: Cluster, users: str = USERS, access: Mapping[str, Access] = ACCESS) -> list[Rule]:
    """Every rule that a cluster must have, sorted. `users`: what comes before a service's name in that of its user."""
    found = {rule for who, one in access.items() for rule in _of(f"User:{users}{who}", one, cluster)}
    implied = {(r.user, r.kind, r.name, r.prefixed) for r in found if r.operation != "DESCRIBE"}
    return sorted(r for r in found if r.operation != "DESCRIBE" or (r.user, r.kind, r.name, r.prefixed) not in implied)


def _of(user: str, access: Access, cluster: Cluster) -> Iterator[Rule]:
    letters = [dead_letters(topic) for topic in access.taken if not topic.holds_letters]
    for operation, topics in (
        ("WRITE", [*access.writes, *letters]),
        ("READ", [*access.hears, *access.taken]),
        ("DESCRIBE", [topic for counted in access.counts.values() for topic in counted]),
    ):
        for topic in topics:
            yield Rule(user, "TOPIC", cluster.physical(topic.name), operation)
    for operation, groups in (("READ", access.takes), ("DESCRIBE", access.counts)):
        for group in groups:
            yield Rule(user, "GROUP", cluster.physical(group), operation, prefixed=group.endswith("."))


def commands(rules: Iterable[Rule], cluster: Cluster) -> list[str]:
    """The same as calls of Kafka's own program, one for each user, operation and kind of name."""
    together: dict[tuple[str, str, str, bool], list[str]] = {}
    for rule in rules:
        together.setdefault((rule.user, rule.operation, rule.kind, rule.prefixed), []).append(rule.name)
    begin = f"kafka-acls.sh --bootstrap-server {','.join(cluster.servers)} --command-config admin.properties --add"
    lines = []
    for (user, operation, kind, prefixed), names in sorted(together.items()):
        line = f"{begin} --allow-principal {user} --operation {operation.capitalize().replace('_', '')}"
        line += "".join(f" --{kind.lower()} {shlex.quote(name)}" for name in sorted(names))
        lines.append(line + (" --resource-pattern-type prefixed" if prefixed else ""))
    return lines


HEAD = ("topic", "writes", "reads all", "reads as a group", "counts")
EVERYWHERE = ("dlq", "scaler")  # left out of the overview: their names would stand in each of its cells


def overview(access: Mapping[str, Access] = ACCESS) -> list[tuple[str, ...]]:
    """A line for each topic, as HEAD: its name, and who does what with it."""
    ways: tuple[Callable[[Access], Iterable[Topic]], ...] = (
        lambda one: one.writes,
        lambda one: one.hears,
        lambda one: one.taken,
        lambda one: [topic for topics in one.counts.values() for topic in topics],
    )
    some = {who: one for who, one in access.items() if who not in EVERYWHERE}
    return [
        (topic.name, *(", ".join(who for who, one in some.items() if topic in way(one)) for way in ways))
        for topic in TOPICS.values()
    ]


@dataclass(frozen=True, slots=True)
class Differences:
    """`missing`: declared and not there. `surplus`: there and not declared, of our users or of everybody. `others`: of
    somebody else, on topics or groups of ours; they are nobody's business but the administrator's."""

    missing: tuple[Rule, ...]
    surplus: tuple[Rule, ...]
    others: tuple[Rule, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.surplus)


def compare(wanted: Iterable[Rule], found: Iterable[Rule], users: str = USERS) -> Differences:
    wanted, found = set(wanted), set(found)
    # Of another platform they would have a `-`: its users begin otherwise, and perhaps with the same letters.
    mine = re.compile(re.escape(f"User:{users}") + "[a-z]+")
    extra = sorted(found - wanted)
    surplus = [rule for rule in extra if mine.fullmatch(rule.user) or (rule.user == EVERYBODY and _meets(rule, wanted))]
    others = [rule for rule in extra if rule not in surplus and _meets(rule, wanted)]
    return Differences(tuple(sorted(wanted - found)), tuple(surplus), tuple(others))


def _meets(rule: Rule, wanted: Iterable[Rule]) -> bool:
    """Whether it is about a topic or group of ours, or about part of those that a prefix of ours stands for."""
    return any(rule.covers(one.kind, one.name) or (one.prefixed and one.covers(rule.kind, rule.name)) for one in wanted)


# On a cluster. Each of these raises BusUnavailable.


def look(admin: KafkaAdminClient, cluster: Cluster) -> list[Rule]:
    """Every rule for a user on the cluster, whoever's."""
    from kafka.admin import (
        ACLFilter,
        ACLOperation,
        ACLPermissionType,
        ACLResourcePatternType,
        ResourcePatternFilter,
        ResourceType,
    )

    every = ResourcePatternFilter(ResourceType.ANY, None, ACLResourcePatternType.ANY)
    with explained(cluster, "look at rules (Describe on the cluster)"):
        found, _ = admin.describe_acls(ACLFilter(None, None, ACLOperation.ANY, ACLPermissionType.ANY, every))
    return sorted(_rule(acl) for acl in found)


def make(admin: KafkaAdminClient, cluster: Cluster, rules: Iterable[Rule]) -> None:
    wanted = list(rules)
    if not wanted:
        return
    with explained(cluster, "make rules (Alter on the cluster)"):
        answer = admin.create_acls([_acl(rule) for rule in wanted])
        if answer["failed"]:
            raise answer["failed"][0]("some rules were not made")
        _await(admin, cluster, lambda found: found >= set(wanted))


def remove(admin: KafkaAdminClient, cluster: Cluster, rules: Iterable[Rule]) -> None:
    from kafka.admin import ACLFilter, ResourcePatternFilter
    from kafka.errors import NoError

    unwanted = list(rules)
    if not unwanted:
        return
    with explained(cluster, "remove rules (Alter on the cluster)"):
        filters = []
        for rule in unwanted:
            acl = _acl(rule)
            at = acl.resource_pattern
            exactly = ResourcePatternFilter(at.resource_type, at.resource_name, at.pattern_type)
            filters.append(ACLFilter(acl.principal, acl.host, acl.operation, acl.permission_type, exactly))
        for _, _, error in admin.delete_acls(filters):
            if error is not NoError:
                raise error("some rules were not removed")
        _await(admin, cluster, lambda found: not found & set(unwanted))


def _await(admin: KafkaAdminClient, cluster: Cluster, there: Callable[[set[Rule]], bool]) -> None:
    until = time.monotonic() + TOLD_WITHIN_S
    while not there(set(look(admin, cluster))):
        if time.monotonic() > until:
            raise BusUnavailable(
                f"bus (ETUDE_BUS): {cluster} has taken new rules and does not show them after {TOLD_WITHIN_S:.0f} s; "
                "`etude topics acl check` says how they stand"
            )
        time.sleep(LOOK_S)


@contextlib.contextmanager
def explained(cluster: Cluster, what: str) -> Iterator[None]:
    from kafka.errors import ClusterAuthorizationFailedError, SecurityDisabledError

    try:
        yield
    except SecurityDisabledError:
        raise BusUnavailable(
            f"bus (ETUDE_BUS): {cluster} keeps no rules: its brokers' authorizer.class.name is empty. Way out: "
            "org.apache.kafka.metadata.authorizer.StandardAuthorizer there, with super.users (docs/access.md)"
        ) from None
    except ClusterAuthorizationFailedError:
        raise BusUnavailable(
            f"bus (ETUDE_BUS): user {cluster.user!r} may not {what} on {cluster}; call this as one of its super.users, or as "
            "somebody who may"
        ) from None


def _acl(rule: Rule) -> ACL:
    from kafka.admin import (
        ACL,
        ACLOperation,
        ACLPermissionType,
        ACLResourcePatternType,
        ResourcePattern,
        ResourceType,
    )

    how = ACLResourcePatternType.PREFIXED if rule.prefixed else ACLResourcePatternType.LITERAL
    at = ResourcePattern(ResourceType[rule.kind], rule.name, how)
    return ACL(rule.user, rule.host, ACLOperation[rule.operation], ACLPermissionType[rule.permission], at)


def _rule(acl: ACL) -> Rule:
    at = acl.resource_pattern
    return Rule(
        user=acl.principal,
        kind=at.resource_type.name,
        name=at.resource_name,
        operation=acl.operation.name,
        prefixed=at.pattern_type.name == "PREFIXED",
        permission=acl.permission_type.name,
        host=acl.host,
    )
