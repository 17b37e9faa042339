"""Problems and cells by hardness, one page at a time. Pure: reads a working set, changes nothing, makes no decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.scheduler.calibration import silent
from services.scheduler.columns import Array
from services.scheduler.working_set import WorkingSet
from shared.contracts.standing import (
    CellStanding,
    HardnessPage,
    Of,
    ProbeWhy,
    ProblemStanding,
    ProblemWhy,
    Reason,
    State,
)

PER_PAGE = 50
SORTS = {
    Of.problems: ("problem", "category", "cell", "state", "chance", "deviation", "draw", "groups"),
    Of.cells: ("cell", "problems", "free", "trained", "chance", "draw", "attempts", "solved", "promised"),
}
ORDERS = ("asc", "desc")
STATES = list(State)
_FREE, _TRAINED = STATES.index(State.free), STATES.index(State.trained)


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
    """Of every problem of a run at one moment; arrays by the catalogue's handles, so that ten million fit. Rows with equal
    keys stand in the order of their handles."""

    def __init__(self, ws: WorkingSet) -> None:
        self._ws, catalogue = ws, ws.catalogue
        kinds = catalogue.kinds(ws.hardness)
        self._kind = catalogue.places(kinds).astype(np.int32)
        categories, cells = [category for category, _ in kinds], [cell for _, cell in kinds]
        a, b = ws.hardness.posterior(categories, cells) if kinds else (np.ones(0), np.ones(0))
        n = a + b
        self._chance, self._deviation = a / n, np.sqrt(a * b / (n * n * (n + 1)))  # by kind
        self.weighted = ws.config is None or ws.config.schedule.hardness_sampling
        weights = np.ones(len(kinds))
        if self.weighted:
            weights = catalogue.weights(ws.hardness, step=ws.tip)
        self._state = _states(ws)
        free = np.bincount(self._kind[self._state == _FREE], minlength=len(kinds))
        self._draw = weights / max(float((weights * free).sum()), 1e-300)  # by kind, of a free problem

    def page(self, query: Query, results: Callable[[Sequence[str]], Mapping[str, Last]]) -> HardnessPage:
        """`results`: what became of the last groups of the few problems that are shown."""
        cells = _Cells(self._ws, self._state, self.chance(), self.draw()) if query.of is Of.cells else None
        rows = cells.sorted(query.sort) if cells is not None else self._sorted(query)
        if query.order == "desc":
            rows = rows[::-1]
        pages = max(1, -(-len(rows) // PER_PAGE))
        shown = min(query.page, pages)
        some = rows[(shown - 1) * PER_PAGE : shown * PER_PAGE].tolist()
        common: dict[str, Any] = {
            "run": self._ws.id,
            "step": self._ws.tip,
            "weighted": self.weighted,
            "mean": self._ws.hardness.mean,
            "page": shown,
            "pages": pages,
            "total": len(rows),
        }
        if cells is not None:
            return HardnessPage(cells=[cells.cell(i) for i in some], **common)
        names = [self._ws.catalogue.ids[handle] for handle in some]
        last = results(names)
        return HardnessPage(
            problems=[self._problem(handle, name, last.get(name)) for handle, name in zip(some, names, strict=True)],
            **common,
        )

    def why(self, problem: str, results: Callable[[Sequence[str]], Mapping[str, Last]]) -> ProblemWhy:
        """Raises KeyError for a problem that was never admitted. `results`: as in `page`."""
        ws, handle = self._ws, self._ws.catalogue.handle(problem)
        one = self._problem(handle, problem, results([problem]).get(problem))
        category, cell = ws.catalogue.kind_at(handle)
        size = ws.config.schedule.group_size if ws.config is not None else 8
        (chance,) = ws.hardness.chance([category], [cell]).tolist()
        free = int((self._state == _FREE).sum())
        return ProblemWhy(
            run=ws.id,
            step=ws.tip,
            weighted=self.weighted,
            mean=ws.hardness.mean,
            power=ws.hardness.power(ws.tip),
            free=free,
            relative=one.draw * free,
            silent=silent(chance, ws.hardness.calibration.spread, size),
            standing=one,
            probe=self._probe(problem, cell),
        )

    def _probe(self, problem: str, cell: str) -> ProbeWhy | None:
        tried, catalogue = self._ws.probed, self._ws.catalogue
        if not tried:
            return None
        relatives = [tried[name] for name in tried if name != problem and catalogue.kind(name)[1] == cell]
        attempts, solved = tried.get(problem, (0, 0))
        return ProbeWhy(
            attempts=attempts,
            solved=solved,
            relatives=len(relatives),
            relatives_attempts=sum(attempts for attempts, _ in relatives),
            relatives_solved=sum(solved for _, solved in relatives),
            problems=len(tried),
        )

    def chance(self) -> Array:
        found: Array = self._chance[self._kind]
        return found

    def draw(self) -> Array:
        """Share of the weight of all free problems, by problem."""
        return np.where(self._state == _FREE, self._draw[self._kind], 0.0)

    def _sorted(self, query: Query) -> Array:
        """Handles of the rows that are asked for, rising."""
        keep = np.arange(len(self._state))
        if query.cell:
            keep = np.sort(self._ws.catalogue.relatives(query.cell)).astype(np.int64)
        if query.state:
            keep = keep[self._state[keep] == STATES.index(State(query.state))]
        found: Array = keep[np.argsort(self._keys(query.sort, keep), kind="stable")]
        return found

    def _keys(self, sort: str, handles: Array) -> Array:
        catalogue, kind = self._ws.catalogue, self._kind[handles]
        match sort:
            case "state":
                return self._state[handles]
            case "chance":
                return self._chance[kind]
            case "deviation":
                return self._deviation[kind]
            case "draw":
                return self.draw()[handles]
            case "groups":
                return catalogue.next_numbers()[handles]
            case "category":
                codes, names = catalogue.categories()
                return _ranks(names)[codes[handles]]
            case "cell":
                return _ranks([catalogue.kind_at(handle)[1] for handle in handles.tolist()])
            case _:
                return _ranks([catalogue.ids[handle] for handle in handles.tolist()])

    def _problem(self, handle: int, name: str, last: Last | None) -> ProblemStanding:
        ws, kind = self._ws, self._kind[handle]
        category, cell = ws.catalogue.kind_at(handle)
        state = STATES[self._state[handle]]
        return ProblemStanding(
            problem=name,
            category=category,
            cell=cell,
            state=state,
            chance=float(self._chance[kind]),
            deviation=float(self._deviation[kind]),
            draw=float(self._draw[kind]) if state is State.free else 0.0,
            groups=ws.catalogue.next_number(name),
            attempts=last.attempts if last else 0,
            solved=last.solved if last else 0,
            step=last.step if last else -1,
            reason=last.reason[:500] if last else "",
            reasons=[
                Reason(kind=f.kind, of=f.of, odds=f.odds, attempts=f.attempts)
                for f in ws.hardness.explain(category, cell)
            ],
        )


class _Cells:
    """The same by cell; arrays by cell."""

    def __init__(self, ws: WorkingSet, state: Array, chance: Array, draw: Array) -> None:
        self._catalogue = ws.catalogue
        codes, self._first, which = np.unique(ws.catalogue.cells(), return_index=True, return_inverse=True)

        def summed(values: Array | None) -> Array:
            found: Array = np.bincount(which, weights=values, minlength=len(codes))
            return found

        tried = np.zeros((len(codes), 3))
        for cell in ws.hardness.tried:
            members = ws.catalogue.relatives(cell)
            if len(members):
                tried[which[members[0]]] = ws.hardness.cells([cell])[0]
        count = summed(None)
        self._of: dict[str, Array] = {
            "problems": count,
            "free": summed((state == _FREE).astype(float)),
            "trained": summed((state == _TRAINED).astype(float)),
            "chance": summed(chance) / np.maximum(count, 1),
            "draw": summed(draw),
            "attempts": tried[:, 0],
            "solved": tried[:, 1],
            "promised": tried[:, 2],
        }

    def _name(self, i: int) -> str:
        return self._catalogue.kind_at(int(self._first[i]))[1]

    def sorted(self, sort: str) -> Array:
        """Rows, rising."""
        keys = _ranks([self._name(i) for i in range(len(self._first))]) if sort == "cell" else self._of[sort]
        found: Array = np.argsort(keys, kind="stable")
        return found

    def cell(self, i: int) -> CellStanding:
        of = {name: float(column[i]) for name, column in self._of.items()}
        return CellStanding(
            cell=self._name(i),
            problems=int(of["problems"]),
            free=int(of["free"]),
            trained=int(of["trained"]),
            chance=of["chance"],
            draw=of["draw"],
            attempts=of["attempts"],
            solved=of["solved"],
            promised=of["promised"],
        )


def _ranks(names: Sequence[str]) -> Array:
    """The place of each among the names in order; equal ones have one place."""
    places = {name: place for place, name in enumerate(sorted(set(names)))}
    return np.fromiter((places[name] for name in names), np.int64, len(names))


def _states(ws: WorkingSet) -> Array:
    """uint8 per problem: a place in STATES."""
    found = np.where(ws.catalogue.free_ones(), _FREE, STATES.index(State.given_up)).astype(np.uint8)
    of = {
        State.trained: (ws.announced[group] for group in ws.trained if group in ws.announced),
        State.waiting: (group.problem for group in ws.waiting.values()),
        State.running: (group.problem for group in ws.open.values()),
    }
    for state, problems in of.items():
        found[[ws.catalogue.handle(problem) for problem in problems]] = STATES.index(state)
    return found
