"""A whole run on a repository: two scripted attempts, one of them right, hidden tests, and one step of the trainer.

Every service is a process of its own on the embedded bus and the object directory: curator (with its gate), scheduler, rollout
worker, reward, grader, trainer. Only the engine is a stand-in. It answers `/generate` with ids that the run's own renderer
writes, and gives each of them log-probability -0.5. It serves whatever the trainer has published, without loading it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from etude.letters import NOBODY
from services.rollout.byhand.scripted import CallSaid, Reply, written
from services.scheduler.audit import audit
from services.trainer import cli as weights_cli
from shared import bus as buses
from shared import ledger, weights
from shared import objects as stores
from shared.bus import Bus, dead_letters
from shared.contracts import messages as m
from shared.contracts import topics
from shared.contracts.run import Ref, RunConfig, Sampling, ScheduleConfig
from shared.contracts.trajectory import Trajectory, unpack
from shared.model import ModelConfig, Transformer, save_checkpoint
from shared.problems.pack import write
from shared.renderers import Renderer
from shared.renderers.registry import load_renderer
from shared.settings import ServiceSettings
from shared.weights.checkpoint_objects import upload_directory
from tests.contract.sandboxes import NO_BWRAP
from tests.integration.engine_platform import CONFIG
from tests.integration.rollout_platform import RUN, Engine
from tests.laboratory import SOLUTION, Laboratory, hidden
from tests.patience import patient
from tests.renderer_checkpoints import FAMILIES, checkpoint, tokenizer_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)]

SERVICES = ("curator", "scheduler", "rollout", "reward", "reward.grader", "trainer")
# Not web_search: it needs a service of its own (tests/integration/test_repository_attempt.py).
TOOLS = ["read", "list", "grep", "search", "edit", "write", "shell", "todo", "submit"]
FORMAT, CONTEXT = "qwen2_5", 16384
RUN_S, DRAIN_S = 240.0, 60.0  # on a machine that is busy with something else
M = TypeVar("M", bound=msgspec.Struct)


def turn(text: str, *calls: tuple[str, dict[str, Any]]) -> Reply:
    return Reply(text=text, calls=[CallSaid(name=name, arguments=arguments) for name, arguments in calls])


MINE = "from calc import scaled\n\n\ndef test_km():\n    assert scaled(2, 'km') == 2000\n"
MEND_ADD = ("edit", {"path": "calc.py", "old": "a - b", "new": "a + b"})
CAREFUL = [
    turn("I look around first.", ("list", {}), ("read", {"path": "calc.py"}), ("grep", {"pattern": "FACTORS"})),
    turn("", ("search", {"query": "scale by unit factors"}), ("todo", {"open": ["add", "km"]})),
    turn("", MEND_ADD, ("read", {"path": "calc.py", "start": 6, "end": 7})),
    turn("", ("edit", {"path": "units.py", "old": '"km": 100,', "new": '"km": 1000,'})),
    turn("", ("write", {"path": "tests/test_mine.py", "content": MINE})),
    turn("", ("shell", {"command": "cd tests && pytest -q -p no:cacheprovider ."})),
    turn("", ("todo", {"open": [], "done": ["add", "km"]})),
    turn("", ("submit", {})),
]
HASTY = [turn("I know the fault.", MEND_ADD), turn("", ("submit", {}))]  # the second file stays as it was


class Script:
    """A policy as a function of the prompt. Openings are answered by the first turn of each plan in rotation; later turns
    follow the plan whose first words stand in the prompt."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer, self.openings = renderer, itertools.cycle([CAREFUL, HASTY])

    def __call__(self, prompt: list[int]) -> list[int]:
        said = self.renderer.text(prompt)
        number = said.count("<|im_start|>assistant") - 1
        plan = next(plan for plan in (CAREFUL, HASTY) if plan[0].text in said) if number else next(self.openings)
        return written(plan[number], self.renderer)


