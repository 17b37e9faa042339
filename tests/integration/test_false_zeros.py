"""No honest solution scores 0 because its sandbox was killed: a fifth of all sandboxes are, at any moment of their lives."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import pytest

from shared.contracts.messages import Verdict
from shared.contracts.trajectory import Submission
from shared.environments import Grading, Places, Ungradable
from shared.environments.repository import RepositoryEnvironment
from shared.sandbox import SandboxUnavailable, contract
from shared.sandbox.any_loop import AnyLoopSandboxes
from shared.sandbox.bubblewrap_machine import end
from shared.sandbox.bubblewrap_sandboxes import BubblewrapSandbox, BubblewrapSandboxes
from shared.sandbox.contract import NO_NETWORK
from shared.together import together
from tests.contract.sandboxes import NO_BWRAP
from tests.laboratory import SOLUTION, Laboratory, hidden

pytestmark = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)
SHARE = 0.2
AT_A_TIME = 3


class Killing(BubblewrapSandboxes):
    """Kills a share of its machines from outside. The moment is spread over the time that sandboxes have lived so far."""

    def prepare(self, seed: int) -> None:
        self.choose, self.lives, self.killed, self.opened = random.Random(seed), [1.0], 0, 0

    async def open(
        self,
        base: contract.Base,
        limits: contract.Limits,
        network: contract.Network = NO_NETWORK,
        *,
        snapshot: contract.Snapshot | None = None,
    ) -> BubblewrapSandbox:
        sandbox = await super().open(base, limits, network, snapshot=snapshot)
        self.opened += 1
        started, close, killing = time.monotonic(), sandbox.close, None
        if self.choose.random() < SHARE:
            after = self.choose.uniform(0.0, statistics.median(self.lives[-50:]))
            killing = asyncio.create_task(self._kill(sandbox, after))

        async def closed() -> None:
            if killing is None:
                self.lives.append(time.monotonic() - started)
            else:
                killing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await killing
            await close()

        sandbox.close = closed  # type: ignore[method-assign]
        return sandbox

    async def _kill(self, sandbox: BubblewrapSandbox, after: float) -> None:
        await asyncio.sleep(after)
        machine = sandbox._place.machine
        if machine is not None and machine.alive:
            self.killed += 1
            end(machine.process)


async def verdicts(environment: RepositoryEnvironment, items: list[Grading]) -> list[tuple[Verdict, int]]:
    """Grade each item until it has a verdict. Return the verdicts, and how often each was graded."""
    room = asyncio.Semaphore(AT_A_TIME)

    async def one(item: Grading) -> tuple[Verdict, int]:
        for tries in range(1, 50):
            async with room:
                try:
                    found = (await environment.grade([item]))[0]
                except SandboxUnavailable:
                    continue
            if not isinstance(found, Ungradable):
                return found, tries
        raise AssertionError("no verdict after 50 gradings")

    return await together(one(item) for item in items)


def graded(tmp_path: Path, count: int) -> None:
    inner = Killing()
    inner.prepare(count)
    lab = Laboratory(tmp_path)
    places = Places(sandboxes=AnyLoopSandboxes(inner), objects=lab.objects, cache=lab.places.cache)
    environment = RepositoryEnvironment(places)
    problem = lab.problem()
    honest = [Grading(problem, hidden(), Submission(changes=SOLUTION))] * count
    wrong = [Grading(problem, hidden(), Submission())] * max(2, count // 10)

    async def run() -> list[tuple[Verdict, int]]:
        try:
            return await verdicts(environment, honest + wrong)
        finally:
            assert places.sandboxes is not None
            await places.sandboxes.close()

    found = asyncio.run(run())
    scores = Counter(verdict.solved for verdict, _ in found[:count])
    print(f"{inner.killed} of {inner.opened} sandboxes killed; tries: {Counter(tries for _, tries in found)}")
    assert scores == {True: count}, [verdict for verdict, _ in found[:count] if not verdict.solved]
    assert not any(verdict.solved for verdict, _ in found[count:])
    assert inner.killed >= inner.opened * SHARE / 4, "too few sandboxes died for the test to say anything"


@pytest.mark.timeout(600)
def test_no_honest_solution_scores_zero_while_sandboxes_are_killed(tmp_path: Path) -> None:
    graded(tmp_path, 40)


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_no_honest_solution_scores_zero_in_two_thousand_verdicts(tmp_path: Path) -> None:
    graded(tmp_path, 2000)
