"""Every target keeps what its Protocol promises: each point once, whatever is called again, and no step that is dead.

Those of TensorBoard, MLflow and Weights & Biases run where their package is installed; none needs a network.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.figures.jsonl import Lines
from etude.figures.points import MARKERS, Kind, Point, Row, past
from etude.figures.sink import FORMS, NotWritten, Parameters, Sink, connect, marks, update
from shared.contracts.life import RunState
from tests.unit.etude.figure_messages import (
    RUN,
    begun,
    evaluated,
    heard,
    life,
    overtaking,
    published,
    step,
    word,
)

Curves = dict[str, list[tuple[int, float]]]
PARAMETERS: Parameters = {"run": RUN, "seed": 3, "train.kl": 0.5, "train.mtp": True}
HISTORY = heard(
    word("running"), published(0, 0), evaluated("before", 0, 0.25),
    *(said for n in range(1, 5) for said in (published(n, n), step(n, n))),
)  # fmt: skip
FORK = heard(begun(1, 2), published(5, 2, 1), step(3, 6, 1), published(6, 3, 1), first=2000.0)
LATE = heard(evaluated("middle", 1, 0.5), word("finished"), first=3000.0)


class Memory:
    """A target that records what it is told. It outlives its sinks."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.calls: list[str] = []

    def held(self) -> list[Point]:
        return self.points

    def write(self, rows: Sequence[Row]) -> None:
        self.calls.append("write")
        self.points += [point for row in rows for point in row.points]

    def discard(self, after: int) -> None:
        self.calls.append(f"discard {after}")
        self.points = [point for point in self.points if point.step <= after]

    def close(self, state: RunState) -> None:
        self.calls.append(f"close {state}")


class Target:
    """Where a sink writes, and what a person sees who looks there. `forgets`: what is dead goes; else it stands in a run of its
    own, marked."""

    def __init__(self, form: str, look: Callable[[], Curves], *, forgets: bool = True) -> None:
        self.form, self.look, self.forgets = form, look, forgets

    def call(self, *said: Any, state: RunState = RunState.running) -> int:
        """As one call of the command does, after so much was said."""
        sink = connect(self.form, RUN, PARAMETERS)
        try:
            return update(sink, past(RUN, said), marks(sink))
        finally:
            sink.close(state)


