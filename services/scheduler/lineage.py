"""Incarnations of the trainer, forks, and where a version stands relative to the weights that survive. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fork:
    """Incarnation `incarnation` continued `parent` from `step`: what the parent did after it is dead. parent -1: none."""

    incarnation: int
    step: int
    parent: int


def serials(oldest: int, newest: int | None) -> range:
    """Those that the tokens of an attempt may have; `newest` None: not said. All of them, because the oldest is not always
    the farthest: on a branch that a fork cut off, a newer one has gone farther from the weights that survived."""
    return range(oldest, max(oldest, oldest if newest is None else newest) + 1)


class Lineage:
    """The tree of incarnations as seen from the newest one, whose weights survive.

    Unknown parents are taken for roots that began at step 0.
    """

    def __init__(self, forks: Iterable[Fork] = ()) -> None:
        self.forks = {fork.incarnation: fork for fork in forks}
        self.current = max(self.forks, default=-1)
        # Surviving part of each ancestor: its steps up to and including this one; None: no end (the newest).
        self._upto: dict[int, int | None] = {}
        incarnation, upto = self.current, None
        while incarnation >= 0 and incarnation not in self._upto:
            self._upto[incarnation] = upto
            fork = self.fork(incarnation)
            incarnation, upto = fork.parent, fork.step if upto is None else min(fork.step, upto)

    def fork(self, incarnation: int) -> Fork:
        return self.forks.get(incarnation) or Fork(incarnation, 0, -1)

    @property
    def start(self) -> int:
        """The step that the newest incarnation continued from."""
        return self.fork(self.current).step if self.current >= 0 else 0

    def survives(self, incarnation: int, step: int) -> bool:
        """Whether that step is part of the surviving weights. Before any trainer has spoken, everything is."""
        if self.current < 0:
            return True
        if incarnation not in self._upto:
            return False
        upto = self._upto[incarnation]
        # Steps up to its own fork belong to its parent, whoever names them.
        return (upto is None or step <= upto) and step > self.fork(incarnation).step

    def shared(self, incarnation: int, step: int) -> int:
        """Up to which step version (incarnation, step) has the same past as the weights that survive."""
        while self.current >= 0 and incarnation not in self._upto:
            fork = self.fork(incarnation)
            if not 0 <= fork.parent < incarnation:
                return 0  # a root of its own
            incarnation, step = fork.parent, min(step, fork.step)
        upto = self._upto.get(incarnation)
        return step if upto is None else min(step, upto)

    def position(self, incarnation: int, step: int) -> int:
        """Version (incarnation, step) in steps of the surviving lineage.

        On the lineage: the step. On a dead branch that left it at step a: a minus the way back to a, because the age of
        a token is the distance along the tree: at step t it is (t - a) + (s - a) = t - (2a - s).
        """
        if self.current < 0 or incarnation > self.current:
            return step
        way = 0
        while True:
            fork = self.fork(incarnation)
            if incarnation in self._upto:
                upto = self._upto[incarnation]
                if upto is None or step <= upto:
                    return step - way
                return upto - (step - upto) - way
            if fork.parent < 0 or fork.parent >= incarnation:
                return -step - way  # a root of its own: it shares only the base policy, step 0
            way += max(0, step - fork.step)
            incarnation, step = fork.parent, min(step, fork.step)

    def at(self, incarnation: int) -> Lineage:
        """The lineage as it was while `incarnation` lived: for judging what it trained."""
        known = [fork for number, fork in self.forks.items() if number <= incarnation]
        if incarnation not in self.forks:
            known.append(self.fork(incarnation))
        return Lineage(known)
