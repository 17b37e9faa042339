"""Many worlds of several workers, slow replicas, double claims and topics that are read at different speeds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shared.contracts import messages as m
from shared.contracts import topics as t
from tests.unit.scheduler.quick import quick
from tests.unit.scheduler.world import Trouble

LAGGING = (t.ATTEMPTS_PROGRESS, t.ROLLOUTS_FINISHED, t.ROLLOUTS_SCORED, t.POLICIES_APPLIED, t.POLICIES_PUBLISHED)
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
        "max_staleness": st.sampled_from([0, 1, 2, 4]),
        "groups_per_step": st.integers(1, 3),
        "group_size": st.sampled_from([2, 3]),
        "lag": st.fixed_dictionaries({topic.name: st.sampled_from([0.0, 2.0, 8.0, 20.0]) for topic in LAGGING}),
        "spread": st.sampled_from([0.0, 3.0, 20.0]),
        "twice": st.sampled_from([0.0, 0.1, 0.5]),
        "slow": st.dictionaries(st.integers(0, 40), st.integers(5, 60), max_size=2),
    }
)


def keeps_its_promises(world: dict[str, Any]) -> None:
    """No reward of another trajectory, no problem twice, no token too old, no rollout discarded by silence, no hang."""
    alive = world["trouble"].worker_dies == 0
    played = quick(**{**world, "trouble": world["trouble"]})
    played.start()
    played.run_until("finished", ticks=6000)
    assert played.step == 6
    assert played.mixed == []
    assert len(set(played.trained_problems)) == len(played.trained_problems)
    assert max(played.true_ages, default=0) <= world["max_staleness"]
    assert played.refused == []
    alerts = {one.message.name for one in played.published if isinstance(one.message, m.Alert)}
    assert "staleness_breach" not in alerts
    events = played.desk.events  # type: ignore[attr-defined]
    lost = [e for e in events if e["kind"] == "attempt.lost" and "ignored" not in e["data"]]
    assert not (alive and lost), lost[:3]  # whoever is read late is not dead


FEW = settings(max_examples=300, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=10_000, derandomize=False, phases=(Phase.explicit, Phase.generate, Phase.shrink))


@FEW
@given(worlds)
def test_three_hundred_worlds_keep_every_promise(world: dict[str, Any]) -> None:
    keeps_its_promises(world)


@pytest.mark.nightly
@MANY
@given(worlds)
def test_ten_thousand_worlds_keep_every_promise(world: dict[str, Any]) -> None:
    keeps_its_promises(world)
