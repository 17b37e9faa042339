"""Weighted sampling without replacement: O(log n) for a pick, for a weight and for a problem that moves. Pure.

Problems lie in cells. All problems of a cell have the cell's weight. A pick takes a cell in proportion to weight × free
problems, then the cell's next free problem in a seeded order: that of a hash of the problem's fingerprint under the seed.
Problems that were drawn before and came back are next only where no other is free in their cell.

Invariants:
- A pick is a function of the seed, the number of the pick, and the state: which problems are free, which were drawn before,
  which cell each is in, and the cells' weights. How the state came about changes nothing, nor do handles. So a process that
  rebuilds the state from the ledger picks the same.
- Weights and masses are whole numbers: sums are exact, in whatever order they were made.
- A free problem is in its cell's order: in `sorted` at or behind the cursor, in `fresh`, or in `returned`. Entries of problems that
  were taken or moved away stay there and are passed over.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import xxhash

from services.scheduler.columns import Array, Column

TOP = 1 << 24  # the largest weight: rounding to it changes a weight of a thousandth of that by 3e-5 of itself at most
FREE, DRAWN = 1, 2  # bits of a problem's state. Drawn: it was taken at least once
BULK = 256  # problems that join a cell at a time: above, the cell is sorted instead of its heap filled


def units(weights: Array, name: Callable[[int], object]) -> Array:
    """Weights as whole numbers from 1 to TOP, in proportion. Raises ValueError that names the first impossible weight.
    `name`: of the weight at a place."""
    impossible = np.flatnonzero(~(np.isfinite(weights) & (weights > 0)))
    if len(impossible):
        at = int(impossible[0])
        raise ValueError(
            f"weight of {name(at)!r}: found {float(weights[at])!r}; allowed: a finite number above 0. A problem that must "
            "not be drawn is taken out, not given the weight 0"
        )
    if not len(weights):
        return np.zeros(0, dtype=np.int64)
    return np.maximum(1, np.rint(weights * (TOP / weights.max()))).astype(np.int64)


_NONE = np.zeros(0, dtype=np.uint32)
_LOW = (1 << 32) - 1
_WORD = (1 << 64) - 1


@dataclass(slots=True)
class _Order:
    """The problems of a cell that may be free. Entries of the heaps: rank << 32 | handle."""

    sorted: Array = field(default_factory=lambda: _NONE)  # never drawn, by rank
    cursor: int = 0
    fresh: list[int] = field(default_factory=list)  # heap: never drawn, came after `sorted` was made
    returned: list[int] = field(default_factory=list)  # heap: drawn before


class Sampler:
    def __init__(self) -> None:
        self.free = 0
        # By cell. `place`: in the tree, from 1; 0: none yet.
        self._identity, self._place = Column(np.uint64), Column(np.int64)
        self._weight, self._free, self._members = Column(np.int64), Column(np.int64), Column(np.int64)
        self._orders: list[_Order] = []
        self._unused: list[int] = []  # cells that were given up
        # By problem, by its handle.
        self._prints, self._cell, self._state = Column(np.uint64), Column(np.uint32), Column(np.uint8)
        self._seed: int | None = None  # None: nothing was picked yet, and nothing is sorted
        self._salt = 0
        self._sorted = 0  # handles from here on are in no cell's order yet
        self._tree = [0]
        self._top = 1  # the greatest power of two within the tree
        self._total = 0
        self._at = np.zeros(0, dtype=np.int64)  # cells by place, from 0
        self._ordered = False  # `_at` and `_place` are of the cells that there are
        self._planted = False  # the tree is of the weights that hold

    def __len__(self) -> int:
        return self._cell.size

    # Cells and their weights

    @property
    def cells(self) -> int:
        """Numbers of cells so far."""
        return len(self._orders)

    def members(self, cell: int) -> int:
        """Its problems, free or not."""
        return int(self._members.rows[cell])

    def members_of(self, cells: Array) -> Array:
        """As `members`, of several cells."""
        found: Array = self._members.rows[cells]
        return found

    def new_cell(self, identity: int) -> int:
        """Return its number. `identity`: 64 bits that no other cell has; they must follow from what the cell is."""
        self._ordered = self._planted = False
        if self._unused:
            cell = self._unused.pop()
            self._identity.rows[cell] = identity
            return cell
        for column, value in ((self._identity, identity), (self._weight, 1), (self._free, 0), (self._members, 0)):
            column.extend(np.array([value], dtype=column.rows.dtype))
        self._place.extend(np.zeros(1, dtype=np.int64))
        self._orders.append(_Order())
        return len(self._orders) - 1

    def give_up(self, cell: int) -> None:
        """Forget a cell without members. Its number may be used again."""
        if self.members(cell):
            raise ValueError(f"cell {cell}: found {self.members(cell)} problems in it; allowed: none")
        self._orders[cell], self._weight.rows[cell] = _Order(), 1
        self._unused.append(cell)
        self._ordered = self._planted = False

    def weigh(self, cell: int, weight: int) -> None:
        """Give one cell another weight: O(log cells)."""
        if not 1 <= weight <= TOP:
            raise ValueError(f"weight of cell {cell}: found {weight!r}; allowed: 1 to {TOP}")
        if self._planted:
            self._grow(cell, (weight - int(self._weight.rows[cell])) * int(self._free.rows[cell]))
        self._weight.rows[cell] = weight

    def weigh_all(self, cells: Array, weights: Array) -> None:
        """Give many cells other weights, of `units`."""
        self._weight.rows[cells] = weights
        self._planted = False

    def in_order(self) -> Array:
        """The cells that have members, in the order of their identities."""
        if not self._ordered:
            live = np.flatnonzero(self._members.view)
            self._at = live[np.argsort(self._identity.rows[live], kind="stable")]
            self._place.rows[:] = 0
            self._place.rows[self._at] = np.arange(1, len(self._at) + 1)
            self._ordered, self._planted = True, False
        return self._at

    # Problems

    def add(self, prints: Array, cells: Array) -> None:
        """Add new problems, free. Their handles continue those before. `prints`: fingerprints of their ids."""
        self._prints.extend(prints)
        self._cell.extend(cells)
        self._state.extend(np.full(len(prints), FREE, dtype=np.uint8))
        self.free += len(prints)
        for cell, count in self._counted(cells):
            self._admit(cell, count)
            self._count(cell, count)

    def _admit(self, cell: int, members: int) -> None:
        before = int(self._members.rows[cell])
        self._members.rows[cell] = before + members
        if not before or not before + members:
            self._ordered = False

    def cell_of(self, handle: int) -> int:
        return int(self._cell.rows[handle])

    @property
    def cells_of(self) -> Array:
        """The cell of every problem, valid until problems are added."""
        return self._cell.view

    def is_free(self, handle: int) -> bool:
        return bool(self._state.rows[handle] & FREE)

    def free_ones(self) -> Array:
        """bool per problem."""
        found: Array = (self._state.view & FREE) > 0
        return found

    def take(self, handle: int) -> None:
        """Let nobody draw it. Taking it again changes nothing."""
        state = int(self._state.rows[handle])
        self._state.rows[handle] = DRAWN
        if state & FREE:
            self.free -= 1
            self._count(self.cell_of(handle), -1)

    def give_back(self, handle: int) -> None:
        """Let it be drawn once more. Giving back a free one changes nothing."""
        state = int(self._state.rows[handle])
        if state & FREE:
            return
        self._state.rows[handle] = FREE | DRAWN
        self.free += 1
        cell = self.cell_of(handle)
        self._count(cell, 1)
        if self._seed is not None:
            heapq.heappush(self._orders[cell].returned, self._entry(handle))

    def move(self, handle: int, to: int) -> None:
        """Put one problem into another cell: O(log problems). It keeps its rank."""
        source, state = self.cell_of(handle), self._state.rows[handle]
        self._admit(source, -1)
        self._admit(to, 1)
        self._cell.rows[handle] = to
        if not state & FREE:
            return
        self._count(source, -1)
        self._count(to, 1)
        if self._seed is not None and (handle < self._sorted or state & DRAWN):
            order = self._orders[to]
            heapq.heappush(order.returned if state & DRAWN else order.fresh, self._entry(handle))

    def move_all(self, handles: Array, to: int) -> None:
        """Put problems into another cell, as `move` does."""
        moving = handles[(self._state.rows[handles] & FREE) > 0]
        for cell, count in self._counted(self._cell.rows[handles]):
            self._admit(cell, -count)
        for cell, count in self._counted(self._cell.rows[moving]):
            self._count(cell, -count)
        self._cell.rows[handles] = to
        self._admit(to, len(handles))
        self._count(to, len(moving))
        if self._seed is not None:
            self._join(to, moving)

    def _counted(self, cells: Array) -> Iterator[tuple[int, int]]:
        found, counts = np.unique(cells, return_counts=True)
        return zip(found.tolist(), counts.tolist(), strict=True)

    # Picking

    def pick(self, seed: int, number: int) -> int | None:
        """Take one free problem. None: no problem is free. `number`: of the pick, in the run of this seed."""
        if not self.free:
            return None
        if seed != self._seed:
            self._reseed(seed)
        if self._sorted < len(self):
            self._settle()
        if not self._planted or not self._ordered:
            self._plant()
        luck = xxhash.xxh3_128_intdigest(b"%d|%d" % (seed, number))
        cell = self._find(luck * self._total >> 128)
        handle = self._next(cell)
        self._state.rows[handle] = DRAWN
        self.free -= 1
        self._count(cell, -1)
        return handle

    def _next(self, cell: int) -> int:
        """The next free problem of a cell that has one."""
        state, cells, order = self._state.rows, self._cell.rows, self._orders[cell]
        handles, at, end = order.sorted, order.cursor, len(order.sorted)
        while at < end and (state[handles[at]] != FREE or cells[handles[at]] != cell):
            at += 1
        order.cursor = at
        _pass_over(order.fresh, state, cells, FREE, cell)
        if at < end and (not order.fresh or self._entry(int(handles[at])) <= order.fresh[0]):
            order.cursor = at + 1
            return int(handles[at])
        if order.fresh:
            return heapq.heappop(order.fresh) & _LOW
        _pass_over(order.returned, state, cells, FREE | DRAWN, cell)
        return heapq.heappop(order.returned) & _LOW

    # Orders within cells

    def _reseed(self, seed: int) -> None:
        self._seed, self._sorted = seed, 0
        self._salt = xxhash.xxh3_64_intdigest(b"%d" % seed)
        self._orders = [_Order() for _ in self._orders]
        for handle in np.flatnonzero(self._state.view == FREE | DRAWN).tolist():
            heapq.heappush(self._orders[self.cell_of(handle)].returned, self._entry(handle))

    def _settle(self) -> None:
        """Give the problems that came since the last pick their places in the orders."""
        new, self._sorted = np.arange(self._sorted, len(self), dtype=np.uint32), len(self)
        if len(new) > max(BULK, len(self) // 16):
            return self._sort()
        new = new[self._state.rows[new] == FREE]
        cells = self._cell.rows[new]
        for cell in np.unique(cells).tolist():
            self._join(cell, new[cells == cell])

    def _sort(self) -> None:
        """Make the order of every cell from its problems that were never drawn."""
        for order in self._orders:
            order.sorted, order.cursor, order.fresh = _NONE, 0, []
        handles = np.flatnonzero(self._state.view == FREE).astype(np.uint32)
        if not len(handles):
            return
        handles = handles[np.argsort(self._ranks(handles))]
        cells = self._cell.rows[handles]
        if len(self._orders) <= 1 << 16:
            cells = cells.astype(np.uint16)  # sorted in linear time
        by_cell = np.argsort(cells, kind="stable")
        handles, cells = handles[by_cell], cells[by_cell]
        found, starts = np.unique(cells, return_index=True)
        for cell, some in zip(found.tolist(), np.split(handles, starts[1:]), strict=True):
            self._orders[cell].sorted = some

    def _join(self, cell: int, handles: Array) -> None:
        """Give free problems that came into a cell their places."""
        order, state = self._orders[cell], self._state.rows[handles]
        for handle in handles[state == FREE | DRAWN].tolist():
            heapq.heappush(order.returned, self._entry(handle))
        new = handles[(state == FREE) & (handles < self._sorted)]
        if len(new) <= BULK:
            for handle in new.tolist():
                heapq.heappush(order.fresh, self._entry(handle))
            return
        waiting = np.fromiter((entry & _LOW for entry in order.fresh), dtype=np.uint32, count=len(order.fresh))
        every = np.unique(np.concatenate([order.sorted[order.cursor :], waiting, new]))
        every = every[(self._state.rows[every] == FREE) & (self._cell.rows[every] == cell)]
        order.sorted, order.cursor, order.fresh = every[np.argsort(self._ranks(every))], 0, []

    def _ranks(self, handles: Array) -> Array:
        """splitmix64 of each fingerprint under the seed."""
        mixed = self._prints.rows[handles] ^ np.uint64(self._salt)
        with np.errstate(over="ignore"):  # it wraps on purpose
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        ranks: Array = mixed ^ (mixed >> np.uint64(31))
        return ranks

    def _entry(self, handle: int) -> int:
        """As `_ranks`, of one, for a heap."""
        mixed = int(self._prints.rows[handle]) ^ self._salt
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _WORD
        return (mixed ^ (mixed >> 31)) << 32 | handle

    # The tree of masses (Fenwick): tree[i] is the sum of the i & -i masses up to place i

    def _plant(self) -> None:
        at = self.in_order()
        sums = np.concatenate([[0], np.cumsum(self._weight.rows[at] * self._free.rows[at])])
        places = np.arange(len(sums))
        self._tree = (sums - sums[places - (places & -places)]).tolist()
        self._top = 1 << (len(at).bit_length() - 1)
        self._total = int(sums[-1])
        self._planted = True

    def _count(self, cell: int, more: int) -> None:
        self._free.rows[cell] += more
        if self._planted:
            self._grow(cell, more * int(self._weight.rows[cell]))

    def _grow(self, cell: int, mass: int) -> None:
        place = int(self._place.rows[cell])
        if not self._ordered or not place:
            self._planted = False
            return
        tree, end = self._tree, len(self._tree)
        self._total += mass
        while place < end:
            tree[place] += mass
            place += place & -place

    def _find(self, goal: int) -> int:
        """The cell in which the running sum of masses passes `goal`."""
        tree, end, place, step = self._tree, len(self._tree), 0, self._top
        while step:
            there = place + step
            if there < end and tree[there] <= goal:
                goal -= tree[there]
                place = there
            step >>= 1
        return int(self._at[place])


def _pass_over(heap: list[int], state: Array, cells: Array, wanted: int, cell: int) -> None:
    """Drop the first entries of problems that were taken or moved away."""
    while heap and (state[heap[0] & _LOW] != wanted or cells[heap[0] & _LOW] != cell):
        heapq.heappop(heap)
