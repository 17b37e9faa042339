"""The problems of a run: which are free, what hardness knows of them, and which is next. Pure.

Ten million problems are numpy columns and one text of all ids; no problem is a Python object. The sampler's cells follow the
hardness estimate exactly, for it knows a problem by its category and its relatives only: all problems of a category whose
relatives nobody has tried weigh the same and share a cell, and so do the problems of a category and a tried cell. When a cell
is tried for the first time, its free problems move; when it is forgotten, they move back.

Invariants:
- The next problem follows from the run's seed, the number of the draw, and what the ledger says of groups and steps. It does
  not depend on the order in which problems were admitted or read.
- A problem that is not free is never drawn. An id is admitted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import xxhash

from services.scheduler.columns import Array, Coded, Column, Index, Names, fingerprints
from services.scheduler.hardness import CATEGORY_FLOOR, Hardness
from services.scheduler.sampler import Sampler, units

OWN = (1 << 32) - 1  # as a cell: the problem's own id

Row = Sequence[str]  # a problem's id, its category, its cell, the hash of its pack
Kind = tuple[str, str | None]  # a category, and a cell that was tried; None: any that was not


class Catalogue:
    def __init__(self) -> None:
        self._ids, self._cells, self._members = Names(), Names(), Index()
        self._category, self._pack = Coded(), Coded()
        self._cell, self._groups = Column(np.uint32), Column(np.uint16)
        self._count = Column(np.uint8)
        self._skipped = 0
        self.sampler = Sampler()
        self._numbers: dict[Kind, int] = {}  # of the sampler's cells
        self._kinds: list[Kind] = []  # by number
        self._kind_category, self._kind_row = Column(np.int64), Column(np.int64)  # by number; see `Hardness.rows`
        self._rowless: list[int] = []  # kinds whose row was not looked up yet
        self._tried: set[str] = set()
        self._forgettings = 0
        self._weighed: tuple[int, ...] | None = None  # what the sampler's weights follow from; None: they must be made

    # What is there

    def add(self, rows: Sequence[Row], *, checked: bool = False) -> Sequence[Row]:
        """Take over the problems that are new, and return them. Known ids, and equal ones after the first, change nothing.
        `checked`: the caller knows that all are new and no two are equal."""
        rows = rows if checked else self._new_among(rows)
        if not rows:
            return []
        ids, categories, cells, packs = zip(*rows, strict=True)
        prints = fingerprints(ids)
        handles = self._ids.extend(ids, prints)
        self._category.extend(categories)
        self._pack.extend(packs)
        self._groups.extend(np.zeros(len(rows), dtype=np.uint16))
        self._count.extend(np.zeros(len(rows), dtype=np.uint8))
        code = self._cells.intern([cell for cell, own in zip(cells, ids, strict=True) if cell != own])
        codes = (OWN if cell == own else code[cell] for cell, own in zip(cells, ids, strict=True))
        self._cell.extend(np.fromiter(codes, np.uint32, len(rows)))
        shared = self._cell.rows[handles] != OWN
        self._members.add(self._cell.rows[handles[shared]], handles[shared])
        self.sampler.add(prints, self._kinds_of(self._category.codes(handles), cells))
        return rows

    def _kinds_of(self, categories: Array, cells: Sequence[str]) -> Array:
        """The sampler's cell of every new problem, of its category's place and its cell."""
        names, untried = self._category.names, np.zeros(len(self._category.names), dtype=np.uint32)
        for code in np.unique(categories).tolist():
            untried[code] = self._number((names[code], None))
        found: Array = untried[categories]
        if self._tried:
            for at, cell in enumerate(cells):
                if cell in self._tried:
                    found[at] = self._number((names[categories[at]], cell))
        return found

    def _new_among(self, rows: Sequence[Row]) -> list[Row]:
        distinct: dict[str, Row] = {}
        for row in rows:
            distinct.setdefault(row[0], row)
        known = self._ids.known(list(distinct), fingerprints(list(distinct)))
        return [row for row, handle in zip(distinct.values(), known, strict=True) if handle is None]

    def __contains__(self, problem: str) -> bool:
        return problem in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Names:
        """By handle. Whoever goes through all of them makes each a Python object for a moment."""
        return self._ids

    @property
    def free(self) -> int:
        return self.sampler.free

    def free_ones(self) -> Array:
        """bool per problem, in the order of the ids."""
        return self.sampler.free_ones()

    def kind(self, problem: str) -> tuple[str, str]:
        """(category, cell)."""
        return self.kind_at(self.handle(problem))

    def kind_at(self, handle: int) -> tuple[str, str]:
        code = int(self._cell.rows[handle])
        return self._category[handle], self._ids[handle] if code == OWN else self._cells[code]

    def categories(self) -> tuple[Array, list[str]]:
        """The category of every problem, as a place in the list of names."""
        return self._category.codes(np.arange(len(self))), self._category.names

    def cells(self) -> Array:
        """int64 per problem: equal for problems of one cell. The order says nothing."""
        codes = self._cell.view.astype(np.int64)
        own = np.flatnonzero(codes == OWN)
        codes[own] = len(self._cells) + own
        if len(own):
            names = list(self._cells)
            for code, handle in enumerate(self._ids.known(names, fingerprints(names))):
                if handle is not None and codes[handle] >= len(self._cells):  # an id that is the cell of others, too
                    codes[handle] = code
        return codes

    def pack(self, problem: str) -> str:
        """The hash of its pack."""
        return self._pack[self.handle(problem)]

    def relatives(self, cell: str) -> Array:
        """Handles of the problems of a cell."""
        code, own = self._cells.find(cell), self._ids.find(cell)
        found = np.zeros(0, dtype=np.uint32) if code is None else self._members.find(code)
        if own is not None and self._cell.rows[own] == OWN:
            found = np.append(found, np.uint32(own))
        return found

    def handle(self, problem: str) -> int:
        """Raises KeyError for a problem that was never admitted."""
        handle = self._ids.find(problem)
        if handle is None:
            raise KeyError(problem)
        return handle

    # Groups of a problem

    def next_number(self, problem: str) -> int:
        """The number of the problem's next group."""
        return int(self._groups.rows[self.handle(problem)]) + self._skipped

    def next_numbers(self) -> Array:
        """As `next_number`, of every problem."""
        return self._groups.view.astype(np.int64) + self._skipped

    def opened(self, problem: str, number: int) -> None:
        """Its group of this number was asked for. Each is told once."""
        handle = self.handle(problem)
        self._groups.rows[handle] = min(number - self._skipped + 1, 0xFFFF)
        self._count.rows[handle] = min(int(self._count.rows[handle]) + 1, 0xFF)

    def count(self, problem: str) -> int:
        """Return how many groups of the problem were asked for. Numbers that were left out do not count."""
        return int(self._count.rows[self.handle(problem)])

    def skip(self, numbers: int) -> None:
        """Leave out so many numbers of groups, of every problem."""
        self._skipped += numbers

    def forget_groups(self) -> None:
        """Leave out no numbers, and count no groups: they are read from the ledger again."""
        self._skipped = 0
        self._groups.view[:] = 0
        self._count.view[:] = 0

    def take(self, problem: str) -> None:
        self.sampler.take(self.handle(problem))

    def give_back(self, problem: str) -> None:
        self.sampler.give_back(self.handle(problem))

    # The next one

    def draw(self, estimates: Hardness | None, count: int, *, step: int, seed: int, number: int) -> list[str]:
        """Take up to `count` free problems; uniformly without `estimates`. `number`: of the first draw; the next ones follow."""
        self._weigh(estimates, step)
        picks = (self.sampler.pick(seed, number + i) for i in range(count))
        return [self._ids[handle] for handle in picks if handle is not None]

    def kinds(self, estimates: Hardness | None) -> list[Kind]:
        """The kinds of the problems. All problems of a kind have the same estimate. None: as `draw`."""
        if estimates is not None:
            self._follow(estimates)
        return [self._kinds[number] for number in self.sampler.in_order()]

    def places(self, kinds: Sequence[Kind]) -> Array:
        """The kind of every problem, as a place among `kinds`."""
        places = np.zeros(self.sampler.cells, dtype=np.int64)
        places[[self._numbers[kind] for kind in kinds]] = np.arange(len(kinds))
        found: Array = places[self.sampler.cells_of]
        return found

    def _weigh(self, estimates: Hardness | None, step: int) -> None:
        now = (len(self),) if estimates is None else (len(self), estimates.observed, estimates.probed, step)
        if now == self._weighed:
            return
        if estimates is not None:
            self._follow(estimates)
        numbers = self.sampler.in_order()  # the same in every process, so that weights are the same to the last bit
        weights = np.ones(len(numbers)) if estimates is None else self.weights(estimates, step=step)
        self.sampler.weigh_all(numbers, units(weights, lambda at: self._kinds[numbers[at]]))
        self._weighed = now

    def weights(self, estimates: Hardness, *, step: int) -> Array:
        """By kind, in the order of `kinds`, for which these estimates were handed in."""
        numbers = self.sampler.in_order()
        if not len(numbers):
            return np.ones(0)
        odds = estimates.odds(self._category.names)[self._kind_category.rows[numbers]]
        return self._floored(estimates.weights_of(odds, self._kind_row.rows[numbers], step=step), numbers)

    def _floored(self, weights: Array, numbers: Array) -> Array:
        """Raise the weights of top categories that would hardly be drawn. By all problems of a category, drawn or not: what is
        free changes with every draw, and the next problem must not depend on when weights were made."""
        tops = np.array([name.partition("/")[0] for name in self._category.names])
        _, top_of = np.unique(tops, return_inverse=True)
        top = top_of[self._kind_category.rows[numbers]]
        members = self.sampler.members_of(numbers)
        mass, share = np.bincount(top, weights * members), np.bincount(top, members) / max(1, len(self))
        least = CATEGORY_FLOOR * share * mass.sum()
        raised = np.where((mass > 0) & (mass < least), least / np.maximum(mass, 1e-300), 1.0)
        found: Array = weights * raised[top]
        return found

    def _follow(self, estimates: Hardness) -> None:
        """Have the sampler's cells be those that the estimates tell apart."""
        forgotten = estimates.forgettings != self._forgettings
        if forgotten:
            self._forgettings = estimates.forgettings
            for cell in sorted(self._tried - estimates.tried):
                for category in self._sort_into(cell, None):
                    self.sampler.give_up(self._numbers.pop((category, cell)))
            self._tried &= estimates.tried
            new = [cell for cell in estimates.tried if cell not in self._tried]
        else:
            new = list(islice(estimates.tried, len(self._tried), None))
        for cell in new:
            self._sort_into(cell, cell)
        self._tried.update(new)
        if forgotten or new:
            self._weighed = None
        numbers = list(self._numbers.values()) if forgotten else self._rowless
        self._kind_row.rows[numbers] = estimates.rows([self._kinds[number][1] for number in numbers])
        self._rowless = []

    def _sort_into(self, cell: str, kind: str | None) -> list[str]:
        """Move the problems of a cell to the kinds of their categories. Returns these."""
        handles = self.relatives(cell)
        codes = self._category.codes(handles)
        found = np.unique(codes).tolist()
        for code in found:
            some, to = handles[codes == code], self._number((self._category.names[code], kind))
            if len(some) == 1:
                self.sampler.move(int(some[0]), to)
            else:
                self.sampler.move_all(some, to)
        return [self._category.names[code] for code in found]

    def _number(self, kind: Kind) -> int:
        number = self._numbers.get(kind)
        if number is not None:
            return number
        number = self._numbers[kind] = self.sampler.new_cell(xxhash.xxh3_64_intdigest(repr(kind).encode()))
        if number == len(self._kinds):
            self._kinds.append(kind)
            self._kind_category.extend(np.zeros(1, dtype=np.int64))
            self._kind_row.extend(np.zeros(1, dtype=np.int64))
        self._kinds[number] = kind
        self._kind_category.rows[number], self._kind_row.rows[number] = self._category.code(kind[0]), -1
        if kind[1] is not None:
            self._rowless.append(number)
        return number
