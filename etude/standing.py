"""How every run stands, from what is said on the bus alone: neither the ledger nor a service is asked.

Who says what, and what becomes of it, follows the console's rules (services/console/board.py, control.py): a word that does
not fit the run's state changes nothing, and the scheduler's last word decides (`shared.contracts.words`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from etude.hearing import Hearing
from shared.bus import Bus
from shared.contracts import topics as t
from shared.contracts.messages import BY_SCHEDULER, PolicyPublished, RunControl
from shared.contracts.run import Ref
from shared.contracts.topics import Topic
from shared.contracts.words import Words
from shared.ledger.transitions import RUN_MOVES, RunState

HEARD = (t.RUNS_CONTROL, t.POLICIES_PUBLISHED)  # both are kept for a year
LEADS_TO = {
    "start": RunState.running,
    "resume": RunState.running,
    "pause": RunState.paused,
    "stop": RunState.stopping,
    "finished": RunState.finished,
}


@dataclass(slots=True)
class Standing:
    """One run. `since` when it is in this state, `started`: Unix seconds by the senders' clocks. `reason`, `by`: of the word
    that led to the state. `configs`: those that it was started with and that the scheduler took since, the last one holds.
    `versions`: published serial -> its step. `serial`, `step`: of the newest; -1 and 0 without one."""

    run: str
    state: RunState = RunState.announced
    since: float = 0.0
    started: float = 0.0
    reason: str = ""
    by: str = ""
    configs: list[Ref] = field(default_factory=list)
    incarnation: int = -1
    serial: int = -1
    versions: dict[int, int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.versions.get(self.serial, 0)

    @property
    def why(self) -> str:
        """The reason, and who gave it."""
        person = self.by if self.by != BY_SCHEDULER else ""
        return f"{self.reason} ({person})" if self.reason and person else self.reason or person


class Standings:
    """A fold over messages in the order of their topics; the topics come in any order among each other."""

    def __init__(self) -> None:
        self._all: dict[str, Standing] = {}
        self._started: list[str] = []
        self._words = Words()

    @property
    def runs(self) -> list[Standing]:
        """Those that were started, in the order of their starts."""
        return [self._all[run] for run in self._started]

    @property
    def unfinished(self) -> list[Standing]:
        return [run for run in self.runs if run.state is not RunState.finished]

    @property
    def followed(self) -> str:
        """The run that the trainer and the engines follow: the one started last, also after its end
        (services/trainer/service.py, services/inference/following.py). Empty: none was started."""
        return self._started[-1] if self._started else ""

    def of(self, run: str) -> Standing | None:
        return self._all[run] if run in self._started else None

    def hear(self, message: Any, at: float) -> None:
        """`at`: when it was said, Unix seconds."""
        match message:
            case RunControl():
                self._control(message, at)
            case PolicyPublished():
                run = self._entry(message.run)
                run.versions[message.serial] = message.step
                run.serial = max(run.serial, message.serial)
                run.incarnation = max(run.incarnation, message.incarnation)

    def _entry(self, run: str) -> Standing:
        return self._all.setdefault(run, Standing(run))

    def _control(self, word: RunControl, at: float) -> None:
        if not self._words.count(word):
            return
        run = self._entry(word.run)
        if word.action == "start" and word.config is not None and word.run not in self._started:
            self._started.append(word.run)
            run.started = at
        if word.config is not None and (word.number or not run.configs) and word.config not in run.configs[-1:]:
            run.configs.append(word.config)
        target = LEADS_TO.get(word.action, run.state)
        if word.action != "finished" and target not in RUN_MOVES[run.state]:
            return
        moved = target is not run.state
        if moved:
            run.state, run.since = target, at
        # Else it only says what a person's word has led to, or in answer to whom it is said again.
        if word.reason != run.reason or (word.by != BY_SCHEDULER and (moved or not word.number)):
            run.by = word.by
        run.reason = word.reason


class Listener(Hearing):
    """It begins when everything that was said is in `standings`; `said`: every message since."""

    def __init__(self, bus: Bus, topics: Sequence[Topic] = HEARD) -> None:
        super().__init__(bus, topics, self._take)
        self.standings = Standings()
        self.said: list[Any] = []

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.said.clear()
        return self

    def _take(self, message: Any, at: float) -> None:
        self.standings.hear(message, at)
        self.said.append(message)
