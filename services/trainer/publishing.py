"""What a step has made and is not durable yet: handed from the training thread to the one that publishes.

    training thread                         publishing thread
    step t: compute, optimiser
    take bits (and lend the state)  ──────▶ put version t; if due, write checkpoint t; then t is announced
    step t + 1: forward, backward
      before its optimiser: `read`  ◀────── the lent state is on the disk
      optimiser
      before its bits: `kept`       ◀────── version and checkpoint t are durable

At most one publication is in flight: the bits of step t + 1 are taken when everything of step t is durable. A failure of the
publishing thread is raised in the training thread, at the next of these places.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from shared import weights


@dataclass(slots=True)
class Made:
    """`ages`: of the groups that the step trained. `state`: what its checkpoint holds, lent by the optimiser until `read` is
    done; None: no checkpoint is due. `trained`: all groups that these weights were trained on, if a checkpoint is due."""

    step: int
    serial: int
    ages: dict[str, int]
    metrics: dict[str, float]
    bits: weights.Tensors
    state: Mapping[str, Tensor] | None = None
    trained: frozenset[str] = frozenset()
    put: Future[None] = field(default_factory=Future)
    read: Future[None] = field(default_factory=Future)
    kept: Future[None] = field(default_factory=Future)

    def fail(self, error: BaseException) -> None:
        """Let whoever waits for this publication fail with it. What is done already stays done."""
        for one in (self.put, self.read, self.kept):
            if not one.done():
                one.set_exception(error)


def done(one: Future[None]) -> None:
    if not one.done():
        one.set_result(None)
