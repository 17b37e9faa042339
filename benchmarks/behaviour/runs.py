"""One run of the demo's platform: a state folder, services and ports of its own, driven by the product's commands.

    etude up → etude start → (CHANGE of the practice) etude reconfigure → the end of practice → the services end

Nothing here reaches into a service. When something happened is read from the run's ledger, which anybody may read.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.exc import DBAPIError

from benchmarks.behaviour import term
from shared import ledger
from shared.contracts.life import RunState
from shared.ledger.models import Run
from shared.process import end_with

LOOK_S = 1.0
CHANGE = (
    0.4  # of the practice, after which `later` comes: the policy needs more time to react than it takes to be measured
)
READY_S = 60.0  # for the supervisor to hold its folder; a busy machine imports slowly
END_S = 25.0  # for the services to end
COMMAND_S = 180.0  # for a command
PACKAGE = "etude_benchmark_terms"


class Failed(RuntimeError):
    """A command of the product failed; the text holds what it said."""


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm of an experiment: what it changes in the demo. `start`: changes to the run's configuration (docs/run.md). `later`:
    those that `etude reconfigure` brings in mid-run; None: nothing changes."""

    name: str
    start: dict[str, Any] = field(default_factory=dict)
    later: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """The folder and the cores of a run. `cores`: the run is pinned to these; empty: not pinned. `deadline`: on time.monotonic."""

    state: Path
    pack: Path
    cores: tuple[int, ...]
    deadline: float


def write_package(folder: Path) -> None:
    """Write the metadata of a package that brings the experiment's term by an entry point, as an installed package has it."""
    info = folder / f"{PACKAGE}-0.1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[etude.reward_terms]\n{term.NAME} = benchmarks.behaviour.term:find\n")
    found = importlib.metadata.Distribution.at(info).entry_points
    assert [point.name for point in found] == [term.NAME]


def play(arm: Arm, seed: int, minutes: float, place: Place) -> None:
    """Run one arm with one seed to its end or to the deadline. It leaves the state folder. Raises Failed."""
    place.state.mkdir(parents=True)
    write_package(place.state / "package")
    (place.state / "start.json").write_text(json.dumps(arm.start))
    with _services(place) as environment:
        _etude(
            environment, "start", "--pack", str(place.pack.resolve()), "--seed", str(seed), "--minutes", f"{minutes:g}",
            "--config", str(place.state / "start.json"), "--state", str(place.state),
        )  # fmt: skip
        with contextlib.closing(_Ledger(place.state)) as record:
            if arm.later is not None and record.until(minutes * 60 * CHANGE, place.deadline):
                path = place.state / "later.json"
                path.write_text(json.dumps(arm.later))
                words = ("--config", str(path), "--reason", f"benchmarks.behaviour: {arm.name}")
                _etude(environment, "reconfigure", *words, "--state", str(place.state))
            record.until(None, place.deadline)


@contextlib.contextmanager
def _services(place: Place) -> Iterator[dict[str, str]]:
    """`etude up` as a child, which ends with this process. Yields the environment for further commands."""
    paths = [str(Path.cwd()), str((place.state / "package").resolve()), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    parent = os.getpid()

    def prepare() -> None:
        end_with(parent)()
        if place.cores:
            os.sched_setaffinity(0, place.cores)

    with (place.state / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [sys.executable, "-m", "etude.cli", "up", "--base-port", "0", "--state", str(place.state)],
            stdout=log, stderr=log, env=environment, preexec_fn=prepare,
        )  # fmt: skip
        try:
            until = time.monotonic() + READY_S
            while not (place.state / "supervisor.json").exists():
                if up.poll() is not None or time.monotonic() > until:
                    raise Failed(f"etude up: {(place.state / 'up.log').read_text()[-2000:]}")
                time.sleep(0.2)
            yield environment
        finally:
            up.send_signal(signal.SIGTERM)
            try:
                up.wait(END_S)
            except subprocess.TimeoutExpired:
                up.kill()
                up.wait()


def _etude(environment: dict[str, str], *words: str) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "etude.cli", *words],
            env=environment, capture_output=True, text=True, timeout=COMMAND_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Failed(f"etude {words[0]}: not done within {COMMAND_S:.0f} s") from None
    if done.returncode:
        raise Failed(f"etude {words[0]}: exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


class _Ledger:
    """The ledger of a state folder with one run."""

    def __init__(self, state: Path) -> None:
        self._url, self._engine = f"sqlite:///{state / 'ledger.db'}", None

    def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()

    def until(self, practised: float | None, deadline: float) -> bool:
        """Wait until so many seconds have passed since the first request, or, with None, until the run is finished. Return False
        where the deadline came first, or the run ended."""
        while time.monotonic() < deadline:
            first, finished = self._look()
            if finished:
                return practised is None
            if practised is not None and first is not None and time.time() - first >= practised:
                return True
            time.sleep(LOOK_S)
        return False

    def _look(self) -> tuple[float | None, bool]:
        try:
            if self._engine is None:
                self._engine: Engine | None = ledger.connect(self._url, read_only=True)
            with self._engine.begin() as connection:
                row = connection.execute(select(Run.first_request_at, Run.state)).first()
        except (DBAPIError, ledger.LedgerMissing, ledger.LedgerUnavailable):  # it is not made yet, or busy
            return None, False
        return (None, False) if row is None else (row[0], row[1] == RunState.finished)
