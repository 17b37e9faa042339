"""MLflow: one run of the experiment MLFLOW_EXPERIMENT_NAME (`etude` where nothing is said), found again by its tag.

MLflow takes single points back never, so that a curve with dead steps is left as it is, with a tag that says so, and a fresh run
takes all that is still good.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from etude.figures.points import MARKERS, Point, Row
from etude.figures.sink import Parameters, told
from shared.contracts.life import RunState
from shared.settings import masked

RUN, SUPERSEDED = "etude.run", "etude.superseded"  # tags
METRICS, PARAMETERS = 1000, 100  # of one request, at most
FAILURES = (MlflowException, OSError)  # requests' own are OSErrors


class Mlflow:
    """See sink.Sink."""

    def __init__(self, uri: str, run: str, parameters: Parameters) -> None:
        self._uri, self._run, self._parameters = masked(uri), run, parameters
        with told(self._uri, *FAILURES):
            self._client = MlflowClient(tracking_uri=uri)
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "etude")
            known = self._client.get_experiment_by_name(name)
            self._experiment = known.experiment_id if known else self._client.create_experiment(name)
            self._id = self._found() or self._new()

    def held(self) -> list[Point]:
        with told(self._uri, *FAILURES):
            return [
                Point(name, one.step, one.value, one.timestamp / 1000)
                for name in MARKERS.values()
                for one in self._client.get_metric_history(self._id, name)
            ]

    def write(self, rows: Sequence[Row]) -> None:
        """A row's marker comes last, and rows are not cut over requests unless they are larger than one."""
        with told(self._uri, *FAILURES):
            for batch in _batches(rows):
                self._client.log_batch(self._id, metrics=batch)

    def discard(self, after: int) -> None:
        with told(self._uri, *FAILURES):
            self._client.set_tag(self._id, SUPERSEDED, f"steps after {after} are dead")
            self._client.set_terminated(self._id, "KILLED")
            self._id = self._new()

    def close(self, state: RunState) -> None:
        with told(self._uri, *FAILURES):
            if state is RunState.finished:
                self._client.set_terminated(self._id, "FINISHED")
            else:
                self._client.update_run(self._id, "RUNNING")

    def _found(self) -> str | None:
        runs = self._client.search_runs([self._experiment], f"tags.`{RUN}` = '{self._run}'")
        return next((one.info.run_id for one in runs if SUPERSEDED not in one.data.tags), None)

    def _new(self) -> str:
        run = self._client.create_run(self._experiment, tags={RUN: self._run}, run_name=self._run).info.run_id
        parameters = iter(Param(name, str(value)) for name, value in self._parameters.items())
        while batch := list(islice(parameters, PARAMETERS)):
            self._client.log_batch(run, params=batch)
        return run


def _batches(rows: Sequence[Row]) -> Iterator[list[Metric]]:
    batch: list[Metric] = []
    for row in rows:
        metrics = [Metric(name, value, round(1000 * at), step) for name, step, value, at in row.points]
        if len(batch) + len(metrics) > METRICS:
            yield from filter(None, [batch])
            batch = []
        batch += metrics
        while len(batch) > METRICS:
            yield batch[:METRICS]
            batch = batch[METRICS:]
    yield from filter(None, [batch])
