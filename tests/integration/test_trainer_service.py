"""The trainer as a process: messages over the embedded bus, killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

from synthetic import RUN, group, put_config, run_config
from typer.testing import CliRunner

from services.trainer import cli
from shared import bus as buses
from shared import weights
from shared.bus import Bus
from shared.contracts.messages import (
    Alert,
    GroupQuarantined,
    GroupReady,
    IncarnationStarted,
    PolicyPublished,
    Rollback,
    StepCommitted,
)
from shared.contracts.run import Ref
from shared.contracts.topics import (
    ALERTS,
    GROUPS_QUARANTINED,
    GROUPS_READY,
    POLICIES_PUBLISHED,
    RUNS_STATE,
    STEPS_COMMITTED,
)
from shared.objects import Objects, connect
from tests.patience import eventually, patient, quiet
from tests.ruling import status

pytestmark = pytest.mark.slow
PATIENCE_S = 120


class Process:
    """`python -m services.trainer` on a state directory of the test's own."""

    def __init__(self, state: Path, name: str = "trainer-test") -> None:
        self.state = state
        environment = {**os.environ, "ETUDE_STATE": str(state), "ETUDE_NAME": name, "OMP_NUM_THREADS": "1"}
        environment["ETUDE_LOG_LEVEL"] = "DEBUG"
        self.log = (state / "trainer.log").open("ab")
        command = [sys.executable, "-m", "services.trainer"]
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def drain(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patient(PATIENCE_S))


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "state"
    directory.mkdir()
    yield directory
    log = directory / "trainer.log"
    if log.exists():
        print(log.read_text()[-4000:])


class World:
    """What the other services would hear."""

    def __init__(self, bus: Bus, objects: Objects, state: Path) -> None:
        self.bus, self.objects, self._state = bus, objects, state
        self.config: Ref | None = None
        self.trainers: list[Process] = []
        self.heard: list[msgspec.Struct] = []
        self.task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        topics = [STEPS_COMMITTED, POLICIES_PUBLISHED, GROUPS_QUARANTINED, GROUPS_READY, ALERTS]
        async for delivery in self.bus.deliveries(topics, group=None, max_in_flight=64):
            self.heard.append(delivery.message)
            delivery.done()

    def of(self, kind: type) -> list:
        return [message for message in self.heard if isinstance(message, kind)]

    async def until(self, condition: Callable[[], object]) -> None:
        try:
            await eventually(condition, seconds=PATIENCE_S)
        except TimeoutError as late:
            raise AssertionError([type(message).__name__ for message in self.heard]) from late

    async def knows(self, state: str, *, drain: bool) -> None:
        """Wait until the trainer has heard that the run is in that state."""

        def heard() -> bool:
            lines = (self._state / "trainer.log").read_text().splitlines()
            told = [msgspec.json.decode(line) for line in lines if "status_heard" in line]
            return bool(told) and (told[-1]["state"], told[-1]["drain"]) == (state, drain)

        await eventually(heard, f"the trainer to hear {state}", PATIENCE_S)

    async def acknowledged(self) -> None:
        """Wait until a trainer has heard of all groups that were announced."""

        async def none_left() -> bool:
            return not sum((await self.bus.lag([GROUPS_READY], "trainer")).values())

        await eventually(none_left, "the trainer to acknowledge all groups", PATIENCE_S)

    def start_trainer(self, name: str = "trainer-test") -> None:
        self.trainers.append(Process(self._state, name))

    async def say(self, state: str, *configs: Ref, **more: object) -> None:
        await self.bus.publish(RUNS_STATE, RUN, status(RUN, state, *configs, **more))

    async def announce(self, *numbers: int) -> None:
        for number in numbers:
            await self.bus.publish(GROUPS_READY, RUN, self.ready(number))

    def ready(self, number: int) -> GroupReady:
        """Return the group's announcement, to the newest trainer that was heard of, as the scheduler makes it."""
        newest = max((begun.incarnation for begun in self.of(IncarnationStarted)), default=0)
        return msgspec.structs.replace(group(self.objects, number), incarnation=newest)


