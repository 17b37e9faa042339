"""Weights & Biases: a run with the run's own id, resumed by it. WANDB_MODE=offline needs no network; `wandb sync` uploads later.

W&B's own step only ever grows, and evaluations come late: the x-axis is the figure `step`. What was written stands in the run's
configuration (`etude_written`), which a resumed run gets from the server. Killed (not ended by Ctrl-C) it may hold the last
points twice, with the same values.

W&B takes nothing back: a curve with dead steps is left as it is, its configuration names the run that takes its place. Offline
nothing can be resumed: every call writes the whole curve under the same id, and the newest one that is uploaded replaces
the others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import wandb

from etude.figures.points import MARKERS, Kind, Point, Row
from etude.figures.sink import NotWritten, Parameters, told
from shared.contracts.life import RunState

WRITTEN, SUPERSEDED_BY = "etude_written", "etude_superseded_by"  # in the run's configuration
MOST_SUPERSEDED = 1000  # of one run; more is a circle


class Wandb:
    """See sink.Sink."""

    def __init__(self, where: str, run: str, parameters: Parameters) -> None:
        entity, _, project = where.rpartition("/")
        self._where, self._entity, self._project = f"wandb:{where}", entity or None, project
        self._name, self._parameters = run, parameters
        self._id, self._number = run, 1
        self._run = self._begin()
        while heir := self._run.config.get(SUPERSEDED_BY):
            if self._number > MOST_SUPERSEDED:
                raise NotWritten(f"{self._where}: more than {MOST_SUPERSEDED} runs supersede each other")
            self._run.finish()
            self._id, self._number = heir, self._number + 1
            self._run = self._begin()

    def held(self) -> list[Point]:
        kept = json.loads(self._run.config.get(WRITTEN, "{}"))
        points = [Point(name, step, number, at) for name, step, number, at in kept.get("others", [])]
        for incarnation, (first, last) in kept.get("train", {}).items():
            points += [Point(MARKERS[Kind.train], step, int(incarnation), 0.0) for step in range(first, last + 1)]
        return points

    def write(self, rows: Sequence[Row]) -> None:
        markers = self.held()
        with told(self._where, wandb.Error):
            for row in rows:
                self._run.log({"step": row.step, "_timestamp": row.at, **row.figures})
                markers.append(Point(name := MARKERS[row.kind], row.step, row.figures[name], row.at))
            self._run.config.update({WRITTEN: _kept(markers)}, allow_val_change=True)

    def discard(self, after: int) -> None:
        with told(self._where, wandb.Error):
            if not self._run.offline:
                self._number += 1
                self._id = f"{self._name}-{self._number}"
                self._run.config.update({SUPERSEDED_BY: self._id}, allow_val_change=True)
            self._run.finish()
            self._run = self._begin()

    def close(self, state: RunState) -> None:
        with told(self._where, wandb.Error):
            self._run.finish()

    def _begin(self) -> Any:
        with told(self._where, wandb.Error):
            run = wandb.init(
                entity=self._entity,
                project=self._project,
                id=self._id,
                name=self._id,
                group=self._name,
                job_type="etude",
                resume="allow",
                # This process only copies: its output, code, commit and load say nothing of the run.
                settings=wandb.Settings(console="off", disable_git=True, save_code=False, x_disable_stats=True),
            )
            run.config.update(dict(self._parameters), allow_val_change=True)
            run.define_metric("step", hidden=True)
            for kind in Kind:
                run.define_metric(f"{kind}/*", step_metric="step")
        return run


def _kept(markers: Sequence[Point]) -> str:
    """Of training the first and last step of each incarnation, which are written in order; of the rest all."""
    train: dict[int, tuple[int, int]] = {}
    others = []
    for point in markers:
        if point.name == MARKERS[Kind.train]:
            first, last = train.get(int(point.value), (point.step, point.step))
            train[int(point.value)] = (min(first, point.step), max(last, point.step))
        else:
            others.append(point)
    return json.dumps({"train": train, "others": others})
