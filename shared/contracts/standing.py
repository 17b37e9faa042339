"""How hard a run's problems are held to be, and why: what the scheduler answers to `GET /hardness`. Read-only; nothing is
decided by it. An estimate is of the chance that one attempt succeeds, and its odds are the product of its reasons' odds.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Of(StrEnum):
    problems = "problems"
    cells = "cells"


class State(StrEnum):
    """What became of a problem so far."""

    free = "free"  # may be drawn
    running = "running"
    waiting = "waiting"  # its group is complete and not trained yet
    trained = "trained"
    given_up = "given_up"  # its groups were dropped or quarantined


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One factor of the odds. `kind`: run (the mean of all its attempts: the odds themselves), tag (`of` names it),
    relatives (the cell's attempts against what its tags had promised), effort (turns and thinking beyond the run's mean).
    `attempts`: how many it rests on, faded and weighted; 0: on the prior alone."""

    kind: str
    of: str = ""
    odds: float
    attempts: float


class ProblemStanding(msgspec.Struct, frozen=True, kw_only=True):
    problem: str
    category: str
    cell: str
    state: State
    chance: float
    deviation: float  # of the posterior
    draw: float  # share of the weight of all free problems; 0: it is not free
    groups: int  # ever asked for
    attempts: int = 0  # of its last complete group
    solved: int = 0
    step: int = -1  # when that group was complete; -1: none ever was
    reason: str = ""  # why its last group was given up
    reasons: list[Reason] = []


class ProbeWhy(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe before the run said. `attempts`, `solved`: at this problem; 0 attempts: it did not try it. `relatives_…`: at its
    relatives, without itself. `problems`: how many it tried in all."""

    attempts: int = 0
    solved: int = 0
    relatives: int = 0
    relatives_attempts: int = 0
    relatives_solved: int = 0
    problems: int


class ProblemWhy(msgspec.Struct, frozen=True, kw_only=True):
    """One problem at one moment, and what its chance to be drawn follows from (`etude problem why`)."""

    run: str
    step: int
    weighted: bool  # hardness decides what is drawn
    mean: float  # chance of success over the run's late attempts
    power: float  # share of the full power that weights have at this step; 0: draws are uniform
    free: int  # problems
    relative: float  # its weight, if it is free, against the mean weight of free problems
    silent: float  # share of groups like its that are expected to end alike
    standing: ProblemStanding
    probe: ProbeWhy | None = None  # None: no probe informed the run


class CellStanding(msgspec.Struct, frozen=True, kw_only=True):
    """Relatives: problems of one origin. `attempts`, `solved`: weighted, old ones faded."""

    cell: str
    problems: int
    free: int
    trained: int
    chance: float  # mean of its problems
    draw: float
    attempts: float
    solved: float
    promised: float  # to be solved, by the tags of what was tried


class HardnessPage(msgspec.Struct, frozen=True, kw_only=True):
    """`rows`: one page, sorted. `total`: of all pages. `weighted`: whether hardness decides what is drawn in this run."""

    run: str
    step: int
    weighted: bool
    mean: float  # chance of success over the run's late attempts
    page: int
    pages: int
    total: int
    problems: list[ProblemStanding] = []
    cells: list[CellStanding] = []
