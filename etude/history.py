"""`etude runs --history RUN`: every command to a run, by whom, and what became of it.

The bus alone tells it: it keeps commands and promotions for a year, what the scheduler decided and alerts for a week. Who gives a
command signs it, and is believed: a command line with the user of its machine and its own name, the console with whose token was
signed in with (docs/access.md).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.markup import escape
from rich.table import Table

from etude.acting import chosen
from etude.hearing import past
from etude.standing import Standings
from shared.contracts import topics as t
from shared.contracts.messages import Alert, PolicyPromoted, RunCommand, RunStatus
from shared.contracts.statuses import decided_by, is_decision
from shared.settings import ServiceSettings
from shared.visible import visible

HEARD = (t.RUNS_COMMANDS, t.RUNS_STATE, t.POLICIES_PROMOTED, t.ALERTS)
NONE = "no answer"


@dataclass(slots=True)
class Entry:
    """`at`: Unix seconds by the sender's clock. `answer`: the state that the run was in after it, as the scheduler said; empty:
    none is due, or it is not kept any more."""

    at: float
    who: str
    what: str
    reason: str
    answer: str = ""


class History:
    """Of one run. A fold over messages in the order of their topics; the topics come in any order among each other."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._others: list[Entry] = []
        self._commands: dict[str, Entry] = {}  # by id
        self._statuses: dict[int, RunStatus] = {}  # by number: the scheduler may say one again

    @property
    def entries(self) -> list[Entry]:
        statuses = [self._statuses[number] for number in sorted(self._statuses)]
        answers = {one.answers: one.state.value for one in statuses}
        handled = statuses[-1].number / 1000 if statuses else 0.0
        commands = [
            replace(one, answer=answers.get(name, "" if one.at < handled else NONE))
            for name, one in self._commands.items()
        ]
        return sorted([*self._others, *commands, *_decided(statuses)], key=lambda one: one.at)

    def hear(self, message: Any, at: float) -> None:
        if message.run != self._run:
            return
        match message:
            case RunCommand():
                self._commands.setdefault(message.id, Entry(at, message.by, _what(message), message.reason))
            case RunStatus():
                self._statuses[message.number] = message
            case PolicyPromoted():
                self._others.append(Entry(at, message.by, f"promote version {message.serial}", message.reason))
            case Alert():
                why = "; ".join((message.what, *message.examples))
                self._others.append(Entry(at, "", f"alert {message.name} ({message.severity})", why))


def _decided(statuses: Sequence[RunStatus]) -> Iterator[Entry]:
    """What the scheduler did by itself, and what a command did that is not kept any more."""
    for before, one in zip([None, *statuses], statuses, strict=False):
        if is_decision(before, one):
            yield Entry(one.since, decided_by(one), f"is {one.state}", one.reason)


def _what(word: RunCommand) -> str:
    match word.action:
        case "pause" if not word.drain:
            return "pause, without training what is complete"
        case "rollback":
            return f"roll back to version {word.serial}"
        case "start" | "reconfigure" if word.config is not None:
            return f"{word.action} with {word.config.key}"
        case action:
            return action


async def read(settings: ServiceSettings, run: str) -> list[Entry]:
    """Raises Refused where nobody started such a run, BusUnavailable."""
    standings, history = Standings(), History(run)

    def hear(message: Any, at: float) -> None:
        standings.hear(message, at)
        history.hear(message, at)

    await past(settings, HEARD, hear, client="etude-runs")
    chosen(standings, run)
    return history.entries


def rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    return [asdict(entry) for entry in entries]


def table(entries: Sequence[Entry]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for column in ("at, UTC", "who", "what", "answer"):
        shown.add_column(column, overflow="fold", no_wrap=column == "at, UTC")
    shown.add_column("why", overflow="fold")
    for one in entries:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one.at)) if one.at else ""
        shown.add_row(at, *(escape(visible(text)) for text in (one.who, one.what, one.answer, one.reason)))
    return shown
