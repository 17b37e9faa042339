"""`etude runs --history RUN`: every word that was said to a run, by whom, and what became of it.

It is told by the bus alone: words and promotions for a year, alerts for a week. Who says a word signs it, and is believed: a
command with the user of its machine and its own name, the console with whose token was signed in with (docs/access.md).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from etude.acting import chosen
from etude.hearing import past
from etude.standing import LEADS_TO, Standings
from shared.contracts import topics as t
from shared.contracts.messages import BY_SCHEDULER, Alert, PolicyPromoted, RunControl
from shared.settings import ServiceSettings
from shared.visible import visible

HEARD = (t.RUNS_CONTROL, t.POLICIES_PROMOTED, t.ALERTS)
ANSWERED = ("pause", "resume", "stop", "reconfigure")  # by the scheduler; a rollback is the trainer's to obey
NONE = "no answer"


@dataclass(slots=True)
class Entry:
    """`at`: Unix seconds by the sender's clock. `answer`: the state that the scheduler said the run is in; empty: none is due."""

    at: float
    who: str
    what: str
    reason: str
    answer: str = ""


class History:
    """Of one run. A fold over messages in the order of their topics; the topics come in any order among each other."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._entries: list[Entry] = []
        self._number = 0  # of the scheduler's last word: it may say one again
        self._said = ("", "")  # the state and the reason in it

    @property
    def entries(self) -> list[Entry]:
        return sorted(self._entries, key=lambda one: one.at)

    def hear(self, message: Any, at: float) -> None:
        if message.run != self._run:
            return
        match message:
            case RunControl(number=0):
                answer = NONE if message.action in ANSWERED else ""
                self._entries.append(Entry(at, message.by, _what(message), message.reason, answer))
            case RunControl() if message.number > self._number:
                self._answer(message, at)
            case PolicyPromoted():
                self._entries.append(Entry(at, message.by, f"promote version {message.serial}", message.reason))
            case Alert():
                why = "; ".join((message.what, *message.examples))
                self._entries.append(Entry(at, "", f"alert {message.name} ({message.severity})", why))

    def _answer(self, word: RunControl, at: float) -> None:
        """To the earliest word of this author that has none; else what the scheduler says of its own accord."""
        state = LEADS_TO[word.action].value
        self._number, before, self._said = word.number, self._said, (state, word.reason)
        if word.by != BY_SCHEDULER:
            for entry in self._entries:
                if (entry.who, entry.answer) == (word.by, NONE):
                    entry.answer = state
                    return
        if self._said != before:
            self._entries.append(Entry(at, word.by, f"is {state}", word.reason))


def _what(word: RunControl) -> str:
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
