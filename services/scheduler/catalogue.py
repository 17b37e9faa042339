"""The problems of a run: which are free, and the draw among them. Pure."""

from __future__ import annotations

import numpy as np

from services.scheduler import hardness


class Catalogue:
    """The run's problems: which may be drawn, and what hardness needs to know of them."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self.ids: list[str] = []
        self.packs: list[str] = []
        self._kinds: dict[tuple[str, str], int] = {}
        self._categories: list[str] = []  # per kind
        self._cells: list[str] = []  # per kind
        self.numbers: list[int] = []  # groups so far
        self._kind = np.zeros(0, dtype=np.int64)  # per problem; as an array, for a draw reads all of it
        self._free = np.zeros(0, dtype=bool)
        self._fingerprints = np.zeros(0, dtype=np.uint64)

    def add(self, problems: list[tuple[str, str, str, str]]) -> None:
        """(id, category, cell, pack hash) of new problems."""
        kinds = []
        for problem, category, cell, pack in problems:
            self.index[problem] = len(self.ids)
            self.ids.append(problem)
            self.packs.append(pack)
            kind = self._kinds.setdefault((category, cell), len(self._kinds))
            if kind == len(self._categories):
                self._categories.append(category)
                self._cells.append(cell)
            kinds.append(kind)
            self.numbers.append(0)
        self._kind = np.concatenate([self._kind, np.asarray(kinds, dtype=np.int64)])
        self._free = np.concatenate([self._free, np.ones(len(problems), dtype=bool)])
        prints = hardness.fingerprints([p[0] for p in problems])
        self._fingerprints = np.concatenate([self._fingerprints, prints])

    def __contains__(self, problem: str) -> bool:
        return problem in self.index

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def free(self) -> int:
        return int(self._free.sum())

    def free_ones(self) -> np.ndarray:
        """bool per problem, in the order of `ids`."""
        return self._free.copy()

    def take(self, problem: str) -> None:
        self._free[self.index[problem]] = False

    def give_back(self, problem: str) -> None:
        self._free[self.index[problem]] = True

    def kind(self, problem: str) -> tuple[str, str]:
        """(category, cell)."""
        kind = self._kind[self.index[problem]]
        return self._categories[kind], self._cells[kind]

    def draw(self, estimates: hardness.Hardness | None, count: int, *, step: int, seed: int, number: int) -> list[str]:
        """Free problems, without repetition; uniformly without `estimates`."""
        free = np.flatnonzero(self._free)
        if estimates is None:
            weights = np.ones(len(free))
        else:
            weights = estimates.weights(self._categories, self._cells, step=step)[self._kind[free]]
        chosen = hardness.draw(weights, self._fingerprints[free], count, seed=seed, number=number)
        return [self.ids[i] for i in free[chosen]]