def make_base(directory: Path) -> Path:
    """A tiny checkpoint with random weights that speaks ChatML."""
    torch.manual_seed(0)
    vocabulary = tokenizer_of(FAMILIES[FORMAT][0]).get_vocab_size()
    save_checkpoint(Transformer(ModelConfig.from_dict({**CONFIG, "vocab_size": vocabulary})), directory)
    return checkpoint(directory, FORMAT, {"format": "chatml", "context": CONTEXT, "tools": "short"})


class World:
    """The stores of one machine, and everything that is said on its bus."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.settings = ServiceSettings(state=state)
        self.bus: Bus = buses.connect(self.settings.bus_url, client="test")
        self.objects = stores.connect(self.settings.objects_url)
        self.heard: list[Any] = []

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def listen(self, engine: Engine) -> None:
        """Hear all topics; play the replica that follows the published versions."""
        async for delivery in self.bus.deliveries(list(topics.TOPICS.values()), None, 64):
            self.heard.append(delivery.message)
            delivery.done()
            if isinstance(delivery.message, m.PolicyPublished):
                engine.serial = delivery.message.serial
                await self.bus.publish(topics.POLICIES_APPLIED, engine.name, engine.applied())

    async def start(self, base: Ref) -> RunConfig:
        """Start a run of one problem, one group of two attempts and one step."""
        problem = Laboratory(self.state).problem(tools=TOOLS)
        config = RunConfig(
            run=RUN,
            base=base,
            pack=self.objects.put("packs/public", write([problem])),
            pack_hidden=self.objects.put("packs/hidden", write([hidden()])),
            sampling=Sampling(max_turns=16, max_completion_tokens=CONTEXT),
            schedule=ScheduleConfig(group_size=2, group_min=2, groups_per_step=1, max_steps=1),
        )
        ref = self.objects.put(f"runs/{RUN}/config.json", msgspec.json.encode(config))
        await self.bus.publish(topics.RUNS_COMMANDS, RUN, m.RunCommand(run=RUN, action="start", config=ref))
        return config

    async def until_finished(self, services: dict[str, subprocess.Popen[bytes]]) -> None:
        async with asyncio.timeout(patient(RUN_S)):
            while not any(one.state == "finished" for one in self.of(m.RunStatus)):
                ended = [name for name, process in services.items() if process.poll() is not None]
                assert not ended
                await asyncio.sleep(0.05)

    async def dead_letters(self) -> int:
        letters = [dead_letters(topic) for topic in topics.TOPICS.values()]
        return sum((await self.bus.lag(letters, NOBODY)).values())

    def trajectory(self, scored: m.RolloutScored) -> Trajectory:
        return unpack(self.objects.get(scored.trajectory))


@contextlib.asynccontextmanager
async def world_of(state: Path, renderer: Renderer) -> AsyncIterator[World]:
    world = World(state)
    async with Engine(Script(renderer)).running() as engine:
        listening = asyncio.create_task(world.listen(engine))
        try:
            yield world
        finally:
            listening.cancel()
            await world.bus.close()


@contextlib.contextmanager
def running(state: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Every service as a process; their logs lie in the state directory, and are shown where the test fails."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in SERVICES:
            environment = {**os.environ, "ETUDE_STATE": str(state), "ETUDE_NAME": name, "OMP_NUM_THREADS": "1"}
            with (state / f"{name}.log").open("wb") as log:
                command = [sys.executable, "-m", f"services.{name}"]
                processes[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        yield processes
    finally:
        for name, process in processes.items():
            process.kill()
            process.wait()
            print(f"--- {name}\n{(state / f'{name}.log').read_text()[-3000:]}")


def drain(processes: dict[str, subprocess.Popen[bytes]]) -> dict[str, int]:
    """End all as an operator does; return their exit codes."""
    for process in processes.values():
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + patient(DRAIN_S)
    return {name: process.wait(max(0.1, deadline - time.monotonic())) for name, process in processes.items()}


def test_a_scripted_policy_solves_a_task_of_several_files_and_the_trainer_takes_a_step(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    base = make_base(tmp_path / "base")

    async def scenario() -> None:
        async with world_of(state, load_renderer(base)) as world:
            config = await world.start(upload_directory(world.objects, "base", base))
            with running(state) as services:
                await world.until_finished(services)
                assert await asyncio.to_thread(drain, services) == dict.fromkeys(SERVICES, 0)
            check_attempts(world)
            check_step(world)
            check_nothing_was_lost(world, config)
            assert await world.dead_letters() == 0

    asyncio.run(scenario())


def check_attempts(world: World) -> None:
    """One attempt is solved, through every tool; the other mends one of two files, and hidden tests say so."""
    hasty, careful = sorted(world.of(m.RolloutScored), key=lambda scored: scored.reward)
    assert careful.key.group == hasty.key.group
    assert careful.verdict == m.Verdict(solved=True, passed=3, total=3)
    assert hasty.verdict == m.Verdict(solved=False, passed=2, total=3)
    assert careful.stop == hasty.stop == m.StopReason.submitted
    assert careful.reward > 0 == hasty.reward
    done, short = world.trajectory(careful), world.trajectory(hasty)
    assert done.submission is not None
    assert short.submission is not None
    assert {path: done.submission.changes[path] for path in SOLUTION} == SOLUTION
    assert set(short.submission.changes) == {"calc.py"}
    (segment,) = done.segments
    assert {span.tool for span in segment.spans if span.tool} == set(TOOLS)
    assert all(span.ok for span in segment.spans)
    assert set(segment.logprobs[segment.loss_mask].tolist()) == {-0.5}
    assert careful.effort.broken_tool_calls == hasty.effort.broken_tool_calls == 0


def check_step(world: World) -> None:
    """The trainer learns from every sampled token of both attempts, and publishes weights that differ.

    Its own log-probabilities are far below the script's, so that importance weights make the step small, not zero."""
    (ready,), (committed,) = {g.group: g for g in world.of(m.GroupReady)}.values(), world.of(m.StepCommitted)
    assert len({member.reward for member in ready.members}) == 2
    assert set(committed.groups) == {ready.group}
    trajectories = [world.trajectory(scored) for scored in world.of(m.RolloutScored)]
    sampled = sum(int(segment.loss_mask.sum()) for one in trajectories for segment in one.segments)
    metrics = committed.metrics
    assert metrics["tokens_sampled"] == sampled > 0
    assert (metrics["attempts"], metrics["solved_share"], metrics["signal_share"]) == (2, 0.5, 1)
    assert metrics["grad_norm"] > 0
    assert np.isfinite(metrics["loss"])
    base, stepped = world.of(m.PolicyPublished)
    assert (base.serial, stepped.serial, committed.serial) == (0, 1, 1)
    before, after = (weights.read_manifest(world.objects, one.manifest).checksum for one in (base, stepped))
    assert before != after
    verify = CliRunner().invoke(weights_cli.app, ["verify"], env={"ETUDE_STATE": str(world.state)})
    assert verify.exit_code == 0, verify.output
    lines = [msgspec.json.decode(line) for line in verify.output.splitlines() if line.startswith("{")]
    assert {line["what"]: line["equal"] for line in lines} == {"chain": True, "masters": True}


def check_nothing_was_lost(world: World, config: RunConfig) -> None:
    """No attempt was asked for twice, lost or failed, in the ledger and on the bus; nothing was quarantined."""
    engine = ledger.connect(world.settings.ledger_url, read_only=True)
    try:
        report = audit(engine, RUN, max_staleness=config.schedule.max_staleness)
    finally:
        engine.dispose()
    assert report.sound, report.findings
    assert (report.state, report.groups, report.attempts) == ("finished", {"trained": 1}, {"grouped": 2})
    assert not report.reasons
    assert [request.key.epoch for request in world.of(m.RolloutRequested)] == [0, 0]
    assert not world.of(m.RolloutFailed)
    assert not world.of(m.GroupQuarantined)
    assert not [alert for alert in world.of(m.Alert) if alert.severity != "info"]
