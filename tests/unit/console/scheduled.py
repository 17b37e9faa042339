"""A ledger in which a run of the console's name has practised, with problems, cells and categories that attack."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

from shared import ledger
from shared.contracts import messages as m
from shared.contracts import topics as t
from tests.unit.console.conftest import HOSTILE, RUN
from tests.unit.scheduler import world as scheduling

HOSTILE_CELL = f"cell {HOSTILE}"


def practise(url: str, attacks: Sequence[str] = (HOSTILE,)) -> None:
    """A few steps of 70 problems in the ledger of `url`."""
    engine = ledger.connect(url)
    ledger.upgrade(engine)
    with mock.patch.object(scheduling, "RUN", RUN):
        world = scheduling.World(engine, scheduling.config(max_steps=0), problems=0, capacity=8)
        problems = {}
        for i in range(70):
            attack = attacks[i % len(attacks)]
            problems[f"p-{i} {attack}"] = (f"bug {attack}/near", HOSTILE_CELL if i % 2 else f"c{i}")
        ref = scheduling.REF
        admitted = m.ProblemAdmitted(run=RUN, pack=ref, pack_hidden=ref, problems=problems)
        world.send(t.PROBLEMS_ADMITTED, admitted)
        world.start()
        for _ in range(40):
            world.tick()
        assert world.step > 3
    engine.dispose()
