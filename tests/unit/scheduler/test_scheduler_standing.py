"""`GET /hardness`: every problem and cell once, sorted, paged, with its reasons; and nothing but errors that say what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from sqlalchemy import Engine

from services.scheduler import api
from services.scheduler.config import SchedulerConfig
from services.scheduler.standing import PER_PAGE, SORTS, BadQuery, Query, Standing
from services.scheduler.store import Store
from shared.contracts.standing import HardnessPage, Of, State
from shared.telemetry import Health
from tests.unit.scheduler.world import RUN, World, config


@pytest.fixture
def practised(engine: Engine) -> World:
    """Some steps of a run, some groups complete, some under way."""
    world = World(engine, config(max_steps=0), problems=120, capacity=8)
    world.start()
    for _ in range(40):
        world.tick()
    while world.inbox:  # the newest step too
        world.schedule()
    assert world.step > 3
    return world


def standing(world: World) -> Standing:
    ws = Store(world.engine).load(RUN, world.now)
    assert ws
    ws.config = world.run_config
    return Standing(ws)


def everything(there: Standing, **query: Any) -> list[Any]:
    found: list[Any] = []
    page = 1
    while True:
        shown = there.page(Query(page=page, **query), lambda problems: {})
        found += shown.problems or shown.cells
        if page == shown.pages:
            assert shown.total == len(found)
            return found
        page += 1


def test_every_problem_is_on_one_page_with_the_state_that_the_ledger_has_for_it(practised: World) -> None:
    rows = everything(standing(practised))
    assert sorted(row.problem for row in rows) == sorted(f"p{i}" for i in range(120))
    trained = {g.problem for g in practised.groups.values() if g.group in practised.trained}
    assert {row.problem for row in rows if row.state is State.trained} == trained
    assert {row.state for row in rows} >= {State.trained, State.free, State.running}
    assert sum(row.draw for row in rows) == pytest.approx(1)
    assert all((row.draw > 0) == (row.state is State.free) for row in rows)


def test_the_share_of_the_next_draw_is_what_the_scheduler_draws_with(practised: World) -> None:
    ws = practised.desk.sets[RUN]
    kinds = [ws.catalogue.kind(problem) for problem in ws.catalogue.ids]
    weights = ws.hardness.weights(*zip(*kinds, strict=True), step=ws.tip)
    free = {problem: weight for problem, weight in zip(ws.catalogue.ids, weights, strict=True)}
    rows = [row for row in everything(standing(practised)) if row.state is State.free]
    total = sum(free[row.problem] for row in rows)
    for row in rows:
        assert row.draw == pytest.approx(free[row.problem] / total)


@pytest.mark.parametrize(("of", "sort"), [(of, sort) for of in Of for sort in SORTS[of]])
def test_it_can_be_sorted_by_every_column_both_ways(practised: World, of: Of, sort: str) -> None:
    there = standing(practised)
    rising, falling = (everything(there, of=of, sort=sort, order=order) for order in ("asc", "desc"))
    assert rising == falling[::-1]
    values = [getattr(row, sort) for row in rising]
    keys = [list(State).index(v) for v in values] if sort == "state" else values
    assert keys == sorted(keys)


def test_cells_add_up_to_the_problems(practised: World) -> None:
    there = standing(practised)
    rows, cells = everything(there), everything(there, of=Of.cells, sort="cell")
    assert sum(cell.problems for cell in cells) == len(rows)
    assert sum(cell.trained for cell in cells) == sum(row.state is State.trained for row in rows)
    one = cells[0]
    own = everything(there, cell=one.cell)
    assert len(own) == one.problems
    assert one.chance == pytest.approx(sum(row.chance for row in own) / len(own))
    assert everything(there, state="running") == [row for row in rows if row.state is State.running]


def test_a_run_without_problems_has_an_empty_page(engine: Engine) -> None:
    world = World(engine, config(), problems=0)
    world.start()
    world.tick()
    assert everything(standing(world)) == []
    assert everything(standing(world), of=Of.cells, sort="cell") == []


@pytest.mark.parametrize(
    "bad",
    [
        {"of": "x"},
        {"sort": "__class__"},
        {"of": "cells", "sort": "state"},
        {"order": "up"},
        {"page": "0"},
        {"page": "-1"},
        {"page": "9" * 40},
        {"page": "²"},
        {"state": "gone"},
    ],
)
def test_what_does_not_exist_is_refused_by_name(bad: dict[str, str]) -> None:
    with pytest.raises(BadQuery, match=r"found .*; allowed"):
        Query.parse(bad)


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., list[tuple[int, bytes]]]:
    """ask(query, …): what a scheduler on the ledger in `tmp_path` answers."""

    def go(*queries: dict[str, str]) -> list[tuple[int, bytes]]:
        async def within() -> list[tuple[int, bytes]]:
            settings = SchedulerConfig(state=tmp_path)
            async with asyncio.timeout(60), Health("scheduler", settings, api.app(settings)) as health:
                async with aiohttp.ClientSession() as http:
                    found = []
                    for query in queries:
                        async with http.get(f"{health.url}/hardness", params=query) as answer:
                            found.append((answer.status, await answer.read()))
                    return found

        return asyncio.run(within())

    return go


def test_over_http_pages_are_typed_and_errors_say_what_is_wrong(practised: World, ask: Any) -> None:
    queries = [
        {"run": RUN},
        {"run": RUN, "page": "99999999"},
        {"run": RUN, "of": "cells"},
        {"run": "none"},
        {"run": "a\x00b"},
        {},
        {"run": RUN, "sort": "'; drop table groups; --"},
    ]
    answers = ask(*queries)
    assert [status for status, _ in answers] == [200, 200, 200, 404, 400, 400, 400]
    first, last, cells = (msgspec.json.decode(body, type=HardnessPage) for _, body in answers[:3])
    assert (len(first.problems), first.page, first.pages) == (PER_PAGE, 1, 3)
    assert last.page == 3
    assert cells.total == 17
    done = [p for page in (first, last) for p in page.problems if p.state is State.trained]
    assert done
    assert all(p.attempts > 0 and 0 <= p.solved <= p.attempts and p.step >= 0 for p in done)
    assert all("error" in msgspec.json.decode(body) for _, body in answers[3:])


def test_without_a_ledger_it_says_so(ask: Any) -> None:
    ((status, body),) = ask({"run": RUN})
    assert status == 503
    assert "no ledger here" in msgspec.json.decode(body)["error"]