@pytest.fixture(params=["jsonl", "tensorboard", "mlflow", "wandb"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    if request.param == "jsonl":
        file = tmp_path / "figures.jsonl"
        yield Target(f"jsonl:{file}", lambda: _lines(file))
    elif request.param == "tensorboard":
        pytest.importorskip("tensorboard.backend")
        yield Target(f"tensorboard:{tmp_path}", lambda: _events(tmp_path / RUN))
    elif request.param == "mlflow":
        pytest.importorskip("mlflow.exceptions")
        monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        monkeypatch.chdir(tmp_path)
        uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
        yield Target(f"mlflow:{uri}", lambda: _mlflow(uri), forgets=False)
    else:
        pytest.importorskip("wandb.errors")  # not a folder that W&B left behind
        import wandb

        for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("ERROR_REPORTING", "false")):
            monkeypatch.setenv(f"WANDB_{name}", value)
        yield Target("wandb:test", lambda: _offline(tmp_path))
        wandb.teardown()  # else this folder is the next test's too


def expected(*said: Any) -> Curves:
    found: Curves = defaultdict(list)
    for row in past(RUN, said).rows:
        for point in row.points:
            found[point.name].append((point.step, pytest.approx(point.value)))  # TensorBoard keeps float32
    return dict(found)


def test_what_there_is_is_written_and_called_again_only_what_is_new(target: Target) -> None:
    first = target.call(*HISTORY[:7])
    assert target.look() == expected(*HISTORY[:7])
    more = target.call(*HISTORY)
    assert target.look() == expected(*HISTORY)
    again = target.call(*HISTORY)
    assert target.look() == expected(*HISTORY)
    if not target.form.startswith("wandb"):  # offline nothing can be resumed: each call writes all
        written = [sum(len(row.figures) for row in past(RUN, said).rows) for said in (HISTORY[:7], HISTORY)]
        assert [first, first + more, again] == [*written, 0]


@pytest.mark.parametrize("between", [False, True], ids=["while it follows", "between two calls"])
def test_steps_that_were_trained_again_are_not_on_the_curve(target: Target, between: bool) -> None:
    said = [*HISTORY, *FORK]
    if between:
        target.call(*HISTORY, evaluated_dead())
        target.call(*said, evaluated_dead())
    else:
        sink = connect(target.form, RUN, PARAMETERS)
        held = marks(sink)
        for count in (len(HISTORY), len(said)):
            update(sink, past(RUN, said[:count]), held)
        sink.close(RunState.running)
    assert target.look() == expected(*said)
    assert target.look()["train/loss"] == [(1, 1.0), (2, 2.0), (3, 3.25)]
    target.call(*said)
    assert target.look() == expected(*said)


def evaluated_dead() -> Any:
    return heard(evaluated("of a dead version", 4, 0.75), first=1500.0)[0]


def test_an_evaluation_that_comes_late_stands_at_its_step_and_hides_nothing(target: Target) -> None:
    said = [*HISTORY, *heard(evaluated("last", 4, 0.75), first=2500.0)]
    target.call(*said)
    target.call(*said, *LATE, state=RunState.finished)
    assert target.look() == expected(*said, *LATE)
    assert target.look()["eval/pass_at_1"] == [(0, 0.25), (1, 0.5), (4, 0.75)]


def test_times_are_those_of_the_messages(target: Target) -> None:
    target.call(*HISTORY)
    sink = connect(target.form, RUN, PARAMETERS)
    times = {point.at for point in sink.held() if point.name == MARKERS[Kind.eval]}
    sink.close(RunState.running)
    assert times == ({1002.0} if not target.form.startswith("wandb") else set())


@given(st.integers(0, 10_000), st.integers(0, 50), st.lists(st.integers(1, 200), max_size=6), st.integers(0, 10_000))
def test_however_often_it_is_called_and_whatever_was_heard_by_then_the_curve_is_that_of_the_whole_past(
    seed: int, length: int, cuts: list[int], mixed: int
) -> None:
    said = overtaking(life(seed, length), mixed)
    memory = Memory()
    for cut in [*sorted(cuts), len(said)]:
        update(memory, past(RUN, said[:cut]), marks(memory))  # a set of its own each time: another call
    whole = [point for row in past(RUN, said).rows for point in row.points]

    def lasting(points: list[Point]) -> list[Point]:
        return sorted(point for point in points if not point.name.startswith("run/"))

    assert lasting(memory.points) == lasting(whole)
    states = [(p.value, p.at) for p in memory.points if p.name == "run/state"]
    assert sorted(states) == sorted((p.value, p.at) for p in whole if p.name == "run/state")


def test_nothing_is_written_where_nothing_is_new_and_nothing_discarded_where_nothing_died() -> None:
    memory = Memory()
    for _ in range(3):
        update(memory, past(RUN, HISTORY), marks(memory))
    assert memory.calls == ["write"]
    update(memory, past(RUN, [*HISTORY, *FORK]), marks(memory))
    assert memory.calls == ["write", "discard 2", "write"]


def test_a_sink_is_what_the_protocol_says() -> None:
    sinks: list[Sink] = [Memory()]
    assert sinks[0].held() == []


# The file of lines.


def test_several_runs_share_a_file_and_a_row_that_a_crash_cut_off_is_written_again(tmp_path: Path) -> None:
    file = tmp_path / "figures.jsonl"
    target = Target(f"jsonl:{file}", lambda: _lines(file))
    other = Lines(file, "r-other")
    other.write(past(RUN, HISTORY).rows[:2])
    other.close(RunState.running)
    target.call(*HISTORY)
    whole = file.read_bytes()
    for cut in (3, 90, 250):
        file.write_bytes(whole[:-cut])
        target.call(*HISTORY)
        assert _lines(file) == expected(*HISTORY)
    target.call(*HISTORY, *FORK)
    assert _lines(file) == expected(*HISTORY, *FORK)
    assert len(_lines(file, "r-other")) == len({p.name for row in past(RUN, HISTORY).rows[:2] for p in row.points})


def test_a_file_of_something_else_is_left_alone_and_named(tmp_path: Path) -> None:
    file = tmp_path / "notes.jsonl"
    file.write_text('{"a": 1}\n')
    with pytest.raises(NotWritten, match=r"notes\.jsonl, line 1: .*give a file that `etude figures` wrote"):
        connect(f"jsonl:{file}", RUN, {})
    assert file.read_text() == '{"a": 1}\n'


def test_two_at_once_do_not_write_one_file(tmp_path: Path) -> None:
    sink = connect(f"jsonl:{tmp_path}/f", RUN, {})
    with pytest.raises(NotWritten, match="another `etude figures` writes there"):
        connect(f"jsonl:{tmp_path}/f", RUN, {})
    sink.close(RunState.running)
    connect(f"jsonl:{tmp_path}/f", RUN, {}).close(RunState.running)


# What cannot be used.


@pytest.mark.parametrize("form", ["", "tensorboard", "wandb:", "prometheus:x", "jsonl"])
def test_a_target_of_another_form_is_refused_with_those_that_there_are(form: str) -> None:
    with pytest.raises(NotWritten, match="--to: found") as error:
        connect(form, RUN, {})
    assert all(allowed in str(error.value) for allowed in FORMS)


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow"])
@pytest.mark.parametrize("folder", [False, True], ids=["nothing", "a folder of that name"])
def test_a_package_that_is_missing_is_told_with_its_extra(
    package: str, folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if folder:
        (tmp_path / package).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(NotWritten) as error:
        connect(f"{package}:{tmp_path}/x", RUN, {})
    assert f"the package {package} is not installed here; pip install 'etude[{package}]'" in str(error.value)
    assert not (tmp_path / "x").exists()


# TensorBoard, MLflow, Weights & Biases.


def test_tensorboards_quick_reader_shows_the_same_curve_and_the_hyper_parameters_are_there(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    target = Target(f"tensorboard:{tmp_path}", dict)
    said = [*HISTORY, evaluated_dead()]
    for more in (FORK, LATE, heard(evaluated("twice", 2, 0.1), first=4000.0)):
        target.call(*said)
        said += more
    target.call(*said)
    found: dict[str, dict[int, float]] = defaultdict(dict)
    described = 0
    for path in sorted((tmp_path / RUN).glob("*tfevents*")):
        for event in loader.LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                described += value.tag == "_hparams_/session_start_info"
                if value.HasField(
                    "simple_value"
                ):  # as its reservoirs do: what comes after drops the same and later steps
                    kept = {step: old for step, old in found[value.tag].items() if step < event.step}
                    found[value.tag] = {**kept, event.step: value.simple_value}
    wanted = {name: dict(points) for name, points in expected(*said).items()}
    assert found == wanted
    assert described == 1


def test_mlflow_has_the_parameters_the_state_and_a_run_per_lineage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    target = Target(f"mlflow:{uri}", dict)
    target.call(*HISTORY)
    target.call(*HISTORY, *FORK)
    target.call(*HISTORY, *FORK, *LATE, state=RunState.finished)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("mine").experiment_id
    runs = sorted(client.search_runs([experiment]), key=lambda run: run.info.start_time)
    assert [run.data.tags.get("etude.superseded") for run in runs] == ["steps after 2 are dead", None]
    assert [run.info.status for run in runs] == ["KILLED", "FINISHED"]
    assert all(run.data.params == {name: str(value) for name, value in PARAMETERS.items()} for run in runs)


def test_more_than_fits_into_one_request_of_mlflow_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow.exceptions")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    said = heard(*(step(n, n, **{f"x{i}": float(i) for i in range(1500 if n == 1 else 30)}) for n in range(1, 60)))
    Target(f"mlflow:{uri}", dict).call(*said)
    assert _mlflow(uri) == expected(*said)


def _lines(file: Path, run: str = RUN) -> Curves:
    found: Curves = defaultdict(list)
    for line in sorted(map(json.loads, file.read_text().splitlines()), key=lambda line: (line["step"], line["at"])):
        if line["run"] == run:
            found[line["name"]].append((line["step"], line["value"]))
    return dict(found)


def _events(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        name: sorted((one.step, one.value) for one in sorted(found.Scalars(name), key=lambda one: one.step))
        for name in found.Tags()["scalars"]
    }


def _mlflow(uri: str) -> Curves:
    """Of the run that nothing supersedes."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("etude").experiment_id
    (run,) = [run for run in client.search_runs([experiment]) if "etude.superseded" not in run.data.tags]
    return {
        name: [
            (one.step, one.value)
            for one in sorted(
                client.get_metric_history(run.info.run_id, name), key=lambda one: (one.step, one.timestamp)
            )
        ]
        for name in run.data.metrics
    }


def _offline(folder: Path) -> Curves:
    """Of the newest offline run, which replaces the others when it is uploaded."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # as the end of the process does: what was written is in the file then
    newest = max(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert newest.name == f"run-{RUN}.wandb"
    rows = []
    for data in _records(newest.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = (
                (item.key or ".".join(item.nested_key), json.loads(item.value_json)) for item in record.history.item
            )
            rows.append(dict(items))
    found: Curves = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["step"], row["_timestamp"])):
        for name, value in row.items():
            if "/" in name:
                found[name].append((row["step"], value))
    return dict(found)


def _records(data: bytes) -> Iterator[bytes]:
    """Of W&B's log: after a header of 7 bytes blocks of 32 KiB; a chunk has checksum, length and kind (1 whole, 4 the last)."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""