@contextlib.asynccontextmanager
async def started(state: Path, tmp_path: Path) -> AsyncIterator[World]:
    """Start a run with one trainer, and wait for its first version. Kill all trainers at the end."""
    objects = connect(f"file:{state / 'objects'}")
    bus = buses.connect(f"sqlite:{state / 'bus.db'}", client="test")
    world = World(bus, objects, state)
    try:
        world.config = put_config(objects, run_config(objects, tmp_path / "base"))
        await world.say("running", world.config)
        world.start_trainer()
        await world.until(lambda: len(world.of(PolicyPublished)) == 1)
        yield world
    finally:
        for trainer in world.trainers:
            trainer.kill()
        world.task.cancel()
        await bus.close()


def test_kill_minus_nine_between_checkpoints_trains_every_group_once(state: Path, tmp_path: Path) -> None:
    """Steps 1 to 3, checkpoint at 2, kill; the ledger announces everything again; steps 3 and 4; SIGTERM; resume."""

    async def scenario() -> None:
        async with started(state, tmp_path) as world:
            await world.announce(0, 1, 2, 3, 3, 4, 5)
            await world.until(lambda: len(world.of(StepCommitted)) == 3)
            world.trainers[-1].kill()

            world.start_trainer()
            await world.until(lambda: len(world.of(IncarnationStarted)) == 2)
            assert world.of(IncarnationStarted)[-1].step == 2
            damaged = world.ready(6)
            world.objects.delete(damaged.members[0].trajectory.key)
            await world.bus.publish(GROUPS_READY, RUN, damaged)
            await world.announce(0, 1, 2, 3, 4, 5, 7, 8)
            await world.until(lambda: [c for c in world.of(StepCommitted) if (c.incarnation, c.step) == (1, 4)])
            assert world.trainers[-1].drain() == 0
            await world.until(lambda: {p.serial for p in world.of(PolicyPublished)} >= set(range(7)))
            await world.until(lambda: world.of(GroupQuarantined))

            (quarantined,) = world.of(GroupQuarantined)
            assert quarantined.group == "g-6"
            surviving = {
                c.step: set(c.groups)
                for c in world.of(StepCommitted)
                if (c.incarnation == 0 and c.step <= 2) or c.incarnation == 1
            }
            assert surviving == {1: {"g-0", "g-1"}, 2: {"g-2", "g-3"}, 3: {"g-4", "g-5"}, 4: {"g-7", "g-8"}}
            lost, again = (c for c in world.of(StepCommitted) if c.step == 3)
            assert lost.groups == again.groups
            published = {p.serial: p for p in world.of(PolicyPublished)}
            assert sorted(published) == list(range(7))
            digests = [
                weights.read_manifest(world.objects, published[s].manifest).checksum
                for s in (lost.serial, again.serial)
            ]
            assert digests[0] == digests[1]  # the same groups gave the same weights, bit for bit

            verify = CliRunner().invoke(cli.app, ["verify"], env={"ETUDE_STATE": str(state)})
            assert verify.exit_code == 0, verify.output
            lines = [msgspec.json.decode(line) for line in verify.output.splitlines() if line.startswith("{")]
            assert {line["what"]: line["equal"] for line in lines} == {"chain": True, "masters": True}
            unasked = CliRunner().invoke(
                cli.app, ["verify", "--engine", "http://127.0.0.1:9"], env={"ETUDE_STATE": str(state)}
            )
            assert unasked.exit_code == 1, "an engine that does not answer is not verified"

    asyncio.run(scenario())


