"""The page of problems, asked of a real scheduler over a real ledger whose texts are hostile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.console.reasons import words
from services.scheduler import api
from services.scheduler.config import SchedulerConfig
from shared.contracts.standing import Reason
from shared.telemetry import Health
from tests.unit.console.conftest import RUN
from tests.unit.console.scheduled import practise
from tests.unit.console.serving import Page, console


@pytest.fixture
def visit(world, tmp_path):
    """visit(query, …): pages of a console beside a scheduler; `scheduler=False`: alone."""

    def go(*queries: str, scheduler: bool = True) -> list[Page]:
        async def scenario() -> list[Any]:
            async with console(world, tmp_path) as there:
                paths = [f"/runs/{RUN}/problems{query}" for query in queries]
                if not scheduler:
                    return [await there.get(path) for path in paths]
                settings = SchedulerConfig(state=tmp_path)
                if not (tmp_path / "ledger.db").exists():
                    await asyncio.to_thread(practise, settings.ledger_url)
                async with Health("scheduler", settings, api.app(settings)):
                    return [await there.get(path) for path in paths]

        answers = asyncio.run(scenario())
        assert [status for status, _, _ in answers] == [200] * len(queries)
        return [page for _, _, page in answers]

    return go


def test_problems_and_cells_are_listed_sorted_paged_and_explained_and_nothing_hostile_acts(visit):
    queries = (
        "",
        "?page=2&sort=problem&order=asc",
        "?of=cells",
        "?state=trained",
        "?sort=nonsense&of=x&page=-3&state=y",
    )
    pages = visit(*queries)
    first, second, cells, trained, odd = pages
    for expected in ("70 in all", "page 1 of 2", "free", "relatives", "⟨ESC⟩", "<script>alert(1)</script>"):
        assert expected in first.text
    assert first.html.count("/attempts?problem=") == 50
    assert second.html.count("/attempts?problem=") == 20
    assert ("th", {"aria-sort": "ascending"}) in second.elements
    assert "Promised" in cells.text
    assert "solved at step" in trained.text
    assert 0 < trained.html.count("/attempts?problem=") == trained.html.count("solved at step")
    assert odd.html.count("/attempts?problem=") == 50
    for page in pages:
        assert [a.get("src") for tag, a in page.elements if tag == "script"] == ["/static/console.js"]
        assert not any(name.startswith("on") or name == "style" for _, found in page.elements for name in found)
        assert "\x1b" not in page.html
        assert "\u202e" not in page.html
        links = [a["href"] or "" for tag, a in page.elements if tag == "a"]
        assert all(link.startswith(("/", "?")) for link in links)


def test_the_relatives_of_a_hostile_cell_can_be_followed(visit):
    (cells,) = visit("?of=cells&sort=problems")
    link = next(a["href"] for tag, a in cells.elements if tag == "a" and "cell+%3Cscript" in (a.get("href") or ""))
    (own,) = visit(link)
    assert "35 in all" in own.text


def test_without_a_scheduler_the_page_says_so(visit):
    (page,) = visit("", scheduler=False)
    assert "no scheduler has announced itself" in page.text


def test_the_strongest_reason_comes_first_and_what_changes_nothing_is_not_said():
    reasons = [
        Reason(kind="run", odds=0.4, attempts=100),
        Reason(kind="tag", of="off-by-one", odds=0.8, attempts=10),
        Reason(kind="tag", of="plain", odds=1.01, attempts=10),
        Reason(kind="relatives", of="c", odds=3.0, attempts=4),
    ]
    assert [(word.weight, word.text) for word in words(reasons)] == [
        ("easier", "relatives do better than promised"),
        ("harder", "off-by-one"),
    ]
