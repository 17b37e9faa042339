"""How hard the problems of a run are held to be, and why; by problem or by cell (relatives)."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlencode

from aiohttp import web

from services.console import scheduler
from services.console.reasons import words
from services.console.site import HTTP, SETTINGS, number, page, run_of
from shared.contracts.standing import Of, State

# Columns that can be sorted by, and the order that one looks for first.
COLUMNS: dict[str, list[tuple[str, str, str]]] = {
    Of.problems: [
        ("problem", "Problem", "asc"),
        ("state", "State", "asc"),
        ("chance", "Chance", "asc"),
        ("draw", "Drawn next", "desc"),
        ("category", "Category", "asc"),
        ("cell", "Relatives", "asc"),
    ],
    Of.cells: [
        ("cell", "Relatives", "asc"),
        ("problems", "Problems", "desc"),
        ("free", "Free", "desc"),
        ("trained", "Trained", "desc"),
        ("chance", "Chance", "asc"),
        ("draw", "Drawn next", "desc"),
        ("attempts", "Attempts", "desc"),
        ("solved", "Solved", "desc"),
        ("promised", "Promised", "desc"),
    ],
}


async def problems_page(request: web.Request) -> web.Response:
    """`?of=problems|cells&sort=…&order=asc|desc&page=N&cell=…&state=…`; what is none of these is read as the first."""
    run, asked = run_of(request), request.query
    of = Of.cells if asked.get("of") == Of.cells else Of.problems
    sorts = [name for name, _, _ in COLUMNS[of]]
    query = {
        "of": of.value,
        "sort": asked.get("sort", "") if asked.get("sort", "") in sorts else "draw",
        "order": "asc" if asked.get("order") == "asc" else "desc",
        "page": str(number(asked.get("page", "1"), 1)),
        "cell": asked.get("cell", "") if of is Of.problems else "",
        "state": asked.get("state", "") if asked.get("state") in list(State) and of is Of.problems else "",
    }
    found, trouble = None, ""
    try:
        found = await scheduler.hardness(request.app[HTTP], request.app[SETTINGS], {"run": run.run, **query})
    except scheduler.NoAnswer as why:
        trouble = str(why)
    link: Callable[..., str] = lambda **changed: "?" + urlencode({**query, **changed}, errors="replace")  # noqa: E731
    return page(
        request,
        "problems.html",
        run=run,
        query=query,
        found=found,
        trouble=trouble,
        columns=COLUMNS[of],
        states=list(State),
        link=link,
        words=words,
    )
