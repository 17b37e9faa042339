"""Which Kafka, as whom, under which names: everything that a URL of the bus says. Pure, but for a look whether files are there.

`kafka://[USER:PASSWORD@]HOST:PORT[,HOST:PORT…][/PREFIX][?NAME=VALUE&…]`. USER and PASSWORD (percent-encoded where needed) log
in by SASL. PREFIX stands before the name of every topic and group, so that several platforms share a cluster. Then, each at
most once, values percent-encoded where needed:

- `tls=1`: encrypted. `ca=FILE`: the authorities that vouch for the brokers, instead of the system's. `certificate=FILE` and
  `key=FILE`: ours, where the brokers ask for one (PEM; without `key` it lies in the file of the certificate).
- `mechanism=`: of the login; SCRAM-SHA-512 where nothing is said.
- `instance=`: this replica's own name, the same over its restarts (a stateful set's pod name, say): its partitions wait for
  it, a session's time at most, instead of moving to the others and back (static membership). Two replicas of one name would
  fence each other.
- `replication=`: copies of every topic that is made; the brokers' default where nothing is said.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import xxhash

from shared.settings import without_credentials

# How long a client looks for its first broker, and how it comes back to one that was away. A longer pause would add to
# every outage; without one, a hundred consumers would hammer a broker that is starting.
FIRST_CONTACT_MS = 10_000
RECONNECT_MS, RECONNECT_MAX_MS = 50, 2_000
SERVER = r"[\w.-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}"
URL = re.compile(
    r"kafka://(?:(?P<user>[^:@/]+):(?P<password>[^@/]+)@)?"
    rf"(?P<servers>(?:{SERVER})(?:,(?:{SERVER}))*)(?:/(?P<prefix>[\w-]+))?/?(?:\?(?P<query>.+))?"
)
MECHANISMS = ("SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN")
FILES = ("ca", "certificate", "key")
PARAMETERS = {  # pattern, and in words
    "tls": (r"[01]", "0, 1"),
    "mechanism": ("|".join(MECHANISMS), ", ".join(MECHANISMS)),
    "instance": (r"[A-Za-z0-9._-]{1,60}", "1 to 60 of A-Z a-z 0-9 . _ -"),
    "replication": (r"[1-9][0-9]?", "1 to 99"),
    **dict.fromkeys(FILES, (r"(?s:.+)", "the path of a file")),
}

# The client tells of every connection that fails, several lines a second while a broker is away. What matters of it
# reaches our callers as errors, and our log once for each.
logging.getLogger("kafka").propagate = False
logging.getLogger("kafka").addHandler(logging.NullHandler())
ALLOWED = "kafka://[USER:PASSWORD@]HOST:PORT[,HOST:PORT][/PREFIX][?tls=1&instance=NAME&…]"


@dataclass(frozen=True, slots=True)
class Cluster:
    servers: tuple[str, ...]
    prefix: str = ""  # with its dot, or empty
    user: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    instance: str = ""
    mechanism: str = MECHANISMS[0]
    ca: str = ""
    certificate: str = ""
    key: str = ""
    replication: int = -1  # -1: the brokers' default

    @classmethod
    def parse(cls, url: str) -> Cluster:
        """Raises ValueError, also for a file that is not there. The text shows no password."""
        match = URL.fullmatch(url)
        if not match:
            raise ValueError(f"bus (ETUDE_BUS): found {without_credentials(url)!r}; allowed: {ALLOWED}")
        said = _parameters(match["query"] or "")
        if "mechanism" in said and not match["user"]:
            raise ValueError("bus (ETUDE_BUS): mechanism= is of a login, and the URL has no USER:PASSWORD@")
        return cls(
            servers=tuple(match["servers"].split(",")),
            prefix=f"{match['prefix']}." if match["prefix"] else "",
            user=unquote(match["user"] or ""),
            password=unquote(match["password"] or ""),
            tls=said.pop("tls", "0") == "1",
            replication=int(said.pop("replication", "-1")),
            **said,
        )

    def options(self) -> dict[str, Any]:
        """For every client of kafka-python."""
        options: dict[str, Any] = {
            "bootstrap_servers": list(self.servers),
            "bootstrap_timeout_ms": FIRST_CONTACT_MS,
            "reconnect_backoff_ms": RECONNECT_MS,
            "reconnect_backoff_max_ms": RECONNECT_MAX_MS,
            "security_protocol": ("SASL_" if self.user else "") + ("SSL" if self.tls else "PLAINTEXT"),
        }
        if self.user:
            options |= {
                "sasl_mechanism": self.mechanism,
                "sasl_plain_username": self.user,
                "sasl_plain_password": self.password,
            }
        files = {"ssl_cafile": self.ca, "ssl_certfile": self.certificate, "ssl_keyfile": self.key}
        return options | {name: path for name, path in files.items() if path}

    def member(self, topics: Iterable[str]) -> str | None:
        """The static name of the consumer of these topics; None: it is a new member every time."""
        if not self.instance:
            return None
        return f"{self.instance}.{xxhash.xxh3_64_hexdigest(' '.join(sorted(topics)).encode())}"

    def physical(self, name: str) -> str:
        """The cluster's name of one of our topics or groups."""
        return self.prefix + name

    def __str__(self) -> str:
        return f"kafka {','.join(self.servers)}"


def _parameters(query: str) -> dict[str, Any]:
    """Raises ValueError."""
    said: dict[str, Any] = {}
    for pair in query.split("&") if query else []:
        name, _, value = pair.partition("=")
        value = unquote(value)
        where = f"bus (ETUDE_BUS): parameter {name!r}"
        if name not in PARAMETERS:
            raise ValueError(f"{where}; allowed: {', '.join(PARAMETERS)}")
        if name in said:
            raise ValueError(f"{where} comes twice")
        pattern, words = PARAMETERS[name]
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{where}: found {value!r}; allowed: {words}")
        if name in FILES and not Path(value).is_file():
            raise ValueError(f"{where}: there is no file {value!r}")
        said[name] = value
    for name, needed in (("ca", "tls"), ("certificate", "tls"), ("key", "certificate")):
        if name in said and said.get(needed, "0") == "0":
            raise ValueError(f"bus (ETUDE_BUS): parameter {name!r} says nothing without {needed!r}")
    return said
