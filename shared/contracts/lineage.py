"""Where a policy version stands relative to the weights that survive, and how old a sample is: the trainer's measure of age
and the scheduler's are this one. Pure.

An incarnation continues its parent from a step; what the parent did after it is dead. A version is (incarnation, step). The
age of a token when step t is made (from the weights of step t - 1) is the distance from t - 1 to the token's version along the
tree of incarnations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Past = Mapping[int, int | None]  # incarnations -> up to which step they belong to it (None: no end)


@dataclass(frozen=True, slots=True)
class Fork:
    """An incarnation continued `parent` from `step`. parent -1: it began with the base policy, step 0. One that nobody has
    announced is taken for such a root."""

    parent: int
    step: int


ROOT = Fork(-1, 0)


def past(forks: Mapping[int, Fork], incarnation: int) -> dict[int, int | None]:
    """The incarnation and its ancestors."""
    path: dict[int, int | None] = {}
    upto: int | None = None
    while incarnation >= 0:
        path[incarnation] = upto
        fork = forks.get(incarnation, ROOT)
        upto = fork.step if upto is None else min(upto, fork.step)
        incarnation = fork.parent if fork.parent < incarnation else -1  # nobody continues a later one
    return path


def parting(ours: Past, theirs: Past) -> int | None:
    """The step at which two lines part; None: they are the same incarnation's."""
    common = max((incarnation for incarnation in ours if incarnation in theirs), default=-1)
    if common < 0:
        return 0  # nothing in common but the base policy
    ends = [end for end in (ours[common], theirs[common]) if end is not None]
    return min(ends, default=None)


def distance(forks: Mapping[int, Fork], here: tuple[int, int], there: tuple[int, int]) -> int:
    """Steps between two versions along the tree: back to where they part, then forward.

    On our own line it is the difference of the steps, negative if `there` lies ahead of `here`.
    """
    part = parting(past(forks, here[0]), past(forks, there[0]))
    if part is None or there[1] <= part:
        return here[1] - there[1]
    return abs(here[1] - part) + there[1] - part  # `there` is on a branch that we are not on, even right at the fork


def age(forks: Mapping[int, Fork], incarnation: int, step: int, version: tuple[int, int]) -> int:
    """Age of a token of `version` in the `step`-th step of `incarnation`; 0: sampled by the very weights that the step
    starts from."""
    return distance(forks, (incarnation, step - 1), version)


def serials(oldest: int, newest: int | None) -> range:
    """Those that the tokens of an attempt may have; `newest` None: not said. All of them, because the oldest is not always
    the farthest: on a branch that a fork cut off, a newer one has gone farther from the weights that survived."""
    return range(oldest, max(oldest, oldest if newest is None else newest) + 1)


class Lineage:
    """The tree of incarnations as seen from the newest one, whose weights survive."""

    def __init__(self, forks: Mapping[int, Fork] | None = None) -> None:
        self.forks = dict(forks or {})
        self.current = max(self.forks, default=-1)
        self._past = past(self.forks, self.current)
        self._partings: dict[int, int | None] = {}  # incarnation -> where its line parts from ours

    def fork(self, incarnation: int) -> Fork:
        return self.forks.get(incarnation, ROOT)

    @property
    def start(self) -> int:
        """The step that the newest incarnation continued from."""
        return self.fork(self.current).step

    def survives(self, incarnation: int, step: int) -> bool:
        """Whether that step is part of the surviving weights. Before any trainer has spoken, everything is."""
        if self.current < 0:
            return True
        if incarnation not in self._past:
            return False
        upto = self._past[incarnation]
        # Steps up to its own fork belong to its parent, whoever names them.
        return (upto is None or step <= upto) and step > self.fork(incarnation).step

    def shared(self, incarnation: int, step: int) -> int:
        """Up to which step a version has the same past as the weights that survive."""
        part = self._parting(incarnation)
        return step if part is None else min(step, part)

    def position(self, incarnation: int, step: int) -> int:
        """A version in steps of the surviving lineage: whatever comes after the fork is as old as `age` says, from there.

        On the lineage: the step. On a dead branch that left it at step a: a minus the way back to a, because at step t the
        age is (t - a) + (s - a) = t - (2a - s).
        """
        if incarnation > self.current:
            return step  # whose fork was not heard of yet
        part = self._parting(incarnation)
        return step if part is None or step <= part else 2 * part - step

    def at(self, incarnation: int) -> Lineage:
        """The lineage as it was while `incarnation` lived: for judging what it trained."""
        known = {number: fork for number, fork in self.forks.items() if number <= incarnation}
        return Lineage({incarnation: ROOT} | known)

    def _parting(self, incarnation: int) -> int | None:
        if self.current < 0:
            return None
        if incarnation not in self._partings:
            self._partings[incarnation] = parting(self._past, past(self.forks, incarnation))
        return self._partings[incarnation]
