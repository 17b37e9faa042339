"""The ledger: what became of every attempt, group and step of every run. The record; topics are only transport.

Owns: the tables (`models`), their migrations (`migrations`, applied by `migrate.upgrade`), how to open them
(`engine.connect`) and the moves that are allowed (`transitions`). The scheduler is the only writer; anybody may read
with `connect(url, read_only=True)`.

Invariants, held by the database itself:
- `events` is append-only (triggers refuse UPDATE and DELETE), one total order per run (primary key run, sequence); a fact
  about (kind, subject, epoch) is recorded once. The other tables follow from it.
- An attempt never goes back and never leaves an end, its epoch never falls, and a group makes only the moves of
  `transitions`: triggers refuse the rest, whoever writes.
- A problem is in flight or ready in at most one group (partial unique index), so it cannot be trained twice while its
  group lives; across dead lineages `etude ledger audit` checks it.
- `trained` is a fact (group, incarnation, step), unique per (group, incarnation); never a state, never changed or deleted.
- `verdicts` is insert-only (triggers) with primary key (run, attempt): the first verdict recorded wins.
- An outgoing message is in `outbox` in the transaction that caused it. Messages are idempotent by construction, except
  those of `runs.commands` (pause and resume depend on order): `inbox` remembers which of them were handled.
- `lease` names the one scheduler that may write, and its term; every transaction checks the term.

Times are seconds since 1970, UTC. Versions are serials (see design: a serial is never reused).
"""

from shared.ledger.engine import LedgerMissing, connect, end_silent, unhurried
from shared.ledger.migrate import LedgerOutdated, LedgerUnavailable, reach, readable, require_current, upgrade

__all__ = [
    "LedgerMissing",
    "LedgerOutdated",
    "LedgerUnavailable",
    "connect",
    "end_silent",
    "reach",
    "readable",
    "require_current",
    "unhurried",
    "upgrade",
]
