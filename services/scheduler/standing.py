"""Problems and cells by hardness, one page at a time. Pure: reads a working set, changes nothing, makes no decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.scheduler.working_set import WorkingSet
from shared.contracts.standing import CellStanding, HardnessPage, Of, ProblemStanding, Reason, State

PER_PAGE = 50
SORTS = {
    Of.problems: ("problem", "category", "cell", "state", "chance", "deviation", "draw", "groups"),
    Of.cells: ("cell", "problems", "free", "trained", "chance", "draw", "attempts", "solved", "promised"),
}
ORDERS = ("asc", "desc")
STATES = list(State)


class BadQuery(ValueError):
    """What was asked for does not exist; the text names the parameter, what was found and what is allowed."""


@dataclass(frozen=True, slots=True)
class Query:
    """`cell`, `state`: only those; "": all. `page` counts from 1; one beyond the last is the last."""

    of: Of = Of.problems
    sort: str = "draw"
    order: str = "desc"
    page: int = 1
    cell: str = ""
    state: str = ""

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Query:
        of = Of(_one_of("of", given.get("of", Of.problems), list(Of)))
        text = given.get("page", "1")
        if not (text.isascii() and text.isdigit() and 0 < len(text) < 9 and int(text) > 0):
            raise BadQuery(f"page: found {text[:40]!r}; allowed: 1 or more")
        return cls(
            of=of,
            sort=_one_of("sort", given.get("sort", "draw"), SORTS[of]),
            order=_one_of("order", given.get("order", "desc"), ORDERS),
            page=int(text),
            cell=given.get("cell", ""),
            state=_one_of("state", given.get("state", ""), ["", *State]),
        )


def _one_of(name: str, found: str, allowed: Sequence[str]) -> str:
    if found not in allowed:
        raise BadQuery(f"{name}: found {found[:40]!r}; allowed: {', '.join(filter(None, allowed))}")
    return found


@dataclass(frozen=True, slots=True)
class Last:
    """The last group of a problem that is over."""

    attempts: int
    solved: int
    step: int
    reason: str


class Standing:
    """Of every problem of a run at one moment; arrays in the catalogue's order."""

    def __init__(self, ws: WorkingSet) -> None:
        self._ws = ws
        self.ids = ws.catalogue.ids
        kinds = [ws.catalogue.kind(problem) for problem in self.ids]
        distinct = list(dict.fromkeys(kinds))
        at = {kind: i for i, kind in enumerate(distinct)}
        which = np.array([at[kind] for kind in kinds], dtype=np.int64)
        categories, cells = zip(*distinct, strict=True) if distinct else ((), ())
        a, b = ws.hardness.posterior(categories, cells) if distinct else (np.ones(0), np.ones(0))
        n = a + b
        self.kinds = kinds
        self.states = _states(ws)
        self.chance = (a / n)[which]
        self.deviation = np.sqrt(a * b / (n * n * (n + 1)))[which]
        self.weighted = ws.config is None or ws.config.schedule.hardness_sampling
        weights = (
            ws.hardness.weights(categories, cells, step=ws.tip)
            if self.weighted and distinct
            else np.ones(len(distinct))
        )
        free = np.array([state is State.free for state in self.states], dtype=bool)
        weight = np.where(free, weights[which] if len(which) else np.zeros(0), 0.0)
        self.draw = weight / max(float(weight.sum()), 1e-300)

    def page(self, query: Query, results: Callable[[Sequence[str]], Mapping[str, Last]]) -> HardnessPage:
        """`results`: what became of the last groups of the few problems that are shown."""
        rows: Sequence[Any] | np.ndarray
        if query.of is Of.cells:
            rows = sorted(self._cells(), key=lambda c: (getattr(c, query.sort), c.cell))
        else:
            rows = self._sorted_problems(query)
        if query.order == "desc":
            rows = rows[::-1]
        pages = max(1, -(-len(rows) // PER_PAGE))
        shown = min(query.page, pages)
        some = rows[(shown - 1) * PER_PAGE : shown * PER_PAGE]
        common: dict[str, Any] = {
            "run": self._ws.id,
            "step": self._ws.tip,
            "weighted": self.weighted,
            "mean": self._ws.hardness.mean,
            "page": shown,
            "pages": pages,
            "total": len(rows),
        }
        if query.of is Of.cells:
            return HardnessPage(cells=list(some), **common)
        last = results([self.ids[i] for i in some])
        return HardnessPage(problems=[self._problem(int(i), last.get(self.ids[i])) for i in some], **common)

    def _sorted_problems(self, query: Query) -> np.ndarray:
        keep = [
            i
            for i in range(len(self.ids))
            if (not query.cell or self.kinds[i][1] == query.cell) and (not query.state or self.states[i] == query.state)
        ]
        by_name = sorted(keep, key=lambda i: self.ids[i])  # equal ones stand in the order of their names
        keys: dict[str, Callable[[int], Any]] = {
            "problem": lambda i: self.ids[i],
            "category": lambda i: self.kinds[i][0],
            "cell": lambda i: self.kinds[i][1],
            "state": lambda i: STATES.index(self.states[i]),
            "chance": lambda i: self.chance[i],
            "deviation": lambda i: self.deviation[i],
            "draw": lambda i: self.draw[i],
            "groups": lambda i: self._ws.catalogue.numbers[i],
        }
        return np.array(sorted(by_name, key=keys[query.sort]), dtype=np.int64)

    def _problem(self, i: int, last: Last | None) -> ProblemStanding:
        (category, cell), ws = self.kinds[i], self._ws
        return ProblemStanding(
            problem=self.ids[i],
            category=category,
            cell=cell,
            state=self.states[i],
            chance=float(self.chance[i]),
            deviation=float(self.deviation[i]),
            draw=float(self.draw[i]),
            groups=ws.catalogue.numbers[i],
            attempts=last.attempts if last else 0,
            solved=last.solved if last else 0,
            step=last.step if last else -1,
            reason=last.reason[:500] if last else "",
            reasons=[
                Reason(kind=f.kind, of=f.of, odds=f.odds, attempts=f.attempts)
                for f in ws.hardness.explain(category, cell)
            ],
        )

    def _cells(self) -> list[CellStanding]:
        names = sorted({cell for _, cell in self.kinds})
        at = {name: i for i, name in enumerate(names)}
        which = np.array([at[cell] for _, cell in self.kinds], dtype=np.int64)

        def summed(values: Any) -> np.ndarray:
            return np.bincount(which, weights=np.asarray(values, dtype=np.float64), minlength=len(names))

        count = summed(np.ones(len(which)))
        free = summed([state is State.free for state in self.states])
        trained = summed([state is State.trained for state in self.states])
        chance, draw = summed(self.chance) / np.maximum(count, 1), summed(self.draw)
        tried = self._ws.hardness.cells(names) if names else np.zeros((0, 3))
        return [
            CellStanding(
                cell=name,
                problems=int(count[i]),
                free=int(free[i]),
                trained=int(trained[i]),
                chance=float(chance[i]),
                draw=float(draw[i]),
                attempts=float(tried[i, 0]),
                solved=float(tried[i, 1]),
                promised=float(tried[i, 2]),
            )
            for i, name in enumerate(names)
        ]


def _states(ws: WorkingSet) -> list[State]:
    running = {group.problem for group in ws.open.values()}
    waiting = {group.problem for group in ws.waiting.values()}
    trained = {ws.announced[group] for group in ws.trained if group in ws.announced}
    free = ws.catalogue.free_ones()
    found = []
    for i, problem in enumerate(ws.catalogue.ids):
        if problem in running:
            found.append(State.running)
        elif problem in waiting:
            found.append(State.waiting)
        elif problem in trained:
            found.append(State.trained)
        else:
            found.append(State.free if free[i] else State.given_up)
    return found
