"""Hundreds of worlds on a real ledger: trainers and schedulers that die, a second scheduler, commits whose answer is lost, a ledger
that is put back, among several workers, double claims, slow replicas and topics that are read at different speeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from sqlalchemy import select

from services.scheduler.audit import audit
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.ledger.models import Event
from tests.unit.scheduler.harsh import FAULTS, HarshWorld, harsh, in_memory
from tests.unit.scheduler.world import RUN, Trouble

LAGGING = (
    t.ATTEMPTS_PROGRESS,
    t.ROLLOUTS_FINISHED,
    t.ROLLOUTS_SCORED,
    t.POLICIES_APPLIED,
    t.POLICIES_PUBLISHED,
    t.STEPS_COMMITTED,
)
# What the audit may find of a ledger that was put back: publications and steps that it heard of and has lost.
LOST = {
    "steps that the ledger has lost",
    "steps or serials that skip or go back",
    "attempts with tokens of a version that nobody published",
}
troubles = st.builds(
    Trouble,
    duplicate=st.sampled_from([0.0, 0.1]),
    delay=st.sampled_from([0.0, 0.1]),
    worker_dies=st.sampled_from([0.0, 0.02]),
    grading_fails=st.sampled_from([0.0, 0.05]),
    quarantines=st.sampled_from([0.0, 0.2]),
)
worlds = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "trouble": troubles,
        "faults": st.dictionaries(st.integers(1, 60), st.sampled_from(FAULTS), max_size=8),
        "restored": st.none() | st.tuples(st.integers(5, 40), st.integers(1, 15)).map(lambda at: (at[0], sum(at))),
        "max_staleness": st.sampled_from([0, 1, 2, 4]),
        "groups_per_step": st.integers(1, 3),
        "group_size": st.sampled_from([2, 3]),
        "checkpoint_every": st.integers(1, 3),
        "lag": st.fixed_dictionaries({topic.name: st.sampled_from([0.0, 2.0, 8.0, 20.0]) for topic in LAGGING}),
        "spread": st.sampled_from([0.0, 3.0, 20.0]),
        "twice": st.sampled_from([0.0, 0.1, 0.5]),
        "slow": st.dictionaries(st.integers(0, 40), st.integers(5, 60), max_size=2),
    }
)


def events(world: HarshWorld, kind: str) -> list[dict[str, Any]]:
    with world.engine.begin() as connection:
        rows = connection.execute(select(Event.__table__).where(Event.run_id == RUN, Event.kind == kind))
        return [row._asdict() for row in rows]


def keeps_its_promises(drawn: dict[str, Any], tell: Callable[[str], Any] = note) -> None:
    """No reward of another trajectory, no problem twice, no token too old, no rollout discarded by silence, no hang.
    `tell` takes the history of a world that breaks one."""
    with in_memory() as engine:
        world = harsh(engine, **drawn)
        try:
            world.start()
            world.run_until("finished", ticks=4000)
            world.trouble, world.faults = Trouble(), {}
            for _ in range(60):  # what is late comes
                world.tick()
            check(world, whole=world.kept is None, alive=drawn["trouble"].worker_dies == 0)
        except BaseException:
            tell("\n".join(world.history))
            raise


def check(world: HarshWorld, *, whole: bool, alive: bool) -> None:
    """`whole`: the ledger was never put back. Otherwise it may have lost steps, and the trainer is the net. `alive`: no worker
    died."""
    bound = world.run_config.schedule.max_staleness
    steps = world.run_config.schedule.max_steps
    assert world.step == steps if whole else world.step >= steps
    assert world.mixed == []
    problems = [world.problem_of[group] for group in world.trained]
    assert len(set(problems)) == len(problems)
    assert max(world.true_ages, default=0) <= bound
    report = audit(world.engine, RUN, max_staleness=bound)
    alerts = {one.message.name for one in world.published if isinstance(one.message, m.Alert)}
    if not whole:
        assert {finding.what for finding in report.findings} <= LOST
        return
    assert world.nets == []
    assert report.findings == []
    assert world.refused == []
    assert "staleness_breach" not in alerts
    lost = [e for e in events(world, "attempt.lost") if "ignored" not in e["data"]]
    assert not (alive and lost), lost[:3]  # whoever is read late is not dead


FEW = settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=1000, derandomize=False, phases=(Phase.explicit, Phase.generate, Phase.shrink))


@FEW
@given(worlds)
def test_worlds_on_a_ledger_keep_every_promise(drawn: dict[str, Any]) -> None:
    """Beside the three hundred in memory (`test_scheduler_quick`)."""
    keeps_its_promises(drawn)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
@MANY
@given(drawn=worlds)
def test_ten_thousand_worlds_on_a_ledger_keep_every_promise(part: int, drawn: dict[str, Any]) -> None:
    """In ten parts of a thousand, for as many processes."""
    keeps_its_promises(drawn)
