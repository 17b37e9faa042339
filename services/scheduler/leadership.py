"""One scheduler writes at a time. The lease is a row of the ledger with a term; every transaction checks the term.

A waiting scheduler watches the holder's renewals on its own clock, so that clocks need not agree. A holder that left
cleanly, or whose process can be seen to be gone (`shared.process`), is replaced at once; any other after `lease_s` without
renewal. A holder of which nothing can be seen, in another container or before another boot, may live.
"""

from __future__ import annotations

import json
import os
import socket
import time

import msgspec
from sqlalchemy import Connection, Engine, insert, select, update
from sqlalchemy.exc import IntegrityError

from services.scheduler.store import LEASE, Fenced
from shared.ledger import end_silent
from shared.ledger.models import LeaseRow
from shared.process import Identity, identity, lives


class Leadership:
    """Synchronous; call `try_lead` until it returns a term, then `renew` about four times per `lease_s`."""

    def __init__(self, engine: Engine, lease_s: float, name: str) -> None:
        self._engine, self._lease_s = engine, lease_s
        me = {"name": name, "host": socket.gethostname(), "pid": os.getpid()}
        self._holder = json.dumps({**me, "process": msgspec.to_builtins(identity(os.getpid()))})
        self._seen: tuple[int, int] | None = None
        self._seen_at = 0.0
        self.term: int | None = None

    def try_lead(self) -> int | None:
        """The term, or None while another one leads (`holder` says who)."""
        with self._engine.begin() as connection:
            row = _read(connection)
            if row is not None and not self._vacant(row):
                return None
            if row is None:
                try:
                    connection.execute(insert(LeaseRow).values(name=LEASE, holder=self._holder, term=1, renewals=0))
                except IntegrityError:
                    return None  # another was first
                self.term = 1
                return 1
            end_silent(connection, LeaseRow.__tablename__)  # a frozen holder has the row locked
            taken = connection.execute(
                update(LeaseRow)
                .where(LeaseRow.name == LEASE, LeaseRow.term == row.term, LeaseRow.renewals == row.renewals)
                .values(holder=self._holder, term=row.term + 1, renewals=row.renewals + 1)
            )
            self.term = row.term + 1 if taken.rowcount == 1 else None
            return self.term

    def renew(self) -> None:
        """Raises Fenced if the lease went to another one."""
        with self._engine.begin() as connection:
            renewed = connection.execute(
                update(LeaseRow)
                .where(LeaseRow.name == LEASE, LeaseRow.term == self.term)
                .values(renewals=LeaseRow.renewals + 1)
            )
            if renewed.rowcount != 1:
                raise Fenced(f"term {self.term} is over: {self.holder(connection)} leads")

    def leave(self) -> None:
        """Makes room for a successor at once."""
        with self._engine.begin() as connection:
            connection.execute(
                update(LeaseRow).where(LeaseRow.name == LEASE, LeaseRow.term == self.term).values(holder="")
            )
        self.term = None

    def holder(self, connection: Connection | None = None) -> str:
        """Who leads, for people."""
        if connection is None:
            with self._engine.begin() as connection:
                return self.holder(connection)
        row = _read(connection)
        if row is None or not row.holder:
            return "no scheduler"
        who = json.loads(row.holder)
        return f"{who['name']} (process {who['pid']} on {who['host']})"

    def _vacant(self, row: LeaseRow) -> bool:
        if not row.holder or _is_gone(row.holder):
            return True
        seen = (row.term, row.renewals)
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        return time.monotonic() - self._seen_at > self._lease_s


def _read(connection: Connection) -> LeaseRow | None:
    query = select(LeaseRow.holder, LeaseRow.term, LeaseRow.renewals).where(LeaseRow.name == LEASE)
    return connection.execute(query).first()  # type: ignore[return-value]


def _is_gone(holder: str) -> bool:
    """Whether the holder was a process of this machine that has ended, beyond doubt. Machines that were copied share a
    boot, so that the name of the host counts too. A holder of an older version does not say which process it was."""
    who = json.loads(holder)
    known = msgspec.convert(who.get("process"), Identity | None)
    return known is not None and who["host"] == socket.gethostname() and lives(known) is False
