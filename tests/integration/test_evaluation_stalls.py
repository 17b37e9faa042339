"""An evaluation of which nothing is heard: real services, started and given up at once."""

from __future__ import annotations

import asyncio
import io
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from rich.console import Console

from etude.demo.conduct import Patience, Stalled
from etude.demo.prepare import BASE, own_pack
from etude.evaluate import measure
from etude.status import collect
from etude.supervisor import ServiceSpec, Supervisor
from tests.end_to_end.problems import write

begin = Supervisor.start


def started(supervisor: Supervisor, specs: Iterable[ServiceSpec]) -> None:
    """Returns when all of them have a process and are written down: on a busy machine the patience below is over before."""
    begin(supervisor, specs := list(specs))
    while len(collect(supervisor.state)) < len(specs):
        time.sleep(0.05)


@pytest.mark.timeout(180)
def test_an_evaluation_that_stalls_keeps_its_logs_and_names_every_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(Supervisor, "start", started)
    write(tmp_path / "mine.jsonl")
    pack = own_pack(tmp_path / "mine.jsonl", tmp_path / "pack")
    console = Console(file=io.StringIO())
    with pytest.raises(Stalled, match="a replica that serves version 0") as stall:
        asyncio.run(
            measure(BASE, pack, "held_out", samples=1, limit=1, console=console, patience=Patience(give_up_s=0.1))
        )
    services, logs = stall.value.__notes__
    for name in ("inference-0", "rollout", "reward", "grader", "evaluator"):
        assert name in services
    (kept,) = (tmp_path / "scratch").glob("etude-eval-*")
    assert f"`etude logs --state {kept}`" in logs
    assert [path.name for path in kept.iterdir()] == ["logs"]
    assert {"rollout.log", "evaluator.log"} <= {path.name for path in (kept / "logs").iterdir()}
