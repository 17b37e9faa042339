"""How every run stands, from what is said on the bus alone: neither the ledger nor a service is asked.

The scheduler decides what becomes of a command (`shared.contracts.life`), and its newest status says how the run stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from etude.hearing import Hearing
from shared.bus import Bus
from shared.contracts import topics as t
from shared.contracts.life import RunState
from shared.contracts.messages import BY_SCHEDULER, PolicyPublished, RunCommand, RunStatus
from shared.contracts.run import Ref
from shared.contracts.statuses import Statuses
from shared.contracts.topics import Topic

HEARD = (t.RUNS_STATE, t.POLICIES_PUBLISHED)  # both are kept for a year


@dataclass(slots=True)
class Standing:
    """One run. `since` when it is in this state, `started`: Unix seconds by the scheduler's clock. `reason`, `by`: of the command
    or decision that led to the state. `configs`: those that it was started with and that the scheduler took since, the last one
    holds. `versions`: published serial -> its step. `serial`, `step`: of the newest; -1 and 0 without one."""

    run: str
    state: RunState = RunState.announced
    beside: bool = False  # it has a trainer and engines of its own
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
        self._statuses = Statuses()
        self._asked: dict[str, None] = {}  # runs that somebody commanded to start

    @property
    def runs(self) -> list[Standing]:
        """Those that the scheduler was told to start, in that order; also those that it refused."""
        return sorted((one for one in self._all.values() if one.started), key=lambda one: (one.started, one.run))

    @property
    def starting(self) -> list[str]:
        """Runs that were commanded to start, and that no scheduler has answered for; known only where commands are heard."""
        return [run for run in self._asked if self._statuses.of(run) is None]

    @property
    def unfinished(self) -> list[Standing]:
        return [run for run in self.runs if run.state is not RunState.finished]

    @property
    def followed(self) -> str:
        """The run that a trainer and engines follow that are bound to none: the one started last but not beside others, also
        after its end (services/trainer/service.py, services/inference/following.py). Empty: none was started."""
        status = self._statuses.followed
        return status.run if status is not None else ""

    def of(self, run: str) -> Standing | None:
        one = self._all.get(run)
        return one if one is not None and one.started else None

    def hear(self, message: Any, at: float) -> None:
        """`at`: when it was said, Unix seconds."""
        match message:
            case RunStatus() if self._statuses.hear(message):
                run = self._entry(message.run)
                run.state, run.since, run.started = message.state, message.since, message.started or message.since
                run.beside = message.beside
                run.reason, run.by, run.configs = message.reason, message.by, message.configs
            case RunCommand(action="start") if message.config is not None:  # else no scheduler takes it
                self._asked[message.run] = None
            case PolicyPublished():
                run = self._entry(message.run)
                run.versions[message.serial] = message.step
                run.serial = max(run.serial, message.serial)
                run.incarnation = max(run.incarnation, message.incarnation)

    def _entry(self, run: str) -> Standing:
        return self._all.setdefault(run, Standing(run))


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
