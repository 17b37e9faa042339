"""Which replicas are there still, of all that ever said what they serve. Pure.

A killed one says nothing more, so its last word stands. Nobody is hidden for that: the page says "gone", and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.console.board import Board
from services.console.neighbours import Neighbour
from shared.contracts.messages import GONE_S, PolicyApplied


@dataclass(frozen=True, slots=True)
class Standing:
    """`gone`: why it is held to be; empty: it is as it said last."""

    replica: PolicyApplied
    gone: str


def standings(board: Board, neighbours: Sequence[Neighbour], now: float) -> list[Standing]:
    """By pool and name. `now`: Unix seconds. `neighbours`: those that the console could see; none where it sees no replica."""
    seen = {n.name: n.state for n in neighbours if n.service == "inference"}
    mute = {n.url for n in neighbours if n.state == "silent"}  # one whose address alone is known has told no name
    newest_at = {replica.url: name for name, replica in board.replicas.items()}  # in the order in which they spoke last

    def gone(name: str, replica: PolicyApplied) -> str:
        if not replica.ok:
            return ""
        if newest_at[replica.url] != name:
            return f"{newest_at[replica.url]} has its address"
        if seen.get(name) == "silent" or replica.url in mute:
            return "it does not answer"
        if name in seen:
            return ""
        if seen:
            return "no service of this name is beside the console any more"
        # A live one takes a version, or says why not, long before.
        overtaken = now - board.overtaken.get(name, now)
        return f"others took a newer version {overtaken / 60:.0f} minutes ago" if overtaken > GONE_S else ""

    found = sorted(board.replicas.items(), key=lambda item: (item[1].pool, item[0]))
    return [Standing(replica, gone(name, replica)) for name, replica in found]
