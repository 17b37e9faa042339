"""The catalogue's kinds weigh what hardness says of each problem alone, and a draw follows from the ledger."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from services.scheduler import hardness as rule_of
from services.scheduler.catalogue import Catalogue
from services.scheduler.hardness import Hardness, Outcome
from services.scheduler.store import Store
from services.scheduler.working_set import WorkingSet
from shared.contracts import messages as m
from tests.unit.scheduler.test_scheduler_intake import Room
from tests.unit.scheduler.world import REF, RUN, Trouble, World, config

CATEGORIES = ["a/near", "a/far", "b"]
CELLS = ["x", "y", "z", ""]  # ""; and each problem's own id


def rows(*names: str, category: str = "a/near", cell: str = "x") -> list[tuple[str, str, str, str]]:
    return [(name, category, cell or name, "pack") for name in names]


def naive(catalogue: Catalogue, estimates: Hardness, step: int) -> np.ndarray:
    """The weight of every problem, from its own category and cell."""
    kinds = [catalogue.kind(problem) for problem in catalogue.ids]
    return estimates.weights([category for category, _ in kinds], [cell for _, cell in kinds], step=step)


def by_kind(catalogue: Catalogue, estimates: Hardness, step: int) -> np.ndarray:
    kinds = catalogue.kinds(estimates)
    weights = estimates.weights([category for category, _ in kinds], [cell for _, cell in kinds], step=step)
    return weights[catalogue.places(kinds)]


OUTCOME = st.tuples(st.sampled_from(CATEGORIES), st.sampled_from([*CELLS, "p1", "p30"]), st.integers(0, 8))
PROBLEM = st.tuples(st.sampled_from(CATEGORIES), st.sampled_from([*CELLS, "own"]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(OUTCOME, st.lists(PROBLEM, min_size=1, max_size=8)), max_size=25), st.sampled_from([2, 100]))
def test_every_problem_weighs_what_hardness_says_of_it_alone(events: list, most: int) -> None:  # type: ignore[type-arg]
    """Problems join, results come and cells are forgotten, in any order; and a restart knows the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule_of, "MAX_CELLS", most)
        catalogue, estimates, every = Catalogue(), Hardness(), []
        for step, event in enumerate(events):
            if isinstance(event, tuple):
                category, cell, solved = event
                estimates.observe(Outcome(category, cell, 8, solved, 2.0 + solved, 10.0, step))
            else:
                first = len(catalogue)
                new = [
                    (f"p{first + i}", category, f"p{first + i}" if cell == "own" else cell, "pack")
                    for i, (category, cell) in enumerate(event)
                ]
                every += catalogue.add(new)
            if every and step % 2:
                np.testing.assert_allclose(
                    by_kind(catalogue, estimates, step), naive(catalogue, estimates, step), 1e-12
                )
        again = Catalogue()
        again.add(every[::-1])
        for number in range(1, len(every) + 2):
            one, other = (c.draw(estimates, 1, step=99, seed=5, number=number) for c in (catalogue, again))
            assert one == other


def test_the_least_known_half_of_too_many_cells_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_of, "MAX_CELLS", 4)
    estimates = Hardness()
    for step, cell in enumerate("abcde"):
        estimates.observe(Outcome("c", cell, 8, 0, 2.0, 10.0, 40 * step))
    assert list(estimates.tried) == ["c", "d", "e"]
    assert estimates.cells(["a"]).tolist() == [[0.0, 0.0, 0.0]]
    fresh, known = (a / (a + b) for a, b in zip(*estimates.posterior(["c", "c"], ["a", "e"]), strict=True))
    assert fresh == pytest.approx(estimates.expected(["c"])[0])
    assert known < fresh


def test_ids_are_admitted_once() -> None:
    catalogue = Catalogue()
    assert [row[0] for row in catalogue.add([*rows("p", "q", "p"), *rows("q", cell="z")])] == ["p", "q"]
    assert catalogue.add(rows("q", "p")) == []
    assert catalogue.add([]) == []
    assert [row[0] for row in catalogue.add(rows("p", "new"))] == ["new"]
    assert (list(catalogue.ids), catalogue.kind("q"), catalogue.free) == (["p", "q", "new"], ("a/near", "x"), 3)
    with pytest.raises(KeyError, match="stranger"):
        catalogue.take("stranger")


def test_a_cell_may_have_the_name_of_a_problem() -> None:
    """ "p" is of its own cell, and "q" names that cell."""
    catalogue = Catalogue()
    catalogue.add([*rows("p", "r", cell=""), *rows("q", cell="p"), *rows("s", cell="x")])
    assert sorted(catalogue.relatives("p").tolist()) == [0, 2]
    codes = catalogue.cells().tolist()
    assert codes[0] == codes[2]
    assert len(set(codes)) == 3


