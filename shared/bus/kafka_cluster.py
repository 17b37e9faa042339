"""Which Kafka, as whom, under which names: everything that a URL of the bus says. Pure.

`kafka://[USER:PASSWORD@]HOST:PORT[,HOST:PORT…][/PREFIX][?tls=1&instance=NAME]`. USER and PASSWORD (percent-encoded where
needed) log in by SASL/SCRAM-SHA-512. PREFIX stands before the name of every topic and group, so that several platforms share a
cluster. NAME is this replica's own and stays the same over its restarts (a stateful set's pod name, say): its partitions wait
for it, a session's time at most, instead of moving to the others and back (static membership). Two replicas of one name would
fence each other.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import xxhash

from shared.settings import without_credentials

# How long a client looks for its first broker, and how it comes back to one that was away. A longer pause would add to
# every outage; without one, a hundred consumers would hammer a broker that is starting.
FIRST_CONTACT_MS = 10_000
RECONNECT_MS, RECONNECT_MAX_MS = 50, 2_000
SERVER = r"[\w.-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}"
NAME = r"[A-Za-z0-9._-]{1,60}"
URL = re.compile(
    r"kafka://(?:(?P<user>[^:@/]+):(?P<password>[^@/]+)@)?"
    rf"(?P<servers>(?:{SERVER})(?:,(?:{SERVER}))*)(?:/(?P<prefix>[\w-]+))?/?"
    rf"(?:\?(?:tls=(?P<tls>[01])(?:&instance=(?P<instance>{NAME}))?|instance=(?P<alone>{NAME})))?"
)

# The client tells of every connection that fails, several lines a second while a broker is away. What matters of it
# reaches our callers as errors, and our log once for each.
logging.getLogger("kafka").propagate = False
logging.getLogger("kafka").addHandler(logging.NullHandler())
ALLOWED = "kafka://[USER:PASSWORD@]HOST:PORT[,HOST:PORT][/PREFIX][?tls=1&instance=NAME]"


@dataclass(frozen=True, slots=True)
class Cluster:
    servers: tuple[str, ...]
    prefix: str = ""  # with its dot, or empty
    user: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    instance: str = ""

    @classmethod
    def parse(cls, url: str) -> Cluster:
        """Raises ValueError. The text shows no password."""
        match = URL.fullmatch(url)
        if not match:
            raise ValueError(f"bus (ETUDE_BUS): found {without_credentials(url)!r}; allowed: {ALLOWED}")
        return cls(
            servers=tuple(match["servers"].split(",")),
            prefix=f"{match['prefix']}." if match["prefix"] else "",
            user=unquote(match["user"] or ""),
            password=unquote(match["password"] or ""),
            tls=match["tls"] == "1",
            instance=match["instance"] or match["alone"] or "",
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
                "sasl_mechanism": "SCRAM-SHA-512",
                "sasl_plain_username": self.user,
                "sasl_plain_password": self.password,
            }
        return options

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
