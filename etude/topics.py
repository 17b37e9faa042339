"""`etude topics`: the topics of a Kafka cluster, against their declaration in `shared.contracts.topics`.

Services make the topics that they need; on a cluster where they may not, an administrator applies them once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shared.bus import BusUnavailable, dead_letters
from shared.contracts.topics import TOPICS, Topic
from shared.settings import ServiceSettings

State = Annotated[Path, typer.Option("--state", help="Directory for everything local.", envvar="ETUDE_STATE")]

app = typer.Typer(no_args_is_help=True, help="Declare the topics of a Kafka cluster, or compare them.")
console = Console()


def wanted() -> list[Topic]:
    """Every topic, and every topic's dead letters."""
    return [topic for declared in TOPICS.values() for topic in (declared, dead_letters(declared))]


@app.command()
def check(state: State = Path(".etude")) -> None:
    """Compare partitions, copies, retention and compaction with the declaration. Exit code 1 when something differs."""
    _report(state, apply=False)


@app.command()
def apply(state: State = Path(".etude")) -> None:
    """Make what is missing, and set how many copies must have a message. What exists otherwise is told, never changed: other
    partitions would move keys, and a shorter retention deletes."""
    _report(state, apply=True)


def _report(state: Path, *, apply: bool) -> None:
    from shared.bus.kafka_admin import READY_WITHIN_MS, administration, differences, look, make, protect
    from shared.bus.kafka_cluster import Cluster

    url = ServiceSettings(state=state).bus_url
    if not url.startswith("kafka:"):
        console.print(
            "The embedded bus makes its topics as they are declared; nothing to do. (ETUDE_BUS names no Kafka.)"
        )
        return
    table = Table("topic", "found")
    try:
        cluster = Cluster.parse(url)
        with administration(cluster) as admin:
            found = look(admin, cluster, wanted())
            if apply:
                missing = [topic for topic in wanted() if topic.name not in found]
                make(admin, cluster, missing)
                if missing:
                    names = [cluster.physical(topic.name) for topic in missing]
                    admin.wait_for_topics(names, timeout_ms=READY_WITHIN_MS)
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
