"""`etude access`: a user and an object key of its own for every service, with what it needs and no more.

What each may do is declared: with topics in `shared.contracts.topics.ACCESS`, with objects in `etude.object_rules.OBJECTS`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from etude import object_rules, topic_rules
from etude.object_keys import Bucket
from etude.object_rules import OBJECTS
from etude.topics import Users, complete
from shared import objects as stores
from shared.bus.kafka_cluster import MECHANISMS, Cluster
from shared.contracts.topics import ACCESS, Access
from shared.settings import ServiceSettings, Told, read

if TYPE_CHECKING:
    from kafka import KafkaAdminClient

State = Annotated[Path, typer.Option("--state", help="Directory for everything local.", envvar="ETUDE_STATE")]
app = typer.Typer(
    no_args_is_help=True, help="A user and an object key of its own for every service.", pretty_exceptions_enable=False
)
s3 = typer.Typer(
    no_args_is_help=True, help="What each service's key may do with objects: print it, compare it, set it."
)
app.add_typer(s3, name="s3")
console = Console()


@s3.command()
def show() -> None:
    """Print who reads, writes and deletes which keys."""
    table = Table(Column(object_rules.HEAD[0], no_wrap=True), *object_rules.HEAD[1:])
    for row in object_rules.overview():
        table.add_row(*row)
    console.print(table)
    console.print("Everybody sees the names of all objects; `cli` (etude start, export, …) reads all of them.")


@s3.command()
def policy(
    who: Annotated[str, typer.Argument(metavar="SERVICE", help=f"One of {', '.join(OBJECTS)}.")],
    bucket: Annotated[str, typer.Option(help="The bucket's name; left out: the one of ETUDE_OBJECTS.")] = "",
    state: State = Path(".etude"),
) -> None:
    """Print a service's policy, as AWS and MinIO take it."""
    if who not in OBJECTS:
        raise typer.BadParameter(f"found {who!r}; allowed: {', '.join(OBJECTS)}")
    with _told():
        name = bucket or Bucket.parse(read(ServiceSettings, state=state)).name
    typer.echo(json.dumps(object_rules.policy(OBJECTS[who], name), indent=2))


@s3.command()
def check(state: State = Path(".etude"), users: Users = "") -> None:
    """Compare MinIO's policies and users with the declaration. Exit code 1 when something differs."""
    with _told():
        settings = read(ServiceSettings, state=state)
        wrong = Bucket.parse(settings).differences(_users(settings, users))
    for line in wrong:
        typer.echo(line)
    if wrong:
        raise typer.Exit(1)
    typer.echo(f"{len(OBJECTS)} keys have their policies.")


@s3.command()
def apply(state: State = Path(".etude"), users: Users = "") -> None:
    """Set MinIO's policies, and give each to its user where that is there (`etude access give` makes them)."""
    with _told():
        settings = read(ServiceSettings, state=state)
        bucket, begin = Bucket.parse(settings), _users(settings, users)
        given = bucket.apply(begin)
        missing = [f"{begin}{who}" for who in OBJECTS if who not in given]
    typer.echo(f"{len(OBJECTS)} policies set, {len(given)} users have theirs.")
    if missing:
        typer.echo(f"no such users yet: {', '.join(missing)}")


Known = Mapping[str, Mapping[str, str]]  # by service, variables
SECRET = "ETUDE_SECRET_"  # and a service's name in capitals
SHORTEST = 8  # characters of a secret that MinIO takes


class Refused(Told, ValueError):
    """Nothing was made; the text says what stands in the way."""


@app.command()
def give(
    folder: Annotated[Path, typer.Argument(help="Where `SERVICE.env` of each service lies, or will lie.")],
    state: State = Path(".etude"),
    users: Users = "",
    renew: Annotated[
        bool, typer.Option("--renew", help="New secrets for all; who runs with the old ones is locked out.")
    ] = False,
) -> None:
    """Make a Kafka user and a MinIO key for every service, with the rules and policies of each, and write what it needs to log
    in to FOLDER/SERVICE.env. Secrets that lie there are kept. The settings must be an administrator's."""
    with _told():
        settings = read(ServiceSettings, state=state)
        begin = _users(settings, users)
        known = {} if renew else {path.stem: _read(path) for path in folder.glob("*.env")}
        variables: dict[str, dict[str, str]] = {}
        with_bus, with_objects = _with(settings)
        if with_bus:
            _add(variables, _bus_secrets(settings.bus_url, begin, known, renew))
        if with_objects:
            _add(variables, _object_secrets(settings, begin, known, renew))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for who, of in variables.items():  # before anything is made: a secret that only a server knew would be lost
            _write(folder / f"{who}.env", of)
        if with_bus:
            urls = {who: of["ETUDE_BUS"] for who, of in variables.items() if "ETUDE_BUS" in of}
            passwords = {who: Cluster.parse(url).password for who, url in urls.items()}
            _give_bus(Cluster.parse(settings.bus_url), begin, passwords)
        if with_objects:
            _give_objects(settings, begin, {who: variables[who]["ETUDE_S3_SECRET_KEY"] for who in OBJECTS})
    typer.echo(f"{len(variables)} files in {folder}, for your eyes only.")


