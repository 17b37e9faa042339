"""Which version a replica should serve, from what it has heard. Pure: no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.contracts.life import RunState
from shared.contracts.messages import EvalFinished, EvalRequested, PolicyPromoted, PolicyPublished
from shared.contracts.run import Ref
from shared.contracts.statuses import Statuses

OVER = (RunState.stopping, RunState.finished)


@dataclass(slots=True)
class Following:
    """`run`: only this one ("": the one started last, but for those started beside others). `pinned`: exactly this serial, of
    `pinned_run` ("": of whatever run is served); None: the newest. `promotions`: neither, but what was promoted last. `nobody`:
    no run whatsoever. `past_heard`: the topics were read to where they ended at the start; before, what was asked for may be over
    long ago.

    A version announced by a lower incarnation than the highest seen of its run comes from a superseded trainer: ignored.
    Announcements may repeat and come in any order between runs.
    """

    run: str = ""
    pinned: int | None = None
    pinned_run: str = ""
    promotions: bool = False
    nobody: bool = False
    past_heard: bool = False
    statuses: Statuses = field(default_factory=Statuses)
    _newest: dict[str, PolicyPublished] = field(default_factory=dict)
    # (run, evaluation) -> version, in the order in which they were asked for
    _asked: dict[tuple[str, str], int] = field(default_factory=dict)
    _ended: set[tuple[str, str]] = field(default_factory=set)
    _promoted: PolicyPromoted | None = None

    @property
    def started(self) -> dict[str, Ref]:
        """Run -> the configuration that it was started with, in the order of the starts."""
        return {status.run: status.configs[0] for status in self.statuses.started}

    def published(self, message: PolicyPublished) -> None:
        known = self._newest.get(message.run)
        if known is None or (message.incarnation, message.serial) > (known.incarnation, known.serial):
            self._newest[message.run] = message

    def promotion(self, message: PolicyPromoted) -> None:
        if self.run in ("", message.run):
            self._promoted = message

    def promoted(self, run: str) -> int | None:
        """The version that was promoted last; None: none, or one of another run."""
        return self._promoted.serial if self._promoted and self._promoted.run == run else None

    def evaluation(self, message: EvalRequested | EvalFinished) -> None:
        """Two topics: the end may be heard first."""
        if isinstance(message, EvalRequested):
            self._asked.setdefault((message.run, message.eval), message.serial)
        else:
            self._ended.add((message.run, message.eval))

    def evaluated(self, run: str) -> int | None:
        """The version of the evaluation under way that was asked for first; None: there is none."""
        return next((serial for key, serial in self._asked.items() if key[0] == run and key not in self._ended), None)

    def asked(self, run: str) -> int | None:
        """The version of the run that somebody asked for: who pinned this replica, who promoted one, or an evaluation under way."""
        if self.pinned is not None or not self.past_heard:
            return self.pinned if self.pinned_run in ("", run) else None
        return self.promoted(run) if self.promotions else self.evaluated(run)

    def runs(self) -> list[str]:
        """The runs to serve, the best first. One that is over before it published anything comes into question only where
        no other is left: it was refused. One that did publish stays: its last version may still be evaluated. Where somebody has
        pinned a version of one, there is no other."""
        if self.nobody:
            return []
        if self.pinned_run:
            return [self.pinned_run]
        if self.promotions:
            return [self._promoted.run] if self._promoted and self._promoted.run in self.started else []
        if self.run:
            return [self.run] if self.run in self.started else []
        latest = self.statuses.unbound
        open_ = [one.run for one in latest if one.run in self._newest or one.state not in OVER]
        return open_ or [one.run for one in latest]

    def newest(self, run: str) -> PolicyPublished | None:
        return self._newest.get(run)
