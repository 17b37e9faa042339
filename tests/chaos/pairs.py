"""Servers in pairs. An address leads to the first of a pair, until it fails over to the second in the middle of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import psycopg
from redis import Redis

from infra.servers import fleet, state
from infra.servers.place import Place
from infra.servers.ports import free_ports
from infra.servers.postgres import Postgres
from tests.address import Address
from tests.patience import patient, until


class Pair:
    """Two servers of one kind, in a folder of their own. `variables`: services that use them find the one that serves now."""

    name = ""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / self.name / which for which in ("first", "second")]
        for one in self.folders:
            one.mkdir(parents=True)
        fleet.up([self.name], self.folders[0])
        self.first = state.read(self.folders[0])[self.name]
        self.second = state.Running(self.first.version, free_ports(1), self.first.secret)
        state.write({self.name: self.second}, self.folders[1])
        self.address = Address(self.first.ports[0])
        here, there = f"127.0.0.1:{self.first.ports[0]}", f"127.0.0.1:{self.address.url_port}"
        self.variables = {name: value.replace(here, there) for name, value in (self.first.settings or {}).items()}
        self.prepare()

    def prepare(self) -> None:
        """Make the second ready to take over."""
        raise NotImplementedError

    def fail_over(self) -> None:
        """Return when the second serves and the address leads to it. Connections made before stay with the first."""
        raise NotImplementedError

    def start_second(self) -> None:
        fleet.up([self.name], self.folders[1])
        self.second = state.read(self.folders[1])[self.name]


class PostgresPair(Pair):
    """The second is a synchronous standby. The first lives on, and its sessions can only read."""

    name = "postgres"

    def prepare(self) -> None:
        server = Postgres()
        server.install()
        place = Place(self.folders[1] / self.name, self.second.ports, self.second.secret)
        place.folder.mkdir()
        server.stand_by(place, self._url(self.first))
        self.start_second()
        with psycopg.connect(self._url(self.first), autocommit=True) as first:
            first.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            first.execute("SELECT pg_reload_conf()")

    def fail_over(self) -> None:
        with psycopg.connect(self._url(self.first), autocommit=True) as first:
            first.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            first.execute("SELECT pg_reload_conf()")
            writing = "SELECT count(*) FROM pg_stat_activity WHERE backend_xid IS NOT NULL"
            until(lambda: first.execute(writing).fetchone() == (0,), "the last transactions of the old primary")
        with psycopg.connect(self._url(self.second), autocommit=True) as second:
            second.execute("SELECT pg_promote()")
        self.address.port = self.second.ports[0]

    def _url(self, row: state.Running) -> str:
        place = Place(self.folders[0], row.ports, row.secret)
        return Postgres().settings(place)["ETUDE_LEDGER"]


class RedisPair(Pair):
    """The second is a replica. The first lives on as one, and refuses to write."""

    name = "redis"

    def prepare(self) -> None:
        self.start_second()
        self._client(self.second).config_set("masterauth", self.first.secret)
        self._follow(self.second, self.first)

    def fail_over(self) -> None:
        self._client(self.second).replicaof("NO", "ONE")
        self.address.port = self.second.ports[0]
        self._client(self.first).config_set("masterauth", self.second.secret)
        self._client(self.first).replicaof("127.0.0.1", str(self.second.ports[0]))

    def _follow(self, one: state.Running, other: state.Running) -> None:
        client = self._client(one)
        client.replicaof("127.0.0.1", str(other.ports[0]))
        until(lambda: client.info("replication")["master_link_status"] == "up", "the replica")

    def _client(self, row: state.Running) -> Redis:
        return Redis(port=row.ports[0], password=row.secret)


class MinioPair(Pair):
    """The second takes over the disk of the first, which ends."""

    name = "minio"

    def prepare(self) -> None:
        (self.folders[1] / self.name).mkdir()

    def fail_over(self) -> None:
        if process := self.first.process:
            process.send_signal(self.first.stop)
            psutil.wait_procs([process], timeout=patient(30))
        first, second = (Place(folder / self.name, (), "").data for folder in self.folders)
        first.rename(second)
        self.start_second()
        self.address.port = self.second.ports[0]


KINDS: dict[str, type[Pair]] = {kind.name: kind for kind in (PostgresPair, RedisPair, MinioPair)}


@contextlib.contextmanager
def standing_by(names: Sequence[str], folder: Path) -> Iterator[list[Pair]]:
    """Pairs of these servers; nothing of them stays."""
    with contextlib.ExitStack() as stack:
        pairs = []
        for name in names:
            for which in ("first", "second"):  # also where the set-up fails half-way
                stack.callback(fleet.down, folder / name / which)
            pairs.append(KINDS[name](folder))
            stack.callback(pairs[-1].address.close)
        yield pairs