@app.command(name="set")
def set_(state: State = Path(".etude"), users: Users = "") -> None:
    """Make a Kafka user and a MinIO key for every service whose secret the variable ETUDE_SECRET_SERVICE holds, the rules and
    policies of each, and the topics and the bucket that are missing. What differs is set anew, secrets too, and what our users
    may beyond the declaration is taken back. Writes no file. The settings must be an administrator's."""
    with _told():
        settings = read(ServiceSettings, state=state)
        begin, given = _users(settings, users), _named(os.environ)
        with_bus, with_objects = _with(settings)
        if with_bus:
            cluster = Cluster.parse(settings.bus_url)
            made = _set_bus(cluster, begin, {who: secret for who, secret in given.items() if who in _on_bus()})
            typer.echo(f"{cluster}: {made} topics made; users, rules and secrets are as declared.")
        if with_objects:
            _give_objects(settings, begin, {who: secret for who, secret in given.items() if who in OBJECTS})
            typer.echo(f"{settings.objects_url}: keys, policies and secrets are as declared.")
    typer.echo(f"set: {', '.join(given)}")


def _named(environment: Mapping[str, str]) -> dict[str, str]:
    """By service, the secret that its variable holds. Raises Refused."""
    known = {f"{SECRET}{who.upper()}": who for who in {**ACCESS, **OBJECTS}}
    found = {name: value for name, value in sorted(environment.items()) if name.startswith(SECRET)}
    if unknown := [name for name in found if name not in known]:
        raise Refused(f"{unknown[0]}: there is no such service; allowed: {', '.join(known)}")
    if short := [name for name, value in found.items() if len(value) < SHORTEST]:
        raise Refused(f"{short[0]}: found {len(found[short[0]])} characters; allowed: {SHORTEST} and more")
    if not found:
        raise Refused(f"found no secret; set {', '.join(known)}, or those of them that are needed")
    return {known[name]: value for name, value in found.items()}


def _with(settings: ServiceSettings) -> tuple[bool, bool]:
    """Whether the bus and the objects have users. Raises Refused where neither has."""
    with_bus, with_objects = settings.bus_url.startswith("kafka:"), settings.objects_url.startswith("s3:")
    if not with_bus and not with_objects:
        raise Refused("neither ETUDE_BUS names a Kafka nor ETUDE_OBJECTS an S3: files have no users")
    if with_bus and with_objects and not Cluster.parse(settings.bus_url).user:
        typer.echo(
            "bus (ETUDE_BUS): found no login, so its users have no names; object keys alone are given.", err=True
        )
        with_bus = False
    return with_bus, with_objects


def _add(variables: dict[str, dict[str, str]], more: Mapping[str, dict[str, str]]) -> None:
    for who, of in more.items():
        variables.setdefault(who, {}).update(of)


def _bus_secrets(url: str, begin: str, known: Known, renew: bool) -> dict[str, dict[str, str]]:
    from shared.bus.kafka_admin import administration

    cluster = Cluster.parse(url)
    if not cluster.user or not cluster.mechanism.startswith("SCRAM"):
        raise Refused(
            f"bus (ETUDE_BUS): found {f'a login by {cluster.mechanism}' if cluster.user else 'no login'}; users are made by "
            "SCRAM-SHA-512 or SCRAM-SHA-256 alone: have them made where your cluster keeps them, then `etude topics acl apply`"
        )
    who_uses = _on_bus()
    there = {
        who: Cluster.parse(known[who]["ETUDE_BUS"]).password for who in who_uses if "ETUDE_BUS" in known.get(who, {})
    }
    with administration(cluster) as admin:
        topic_rules.look(admin, cluster)  # who may not look at rules may not look at users, and is told so here alone
        on_it = {user for user, one in admin.describe_user_scram_credentials().items() if one["credential_infos"]}
    _refuse_known(
        [f"{begin}{who}" for who in who_uses if who not in there and f"{begin}{who}" in on_it], "Kafka", renew
    )
    return {
        who: {"ETUDE_BUS": re.sub("//.*@", f"//{begin}{who}:{there.get(who) or secrets.token_hex(16)}@", url, count=1)}
        for who in who_uses
    }


