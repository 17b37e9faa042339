"""`etude topics`: the topics of a Kafka cluster, and who may use them, against their declaration in `shared.contracts.topics`.

Services make the topics that they need; on a cluster where they may not, an administrator applies them once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from etude import topic_rules
from etude.topic_rules import Differences, Rule
from shared.bus import BusUnavailable, dead_letters
from shared.bus.kafka_cluster import Cluster
from shared.contracts.topics import TOPICS, Topic
from shared.settings import ServiceSettings, read, without_credentials

if TYPE_CHECKING:
    from kafka import KafkaAdminClient

State = Annotated[Path, typer.Option("--state", help="Directory for everything local.", envvar="ETUDE_STATE")]

Users = Annotated[
    str,
    typer.Option(
        "--users",
        help="What the names of the services' users begin with; left out: etude-, or the bus's PREFIX and a -.",
    ),
]

app = typer.Typer(no_args_is_help=True, help="Declare the topics of a Kafka cluster, or compare them.")
acl = typer.Typer(no_args_is_help=True, help="Who may use which topic and group: print it, compare it, set it.")
app.add_typer(acl, name="acl")
console = Console()


def wanted() -> list[Topic]:
    """Every topic, and every topic's dead letters."""
    return [topic for declared in TOPICS.values() for topic in (declared, dead_letters(declared))]


@app.command()
def check(state: State = Path(".etude")) -> None:
    """Compare partitions, copies and settings with the declaration. Exit code 1 when something differs."""
    _report(state, apply=False)


@app.command()
def apply(state: State = Path(".etude")) -> None:
    """Make what is missing, and set how many copies must have a message. What exists otherwise is told, never changed: other
    partitions would move keys, and a shorter retention deletes."""
    _report(state, apply=True)


def complete(admin: KafkaAdminClient, cluster: Cluster) -> list[Topic]:
    """Makes the topics that are missing. Returns them, when they can be used."""
    from shared.bus.kafka_admin import READY_WITHIN_MS, look, make

    there = look(admin, cluster, wanted())
    if missing := [topic for topic in wanted() if topic.name not in there]:
        make(admin, cluster, missing)
        admin.wait_for_topics([cluster.physical(topic.name) for topic in missing], timeout_ms=READY_WITHIN_MS)
    return missing


def _report(state: Path, *, apply: bool) -> None:
    from shared.bus.kafka_admin import administration, differences, look, protect

    url = read(ServiceSettings, state=state).bus_url
    if not url.startswith("kafka:"):
        console.print(
            "The embedded bus makes its topics as they are declared; nothing to do. (ETUDE_BUS names no Kafka.)"
        )
        return
    table = Table("topic", "found")
    try:
        cluster = Cluster.parse(url)
        with administration(cluster) as admin:
            if apply:
                if missing := complete(admin, cluster):
                    console.print(f"{len(missing)} topics made.")
                if changed := protect(admin, cluster, wanted()):
                    console.print(f"min.insync.replicas set of {changed} topics.")
            found = look(admin, cluster, wanted())
    except (BusUnavailable, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    for topic in wanted():
        if wrong := differences(topic, found.get(topic.name), cluster.replication):
            table.add_row(topic.name, "; ".join(wrong))
    if table.row_count:
        console.print(table)
        raise typer.Exit(1)
    console.print(f"{len(wanted())} topics are as declared.")


@acl.command()
def show() -> None:
    """Print who does what with which topic."""
    table = Table(Column(topic_rules.HEAD[0], no_wrap=True), *topic_rules.HEAD[1:])
    for row in topic_rules.overview():
        table.add_row(*row)
    console.print(table)
    console.print(
        "Who reads as a group writes the dead letters of the topic. `dlq` (etude dlq) reads all dead letters and writes every "
        "topic; `scaler` counts for every group."
    )


@acl.command(name="commands")
def commands_(state: State = Path(".etude"), users: Users = "") -> None:
    """Print the rules as calls of kafka-acls.sh."""
    cluster = _cluster(state)
    for line in topic_rules.commands(_declared(cluster, users), cluster):
        typer.echo(line)


@acl.command(name="check")
def check_acl(state: State = Path(".etude"), users: Users = "") -> None:
    """Compare the cluster's rules with the declaration. Exit code 1 when one is missing or too much."""
    with _administration(state) as (admin, cluster):
        if not _tell(_compare(admin, cluster, users), len(_declared(cluster, users))):
            raise typer.Exit(1)


@acl.command(name="apply")
def apply_acl(
    state: State = Path(".etude"),
    users: Users = "",
    remove: Annotated[
        bool, typer.Option("--remove", help="Also remove what these users may beyond the declaration.")
    ] = False,
) -> None:
    """Make the rules that are missing. Rules of other users stay as they are, in any case."""
    from shared.bus.kafka_admin import told

    with _administration(state) as (admin, cluster):
        differ = _compare(admin, cluster, users)
        topic_rules.make(admin, cluster, differ.missing)
        console.print(f"{len(differ.missing)} rules made.")
        ours = [rule for rule in differ.surplus if rule.user != topic_rules.EVERYBODY] if remove else []
        if remove:
            topic_rules.remove(admin, cluster, ours)
            console.print(f"{len(ours)} rules removed.")
        told(lambda: not (now := _compare(admin, cluster, users)).missing and not set(ours) & set(now.surplus))
        if not _tell(_compare(admin, cluster, users), len(_declared(cluster, users))):
            raise typer.Exit(1)


def _declared(cluster: Cluster, users: str) -> list[Rule]:
    return topic_rules.declared(cluster, users or topic_rules.users_of(cluster))


def _compare(admin: KafkaAdminClient, cluster: Cluster, users: str) -> Differences:
    begin = users or topic_rules.users_of(cluster)
    return topic_rules.compare(topic_rules.declared(cluster, begin), topic_rules.look(admin, cluster), begin)


def _tell(differ: Differences, declared: int) -> bool:
    """Says what differs; whether nothing does."""
    for what, found in (("missing", differ.missing), ("too much", differ.surplus), ("of others", differ.others)):
        for rule in found:
            typer.echo(f"{what}: {rule}")
    if differ:
        typer.echo(f"{len(differ.missing)} rules are missing, {len(differ.surplus)} are too much.", err=True)
    else:
        typer.echo(f"{declared} rules are as declared.")
    return not differ


def _cluster(state: Path) -> Cluster:
    """Of a bus that is a file: one that is nowhere, without a prefix. Ends the command where the URL is none."""
    url = read(ServiceSettings, state=state).bus_url
    try:
        return Cluster.parse(url if url.startswith("kafka:") else "kafka://KAFKA:9092")
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


@contextmanager
def _administration(state: Path) -> Iterator[tuple[KafkaAdminClient, Cluster]]:
    """Ends the command with a text where the cluster cannot be had."""
    from shared.bus.kafka_admin import administration

    found = read(ServiceSettings, state=state).bus_url
    if not found.startswith("kafka:"):
        typer.echo(
            f"bus (ETUDE_BUS): found {without_credentials(found)!r}, which has no users; rules are Kafka's", err=True
        )
        raise typer.Exit(1)
    cluster = _cluster(state)
    try:
        with administration(cluster) as admin:
            yield admin, cluster
    except BusUnavailable as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
