"""What a probe found out before the run is the first evidence, of less weight than the run's own, and it is in the ledger."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from services.scheduler.catalogue import Catalogue
from services.scheduler.hardness import FIRST_GROUPS, Hardness, Outcome, Probed
from services.scheduler.standing import Standing
from services.scheduler.store import Store
from services.scheduler.why import sentences
from shared.contracts import messages as m
from tests.unit.scheduler.test_scheduler_catalogue import drawn, restarts
from tests.unit.scheduler.test_scheduler_intake import Room
from tests.unit.scheduler.test_scheduler_recovery import finish
from tests.unit.scheduler.world import REF, RUN, Trouble, World, config

PROBED = {"p1": (8, 0), "p2": (8, 8), "p30": (4, 1)}


def chance(hardness: Hardness, cell: str, category: str = "c") -> float:
    return float(hardness.chance([category], [cell])[0])


def admitted(*names: str, probed: dict[str, tuple[int, int]] | None = None) -> m.ProblemAdmitted:
    problems = {name: ("c/near", f"cell-{name}") for name in names}
    return m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems=problems, probed=probed or {})


def test_a_run_with_a_probe_does_not_begin_blind() -> None:
    hardness = Hardness()
    for i in range(10):
        hardness.probe(Probed("c/hard", f"hard-{i}", 8, 0))
        hardness.probe(Probed("c/easy", f"easy-{i}", 8, 7))
    assert chance(hardness, "new", "c/hard") < 0.15
    assert chance(hardness, "new", "c/easy") > 0.6
    assert chance(hardness, "hard-0", "c/hard") < chance(hardness, "new", "c/hard")


def test_a_probe_as_heavy_as_the_first_groups_takes_the_place_of_the_first_stage() -> None:
    hardness, catalogue = Hardness(), Catalogue()
    catalogue.add(
        [(f"{kind}-{i}", f"c/{kind}", f"{kind}-{i}", "pack") for kind in ("even", "lost") for i in range(500)]
    )
    assert hardness.power(0) == 0
    for i in range(80):
        hardness.probe(Probed("c/even", f"tried-{i}", 16, 8))
    assert (hardness.power(0), hardness.power(1)) == (0.5, 0.6)
    for i in range(80):
        hardness.probe(Probed("c/lost", f"lost-tried-{i}", 16, 0))
    assert hardness.power(0) == hardness.power(9) == 1
    first = catalogue.draw(hardness, 100, step=0, seed=1, number=1)
    assert sum(name.startswith("even") for name in first) > 75


def test_a_probe_weighs_less_than_what_the_run_saw_itself_and_fades_like_it() -> None:
    probed, seen = Hardness(), Hardness()
    for _ in range(4):
        probed.probe(Probed("c", "cell", 8, 0))
        seen.observe(Outcome("c", "cell", 8, 0, 3.0, 20.0, 0))
    assert chance(seen, "cell") < chance(probed, "cell") < 0.3
    for hardness in (probed, seen):
        for _ in range(8):
            hardness.observe(Outcome("c", "cell", 8, 8, 3.0, 20.0, 400))
    assert chance(probed, "cell") == pytest.approx(chance(seen, "cell"), abs=0.01)
    late = Hardness()
    late.observe(Outcome("c", "other", 8, 8, 3.0, 20.0, 400))
    before = chance(late, "cell")
    late.probe(Probed("c", "cell", 8, 0))  # it dates from before the run
    assert chance(late, "cell") == pytest.approx(before, abs=0.01)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 16), st.floats(0, 1), st.booleans()), max_size=20))
def test_a_probe_says_nothing_of_effort_and_is_held_against_no_prediction(
    events: list[tuple[str, int, float, bool]],
) -> None:
    """All attempts of the run take the same turns, so no cell takes more than usual."""
    hardness = Hardness()
    for cell, attempts, share, probe in events:
        solved = round(share * attempts)
        if probe:
            hardness.probe(Probed("c", cell, attempts, solved))
        else:
            hardness.observe(Outcome("c", cell, attempts, solved, 3.0, 20.0, 0))
    groups = sum(not probe for *_, probe in events)
    assert (hardness.observed, len(hardness.calibration.newest)) == (groups, groups)
    assert hardness.probed == sum(attempts for _, attempts, _, probe in events if probe)
    for cell in "abc":
        (effort,) = [factor for factor in hardness.explain("c", cell) if factor.kind == "effort"]
        assert effort.odds == pytest.approx(1)
        a, b = hardness.posterior(["c"], [cell])
        assert 0 < a[0] < np.inf
        assert 0 < b[0] < np.inf


def test_a_probe_is_no_group_of_the_first_ones() -> None:
    hardness = Hardness()
    for i in range(FIRST_GROUPS):
        hardness.probe(Probed("c", f"cell-{i}", 8, 4))
    assert hardness.chance_at_first("c", "new") is None


def test_what_the_ledger_has_of_a_probe_is_learnt_in_the_order_of_then(engine: Engine) -> None:
    """A second source brings its probe when groups are complete already."""
    room = Room(engine)
    room.tell(admitted(*[f"p{i}" for i in range(40)], probed=PROBED))
    room.begin(problems=0)
    for _ in range(3):
        finish(room)
    room.tell(admitted("late-1", "late-2", "p1", probed={"late-2": (4, 4), "late-1": (4, 0), "p1": (8, 8)}))
    finish(room)
    live, loaded = room.ws, Store(engine).load(RUN, room.now)
    assert loaded is not None
    assert loaded.probed == live.probed == {**PROBED, "late-1": (4, 0), "late-2": (4, 4)}  # p1 was known already
    assert (loaded.hardness.probed, loaded.hardness.observed) == (28, 4)
    categories, cells = ["c/near"] * 3, ["cell-p1", "cell-late-2", "new"]
    for mine, other in zip(
        live.hardness.posterior(categories, cells), loaded.hardness.posterior(categories, cells), strict=True
    ):
        np.testing.assert_array_equal(mine, other)
    assert list(live.hardness.calibration.newest) == list(loaded.hardness.calibration.newest)
    assert drawn(live, 7) == drawn(loaded, 7)


@pytest.mark.parametrize("seed", [1, 3])
def test_picks_are_the_same_after_a_kill_at_any_point_of_a_run_with_a_probe(engine: Engine, seed: int) -> None:
    trouble = Trouble(
        duplicate=0.2, delay=0.3, worker_dies=0.1, trainer_dies=0.08, quarantines=0.1, scheduler_dies=0.05
    )
    probed = {f"p{i}": (8, i % 9) for i in range(0, 300, 4)}
    world = World(
        engine, config(max_steps=0), seed=seed, trouble=trouble, problems=300, probed=probed, checkpoint_every=1
    )
    world.start()
    compared = 0
    for live, loaded in restarts(world, engine, 40):
        assert loaded.probed == live.probed
        assert drawn(live, seed) == drawn(loaded, seed)
        compared += 1
    assert compared > 8
    assert world.desk.sets[RUN].probed == probed


def test_a_fork_keeps_what_the_probe_found_out(engine: Engine) -> None:
    room = Room(engine)
    room.tell(admitted("p1", "p2", probed={"p1": (8, 0)}))
    room.begin(problems=0)
    estimates = room.ws.hardness
    room.tell(m.IncarnationStarted(run=RUN, incarnation=1, step=0, parent=0))
    assert room.ws.hardness is estimates
    assert room.ws.probed == {"p1": (8, 0)}


@pytest.mark.parametrize(
    ("probed", "why"),
    [
        ({"p1": (0, 0)}, "probed.p1: found 0 attempts, 0 solved; allowed: 1 to 10000 attempts"),
        ({"p1": (10**9, 0)}, "probed.p1: found 1000000000 attempts"),
        ({"p1": (2, 3)}, "probed.p1: found 2 attempts, 3 solved"),
        ({"stranger": (2, 1)}, "probed: found 'stranger'; allowed: problems of the same message"),
    ],
)
def test_results_that_cannot_be_are_refused_with_their_message(
    engine: Engine, probed: dict[str, tuple[int, int]], why: str
) -> None:
    room = Room(engine)
    (said,) = room.tell(admitted("p1", probed=probed))
    assert why in said
    assert "p1" not in room.ws.catalogue


def test_why_says_what_a_probe_said(engine: Engine) -> None:
    room = Room(engine).begin(problems=4)  # of one cell
    assert Standing(room.ws).why("p0", lambda names: {}).probe is None
    room.tell(
        m.ProblemAdmitted(
            run=RUN,
            pack=REF,
            pack_hidden=REF,
            problems={name: ("debugging", "kin") for name in ("q0", "q1", "q2")},
            probed={"q0": (8, 3), "q1": (4, 1)},
        )
    )
    standing = Standing(room.ws)
    said = {name: "\n".join(sentences(standing.why(name, lambda names: {}))) for name in ("p0", "q0", "q2")}
    assert "Of 2 problems that it tried, it did not try this one." in said["p0"]
    assert "it solved 3 of 8 attempts at this one; at 1 relative, 1 of 4." in said["q0"]
    assert "it did not try this one; at 2 relatives, 4 of 12." in said["q2"]
    assert "A probe before the run informed these figures." in said["q2"]