def _on_bus() -> list[str]:
    """Who uses the bus at all."""
    return [who for who, access in ACCESS.items() if access != Access()]


def _give_bus(cluster: Cluster, begin: str, passwords: Mapping[str, str]) -> None:
    from shared.bus.kafka_admin import administration

    with administration(cluster) as admin:
        _make_users(admin, cluster, begin, passwords)
        rules = topic_rules.declared(cluster, begin)
        topic_rules.make(admin, cluster, topic_rules.compare(rules, topic_rules.look(admin, cluster), begin).missing)


def _set_bus(cluster: Cluster, begin: str, passwords: Mapping[str, str]) -> int:
    """How many topics were made."""
    from shared.bus.kafka_admin import administration

    with administration(cluster) as admin:
        differ = topic_rules.compare(topic_rules.declared(cluster, begin), topic_rules.look(admin, cluster), begin)
        topic_rules.remove(admin, cluster, [rule for rule in differ.surplus if rule.user != topic_rules.EVERYBODY])
        topic_rules.make(admin, cluster, differ.missing)
        _make_users(admin, cluster, begin, passwords)
        return len(complete(admin, cluster))


def _make_users(admin: KafkaAdminClient, cluster: Cluster, begin: str, passwords: Mapping[str, str]) -> None:
    """Services log in by SCRAM; an administrator whom the brokers' own configuration names may do so by PLAIN."""
    from kafka.admin import UserScramCredentialUpsertion

    mechanism = cluster.mechanism if cluster.mechanism.startswith("SCRAM") else MECHANISMS[0]
    wanted = [UserScramCredentialUpsertion(f"{begin}{who}", mechanism, secret) for who, secret in passwords.items()]
    with topic_rules.explained(cluster, "make users (Alter on the cluster)"):
        failed = {user: why for user, why in admin.alter_user_scram_credentials(wanted).items() if why}
    if failed:
        raise Refused(f"bus (ETUDE_BUS): {cluster} makes no user {', '.join(failed)}: {next(iter(failed.values()))}")


def _object_secrets(settings: ServiceSettings, begin: str, known: Known, renew: bool) -> dict[str, dict[str, str]]:
    secret_of = {who: known.get(who, {}).get("ETUDE_S3_SECRET_KEY", "") for who in OBJECTS}
    on_it = Bucket.parse(settings).users()
    _refuse_known(
        [f"{begin}{who}" for who in OBJECTS if not secret_of[who] and f"{begin}{who}" in on_it], "MinIO", renew
    )
    return {
        who: {
            "ETUDE_OBJECTS": settings.objects_url,
            "ETUDE_S3_ACCESS_KEY": f"{begin}{who}",
            "ETUDE_S3_SECRET_KEY": secret or secrets.token_hex(16),
        }
        for who, secret in secret_of.items()
    }


def _give_objects(settings: ServiceSettings, begin: str, secret_of: Mapping[str, str]) -> None:
    stores.connect(settings.objects_url)  # makes the bucket, which no service may
    bucket = Bucket.parse(settings)
    for who, secret in secret_of.items():
        bucket.give(f"{begin}{who}", secret)
    bucket.apply(begin)


def _refuse_known(names: list[str], server: str, renew: bool) -> None:
    if names and not renew:
        raise Refused(
            f"{server} knows {', '.join(names)} already, and the folder has no secret of theirs: give the folder that has, or "
            "--renew, which locks out whoever runs with the old ones"
        )


def _read(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line and line[0] != "#")


def _write(path: Path, variables: Mapping[str, str]) -> None:
    """Whole or not at all; for this user's eyes only."""
    temporary = path.with_suffix(".tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.writelines(f"{name}={value}\n" for name, value in variables.items())
    temporary.replace(path)


def _users(settings: ServiceSettings, users: str) -> str:
    if users or not settings.bus_url.startswith("kafka:"):
        return users or topic_rules.USERS
    return topic_rules.users_of(Cluster.parse(settings.bus_url))


@contextmanager
def _told() -> Iterator[None]:
    """Ends the command with a text, and exit code 1, where something stands in the way."""
    try:
        yield
    except (Told, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