def test_a_source_that_joins_is_drawn_from_at_once() -> None:
    catalogue, estimates = Catalogue(), Hardness()
    catalogue.add(rows(*[f"p{i}" for i in range(50)]))
    first = catalogue.draw(estimates, 40, step=0, seed=1, number=1)
    catalogue.add(rows(*[f"q{i}" for i in range(1000)], category="new", cell=""))
    later = catalogue.draw(estimates, 1010, step=0, seed=1, number=41)
    assert len({*first, *later}) == 1050
    assert any(problem.startswith("q") for problem in later[:5])
    assert catalogue.draw(estimates, 1, step=0, seed=1, number=1051) == []


def test_problems_are_drawn_uniformly_without_estimates() -> None:
    catalogue, estimates = Catalogue(), Hardness()
    for _ in range(20):
        estimates.observe(Outcome("a/near", "hopeless", 8, 0, 2.0, 10.0, 0))
        estimates.observe(Outcome("a/near", "even", 8, 4, 2.0, 10.0, 0))
    catalogue.add(
        [*rows(*[f"h{i}" for i in range(2000)], cell="hopeless"), *rows(*[f"e{i}" for i in range(2000)], cell="even")]
    )
    weighted = catalogue.draw(estimates, 200, step=10, seed=1, number=1)
    uniform = catalogue.draw(None, 400, step=0, seed=1, number=201)
    assert sum(p.startswith("e") for p in weighted) > 180
    assert 0.4 < sum(p.startswith("e") for p in uniform) / 400 < 0.6


def test_what_comes_back_waits_until_the_others_of_its_kind_were_drawn() -> None:
    """What fails for the infrastructure's sake would otherwise fail again at once, until it is given up."""
    catalogue = Catalogue()
    catalogue.add(rows(*[f"p{i}" for i in range(20)]))
    (first,) = catalogue.draw(None, 1, step=0, seed=3, number=1)
    catalogue.give_back(first)
    assert catalogue.draw(None, 20, step=0, seed=3, number=2)[-1] == first


def drawn(ws: WorkingSet, seed: int, count: int = 25) -> list[str]:
    catalogue = copy.deepcopy(ws.catalogue)
    return catalogue.draw(ws.hardness, count, step=ws.tip, seed=seed, number=ws.head.last_draw + 1)


def restarts(world: World, engine: Engine, ticks: int) -> Iterator[tuple[WorkingSet, WorkingSet]]:
    """Run on. Yield, now and then, the run as the scheduler has it, and as one that starts from the ledger has it."""
    for _ in range(ticks):
        world.tick()
        live = world.desk.sets.get(RUN)
        if live is None or world.random.random() < 0.6:
            continue
        loaded = Store(engine).load(RUN, world.now)
        assert loaded
        yield live, loaded


@pytest.mark.parametrize("seed", [0, 2])
def test_the_next_picks_are_the_same_after_a_kill_at_any_point(engine: Engine, seed: int) -> None:
    """Workers and trainers die, groups are dropped, quarantined and freed by forks; whatever is written down by then, a
    process that starts from the ledger draws what this one would have drawn."""
    trouble = Trouble(duplicate=0.1, delay=0.1, worker_dies=0.1, trainer_dies=0.08, quarantines=0.1)
    world = World(engine, config(max_steps=0), seed=seed, trouble=trouble, problems=100, checkpoint_every=1)
    world.start()
    compared = 0
    for live, loaded in restarts(world, engine, 50):
        assert drawn(live, seed) == drawn(loaded, seed)
        compared += 1
    assert world.incarnation > 0
    assert compared > 10


def test_a_fork_reads_no_problem_again(engine: Engine) -> None:
    room = Room(engine).begin()
    catalogue, estimates, free = room.ws.catalogue, room.ws.hardness, room.ws.catalogue.free
    room.tell(m.IncarnationStarted(run=RUN, incarnation=1, step=0, parent=0))
    assert room.ws.catalogue is catalogue
    assert room.ws.hardness is estimates
    assert catalogue.free == free


def test_a_run_of_two_sources_goes_on_when_the_second_brings_nothing(engine: Engine) -> None:
    room = Room(engine).begin(problems=1)
    assert room.tell(m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems={})) == []
    assert room.waits == {"problems"}
    room.tell(m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems={"p0": ("c", "x"), "late": ("c", "x")}))
    assert {group.problem for group in room.ws.open.values()} == {"p0", "late"}
    assert room.sql("select problem_id, category from problems order by 1") == [("late", "c"), ("p0", "debugging")]
