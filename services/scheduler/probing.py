"""What a probe found out before the run, as evidence of hardness: taken from a message, written as events, read back.

Invariant: estimates follow from the ledger alone. An event names the last group of the ledger's order before it, and problems of
one event are taken over in the order of their ids, so that a scheduler that starts from the ledger learns everything in the same
order as the one that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sqlalchemy import Connection, select

from services.scheduler.hardness import Probed
from services.scheduler.rows import TABLES
from services.scheduler.working_set import WorkingSet
from shared.contracts.probe import MOST_ATTEMPTS

KIND = "problems.probed"  # an event's
Results = Mapping[str, Sequence[int]]  # problem id -> attempts, solved


def objection(probed: Results, problems: Mapping[str, object]) -> str:
    """Return what is wrong with the results in a message that admits `problems`; empty: nothing."""
    for name, (attempts, solved) in probed.items():
        if name not in problems:
            return f"probed: found {name!r:.200}; allowed: problems of the same message"
        if not 1 <= attempts <= MOST_ATTEMPTS or not 0 <= solved <= attempts:
            found = f"{attempts} attempts, {solved} solved"
            return f"probed.{name:.200}: found {found}; allowed: 1 to {MOST_ATTEMPTS} attempts, of which at most all are solved"
    return ""


def take(ws: WorkingSet, probed: Results, now: float) -> None:
    """Write down and take over the results of problems that were admitted just now."""
    if probed:
        after, problems = ws.head.last_ready, {name: list(counts) for name, counts in probed.items()}
        ws.event(now, KIND, "", ws.head.last_event, after=after, problems=problems)
        learn(ws, probed)


def learn(ws: WorkingSet, probed: Results) -> None:
    """Take over results that are in the ledger."""
    for name in sorted(probed):
        attempts, solved = probed[name]
        category, cell = ws.catalogue.kind(name)
        ws.hardness.probe(Probed(category, cell, attempts, solved))
        ws.probed[name] = (attempts, solved)


def read(connection: Connection, run: str) -> Iterator[tuple[int, Results]]:
    """Yield what the ledger has, in its order: the place of the last group before it (0: none), and the results."""
    events = TABLES["events"].c
    mine = (events.run_id == run) & (events.subject == "") & (events.kind == KIND)  # found by an index
    for row in connection.execute(select(events.data).where(mine).order_by(events.sequence)):
        yield row.data["after"], row.data["problems"]