def test_a_paused_run_trains_what_is_complete_a_held_one_does_not_and_both_go_on(state: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(state, tmp_path) as world:
            await world.say("paused")
            await world.knows("paused", drain=True)
            await world.announce(0, 1, 2)
            await world.until(lambda: len(world.of(StepCommitted)) == 1)
            # Nothing else is complete, so the step is safe in a checkpoint although none is due.
            await world.until(lambda: any("/checkpoints/" in key for key in world.objects.list(f"runs/{RUN}/")))
            await world.say("paused", drain=False)
            await world.knows("paused", drain=False)
            await world.announce(3)
            await world.acknowledged()
            await quiet(1.0, "a held run trains groups that are complete")
            assert len(world.of(StepCommitted)) == 1
            await world.say("running")
            await world.until(lambda: len(world.of(StepCommitted)) == 2)
            assert [set(c.groups) for c in world.of(StepCommitted)] == [{"g-0", "g-1"}, {"g-2", "g-3"}]

    asyncio.run(scenario())


def test_a_held_run_goes_back_to_a_version_and_on_from_there(state: Path, tmp_path: Path) -> None:
    """Three steps, pause, back to version 1, killed, started again: still there. Then resumed with other groups."""

    async def scenario() -> None:
        async with started(state, tmp_path) as world:
            await world.announce(0, 1, 2, 3, 4, 5)
            await world.until(lambda: len(world.of(StepCommitted)) == 3)
            await world.say("paused", drain=False)
            await world.say("paused", drain=False, rollback=Rollback(99, "nowhere"))
            await world.until(lambda: any(a.name == "rollback_refused" for a in world.of(Alert)))
            await world.say("paused", drain=False, rollback=Rollback(1, "back"))
            await world.until(lambda: len(world.of(PolicyPublished)) == 5)
            back = world.of(PolicyPublished)[-1]
            assert (back.incarnation, back.step, back.parent) == (1, 1, -1)
            digests = [
                weights.read_manifest(world.objects, p.manifest).checksum
                for p in world.of(PolicyPublished)
                if p.serial in (1, back.serial)
            ]
            assert digests[0] == digests[1]
            world.trainers[-1].kill()
            world.start_trainer()
            await world.until(lambda: len(world.of(PolicyPublished)) == 6)
            again = world.of(PolicyPublished)[-1]
            assert (again.incarnation, again.step) == (2, 1)
            await world.say("running", rollback=Rollback(1, "back"))
            await world.announce(2, 3)
            await world.until(lambda: [c for c in world.of(StepCommitted) if (c.incarnation, c.step) == (2, 2)])

    asyncio.run(scenario())


def test_an_heir_gets_the_groups_that_its_living_predecessor_heard_of(state: Path, tmp_path: Path) -> None:
    """Two trainers live. The old one owns the groups' partition, hears what is meant for the new one, and stands aside: it is up,
    not ready, and leaves the run to the other."""

    async def scenario() -> None:
        async with started(state, tmp_path) as world:
            await world.announce(0)
            await world.acknowledged()  # and it waits for a second group to make a step
            world.start_trainer("trainer-heir")
            await world.until(lambda: len(world.of(IncarnationStarted)) == 2)
            for number in (0, 1):  # as the scheduler does: all that waits, to the new incarnation
                ready = msgspec.structs.replace(group(world.objects, number), incarnation=1)
                await world.bus.publish(GROUPS_READY, RUN, ready)
            await world.until(lambda: len(world.of(StepCommitted)) == 1)
            (committed,) = world.of(StepCommitted)
            assert (committed.incarnation, set(committed.groups)) == (1, {"g-0", "g-1"})
            assert "superseded" in (state / "trainer.log").read_text()
            assert len(world.of(IncarnationStarted)) == 2
            assert world.trainers[0].drain() == 0

    asyncio.run(scenario())


def test_a_version_that_no_replica_can_read_is_published_again_once(state: Path, tmp_path: Path) -> None:
    """A step, its version is damaged, the word comes twice; another step."""

    async def scenario() -> None:
        async with started(state, tmp_path) as world:
            await world.announce(0, 1)
            await world.until(lambda: len(world.of(StepCommitted)) == 1)
            for _ in range(2):
                await world.say("running", damaged=1)
            await world.until(lambda: len(world.of(PolicyPublished)) == 3)
            again = world.of(PolicyPublished)[-1]
            assert (again.serial, again.parent, again.step) == (2, -1, 1)
            await world.announce(2, 3)
            await world.until(lambda: len(world.of(PolicyPublished)) == 4)  # another topic than the steps
            assert [(p.serial, p.parent) for p in world.of(PolicyPublished)] == [(0, -1), (1, 0), (2, -1), (3, 2)]

    asyncio.run(scenario())
