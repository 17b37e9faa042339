"""`etude figures` beside a bus and an object store: what is there, what comes while it follows, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from etude import commands
from etude.figures import export, sink
from shared import bus as buses
from shared import objects as stores
from shared.bus import Bus
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.run import Ref, RunConfig
from shared.settings import ServiceSettings
from tests.patience import patient
from tests.ruling import status
from tests.unit.etude.figure_messages import REF, RUN, begun, evaluated, published, step, word

OTHER = "r-20260101T000100-bbbb"
TOPICS = {
    m.RunStatus: t.RUNS_STATE,
    m.StepCommitted: t.STEPS_COMMITTED,
    m.IncarnationStarted: t.STEPS_COMMITTED,
    m.PolicyPublished: t.POLICIES_PUBLISHED,
    m.EvalFinished: t.EVALS_FINISHED,
}
STEPS = [published(0, 0), *(said for n in (1, 2, 3) for said in (published(n, n), step(n, n))), evaluated("e", 3)]


class Platform:
    def __init__(self, state: Path) -> None:
        self.state, self.file = state, state / "figures.jsonl"
        self._settings = ServiceSettings(state=state)

    def stored(self, run: str = RUN) -> Ref:
        config = RunConfig(run=run, base=REF, pack=REF, pack_hidden=REF)
        return stores.connect(self._settings.objects_url).put(f"runs/{run}/config.json", msgspec.json.encode(config))

    def start(self, run: str = RUN) -> m.RunStatus:
        return status(run, "running", self.stored(run))

    def say(self, *messages: Any) -> None:
        async def publish(bus: Bus) -> None:
            await bus.publish_many([(TOPICS[type(message)], message.run, message) for message in messages])
            await bus.close()

        asyncio.run(publish(buses.connect(self._settings.bus_url, client="test")))

    def etude(self, *words: str) -> Result:
        app = typer.Typer()
        commands.register(app)
        environment = {"COLUMNS": "300", "ETUDE_STATE": str(self.state)}
        return CliRunner().invoke(app, ["figures", *words], env=environment)

    def steps(self) -> list[tuple[int, float]]:
        lines = [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []
        return [(line["step"], line["value"]) for line in lines if line["name"] == "train/loss"]

    def until(self, steps: Sequence[tuple[int, float]]) -> None:
        deadline = time.monotonic() + patient(60)
        while self.steps() != list(steps) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.steps() == list(steps)


@pytest.fixture
def platform(tmp_path: Path, platform_stores: None) -> Platform:
    return Platform(tmp_path)


def test_what_there_is_is_written_once_also_when_it_is_called_again(platform: Platform) -> None:
    platform.say(platform.start(), *STEPS)
    first = platform.etude("--to", f"jsonl:{platform.file}")
    assert (first.exit_code, first.stderr) == (0, "")
    assert f"{RUN} is running: 3 steps, 1 evaluations; 18 points were new to jsonl:{platform.file}." in first.stdout
    platform.say(step(4, 4), begun(1, 2), step(3, 5, 1))
    for points in ("5 points", "0 points"):
        again = platform.etude(RUN, "--to", f"jsonl:{platform.file}")
        assert (again.exit_code, points in again.stdout) == (0, True), again.output
        assert platform.steps() == [(1, 1.0), (2, 2.0), (3, 3.25)]


def test_it_follows_until_the_run_is_finished(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "GATHER_S", 0.05)
    platform.say(platform.start(), *STEPS[:3])
    failed: list[BaseException] = []

    def meanwhile() -> None:
        try:
            platform.until([(1, 1.0)])
            platform.say(*STEPS[3:])
            platform.until([(1, 1.0), (2, 2.0), (3, 3.0)])
        except BaseException as error:
            failed.append(error)
        finally:
            platform.say(word("finished", reason="enough"))

    trainer = threading.Thread(target=meanwhile)
    trainer.start()
    done = platform.etude("--to", f"jsonl:{platform.file}", "--follow")
    trainer.join()
    assert not failed
    assert (done.exit_code, f"{RUN} is finished: 3 steps, 1 evaluations" in done.stdout) == (0, True), done.output


def test_what_the_run_learns_with_is_handed_over_and_may_be_missing(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[sink.Parameters] = []
    connect: Callable[..., sink.Sink] = sink.connect

    def noted(target: str, run: str, parameters: sink.Parameters) -> sink.Sink:
        handed.append(parameters)
        return connect(target, run, parameters)

    monkeypatch.setattr(sink, "connect", noted)
    platform.say(platform.start(), status(OTHER, "running", REF))
    platform.etude(RUN, "--to", f"jsonl:{platform.file}")
    without = platform.etude(OTHER, "--to", f"jsonl:{platform.file}")
    assert (handed[0]["run"], handed[0]["train.learning_rate"], handed[0]["pack"]) == (RUN, 5e-4, REF.key)
    assert (without.exit_code, handed[1]) == (0, {})
    assert f"What the run learns with is left out: {REF.key}: " in without.stdout


def test_a_run_that_is_not_known_or_not_named_is_refused_with_those_that_there_are(platform: Platform) -> None:
    platform.say(platform.start(), platform.start(OTHER), *STEPS)
    for words, text in (
        ([], f"RUN: left out, and there are 2 runs; name one, the newest are {OTHER}, {RUN}"),
        (["r-none"], f"run 'r-none': not known here; the newest are {OTHER}, {RUN}"),
        ([RUN, "--to", "paper:x"], "--to: found 'paper:x'; allowed: tensorboard:DIR, "),
    ):
        refused = platform.etude("--to", f"jsonl:{platform.file}", *words)
        assert (refused.exit_code, text in refused.stderr) == (1, True), refused.output
    assert not platform.file.exists()


def test_where_no_run_was_started_that_is_said_and_no_bus_is_made(tmp_path: Path) -> None:
    app = typer.Typer()
    commands.register(app)
    words = ["figures", "--to", f"jsonl:{tmp_path}/f", "--state", str(tmp_path / "new")]
    done = CliRunner().invoke(app, words, env={"ETUDE_STATE": ""})
    assert (done.exit_code, "no run was started here. `etude start --state" in done.stderr) == (1, True), done.output
    assert not list(tmp_path.iterdir())


def test_ctrl_c_ends_following_and_what_was_written_stays(tmp_path: Path) -> None:
    platform = Platform(tmp_path)
    platform.say(platform.start(), *STEPS[:3])
    words = [sys.executable, "-m", "etude.cli", "figures", "--to", f"jsonl:{platform.file}", "--follow"]
    environment = {**os.environ, "ETUDE_STATE": str(tmp_path)}
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            platform.until([(1, 1.0)])
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=patient(60))
        finally:
            process.kill()
    assert (process.returncode, said) == (0, "What was written stays; called again it goes on.\n")
    platform.say(*STEPS[3:])
    platform.etude("--to", f"jsonl:{platform.file}")
    assert platform.steps() == [(1, 1.0), (2, 2.0), (3, 3.0)]
