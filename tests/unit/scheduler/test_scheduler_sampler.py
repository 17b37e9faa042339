"""The sampler picks what a naive one picks that goes through all problems, and the same after a kill at any point."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.scheduler import sampler as rule_of
from services.scheduler.columns import Column, Index, Names, fingerprints
from services.scheduler.sampler import TOP, Sampler, units

WORD = (1 << 64) - 1


@dataclass
class Problem:
    name: str
    cell: int
    free: bool = True
    drawn: bool = False


class Naive:
    """The same definition, O(n) a pick, from whole numbers of Python alone."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.weights: dict[int, int] = {}  # cell, which is its identity too

    def rank(self, name: str, seed: int) -> int:
        z = xxhash.xxh3_64_intdigest(name.encode()) ^ xxhash.xxh3_64_intdigest(b"%d" % seed)
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & WORD
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & WORD
        return z ^ (z >> 31)

    def pick(self, seed: int, number: int) -> str | None:
        free = Counter(p.cell for p in self.problems if p.free)
        masses = {cell: self.weights[cell] * free[cell] for cell in sorted(self.weights)}
        goal = xxhash.xxh3_128_intdigest(b"%d|%d" % (seed, number)) * sum(masses.values()) >> 128
        for cell, mass in masses.items():
            if goal < mass:
                there = [p for p in self.problems if p.free and p.cell == cell]
                chosen = min(there, key=lambda p: (p.drawn, self.rank(p.name, seed)))
                chosen.free, chosen.drawn = False, True
                return chosen.name
            goal -= mass
        return None


def copied(naive: Naive, names: list[str]) -> tuple[Sampler, list[str], dict[int, int]]:
    """A sampler in the same state, made in another order: what a process does that starts from the ledger. The names of its
    problems and the numbers of its cells."""
    order = sorted(naive.problems, key=lambda p: xxhash.xxh3_64_intdigest(f"{len(names)}{p.name}".encode()))
    made = Sampler()
    number = {cell: made.new_cell(cell) for cell in sorted(naive.weights, reverse=True)}
    made.add(fingerprints([p.name for p in order]), np.array([number[p.cell] for p in order], dtype=np.uint32))
    for cell, weight in naive.weights.items():
        made.weigh(number[cell], weight)
    for handle, problem in enumerate(order):
        if problem.drawn or not problem.free:
            made.take(handle)
        if problem.drawn and problem.free:
            made.give_back(handle)
    return made, [p.name for p in order], number


class Model(RuleBasedStateMachine):
    @initialize(seed=st.integers(-5, 2**40))
    def begin(self, seed: int) -> None:
        self.seed, self.number = seed, 0
        self.naive, self.sampler = Naive(), Sampler()
        self.names: list[str] = []
        self.cells: dict[int, int] = {}  # identity -> number of the sampler's

    def place(self, data: st.DataObject, label: str) -> int:
        return data.draw(st.integers(0, len(self.names) - 1), label=label)

    def problem(self, name: str) -> Problem:
        return next(p for p in self.naive.problems if p.name == name)

    def cell(self, identity: int) -> int:
        if identity not in self.cells:
            self.cells[identity] = self.sampler.new_cell(identity)
            self.naive.weights[identity] = 1
        return self.cells[identity]

    @rule(identities=st.lists(st.integers(0, 6), min_size=0, max_size=12))
    def add(self, identities: list[int]) -> None:
        """A source joins, or grows; an empty one changes nothing."""
        new = [f"p{len(self.names) + i}" for i in range(len(identities))]
        cells = np.array([self.cell(i) for i in identities], dtype=np.uint32)
        self.sampler.add(fingerprints(new), cells)
        self.names += new
        self.naive.problems += [Problem(name, cell) for name, cell in zip(new, identities, strict=True)]

    @rule(identity=st.integers(0, 6), weight=st.integers(1, TOP))
    def weigh(self, identity: int, weight: int) -> None:
        self.sampler.weigh(self.cell(identity), weight)
        self.naive.weights[identity] = weight

    @rule(data=st.data(), back=st.booleans())
    def take_or_give_back(self, data: st.DataObject, back: bool) -> None:
        if self.names:
            handle = self.place(data, "problem")
            problem = self.problem(self.names[handle])
            if back and not problem.free:
                self.sampler.give_back(handle)
                problem.free = True
            elif not back:
                self.sampler.take(handle)
                problem.free, problem.drawn = False, True

    @rule(identity=st.integers(0, 6))
    def a_source_disappears(self, identity: int) -> None:
        for handle, name in enumerate(self.names):
            problem = self.problem(name)
            if problem.cell == identity:
                self.sampler.take(handle)
                problem.free, problem.drawn = False, True

    @rule(data=st.data(), identity=st.integers(0, 6))
    def move(self, data: st.DataObject, identity: int) -> None:
        if self.names:
            handle = self.place(data, "problem")
            self.sampler.move(handle, self.cell(identity))
            self.problem(self.names[handle]).cell = identity

    @rule(data=st.data(), identity=st.integers(0, 6))
    def move_many(self, data: st.DataObject, identity: int) -> None:
        if self.names:
            some = data.draw(st.sets(st.integers(0, len(self.names) - 1)), label="problems")
            self.sampler.move_all(np.array(sorted(some), dtype=np.uint32), self.cell(identity))
            for handle in some:
                self.problem(self.names[handle]).cell = identity

    @rule(times=st.integers(1, 8))
    def pick(self, times: int) -> None:
        for _ in range(times):
            self.number += 1
            handle = self.sampler.pick(self.seed, self.number)
            assert (None if handle is None else self.names[handle]) == self.naive.pick(self.seed, self.number)

    @rule(seed=st.integers(0, 3))
    def reseed(self, seed: int) -> None:
        self.seed = seed

    @rule()
    def give_up_empty_cells(self) -> None:
        for identity, number in list(self.cells.items()):
            if not self.sampler.members(number):
                self.sampler.give_up(number)
                del self.cells[identity], self.naive.weights[identity]

    @rule()
    def kill(self) -> None:
        self.sampler, self.names, self.cells = copied(self.naive, self.names)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "naive"):
            assert self.sampler.free == sum(p.free for p in self.naive.problems)
            assert self.sampler.free_ones().sum() == self.sampler.free


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestAgainstTheNaiveOne(Model.TestCase):  # type: ignore[name-defined, misc]
    pass


class TestWhenAllIsDoneInBulk(Model.TestCase):  # type: ignore[name-defined, misc]
    @pytest.fixture(autouse=True)
    def bulk(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(rule_of, "BULK", 1)
        return None


def made(cells: dict[int, int], weights: dict[int, int] | None = None) -> Sampler:
    """`cells`: cell -> problems."""
    sampler = Sampler()
    number = {cell: sampler.new_cell(cell) for cell in cells}
    every = [number[cell] for cell, count in cells.items() for _ in range(count)]
    sampler.add(fingerprints([f"p{i}" for i in range(len(every))]), np.array(every, dtype=np.uint32))
    for cell, weight in (weights or {}).items():
        sampler.weigh(number[cell], weight)
    return sampler


def drawn(sampler: Sampler, seed: int, count: int) -> list[int]:
    picks = (sampler.pick(seed, number) for number in range(1, count + 1))
    return [handle for handle in picks if handle is not None]


def test_no_problem_is_picked_twice_and_all_are_picked() -> None:
    sampler = made({0: 3000, 1: 1, 2: 999}, {0: 1, 1: 5, 2: 3})
    assert sorted(drawn(sampler, 7, 4000)) == list(range(4000))
    assert sampler.pick(7, 4001) is None


def chi_square(counts: Any, expected: Any) -> float:
    """In standard deviations above its mean."""
    counts, expected = np.asarray(counts, dtype=float), np.asarray(expected, dtype=float)
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


def test_problems_are_picked_in_proportion_to_their_weights() -> None:
    """One pick each of many seeds: 30 problems of three weights."""
    weights, picks = {0: 1, 1: 3, 2: 8}, 4_000
    counts = Counter(drawn(made(dict.fromkeys(weights, 10), weights), seed, 1)[0] for seed in range(picks))
    expected = [picks * weights[handle // 10] / 120 for handle in range(30)]
    assert abs(chi_square([counts[handle] for handle in range(30)], expected)) < 4


def test_later_picks_are_proportional_among_what_is_left() -> None:
    """The second of two picks, by the race's formula: P(second in cell b) = sum over first of P(first) w_b n_b / rest."""
    seeds, mass = 4_000, {0: 2 * 1, 1: 4 * 2}
    second = Counter(drawn(made({0: 2, 1: 4}, {0: 1, 1: 2}), seed, 2)[1] // 2 > 0 for seed in range(seeds))
    total = sum(mass.values())
    in_one = mass[0] / total * mass[1] / (total - 1) + mass[1] / total * (mass[1] - 2) / (total - 2)
    assert abs(second[True] / seeds - in_one) < 0.03


def test_the_picks_of_a_run_do_not_depend_on_where_it_was_stopped() -> None:
    """A kill after each of the first hundred picks."""
    naive = Naive()
    naive.weights = {1: 5, 2: 1, 3: 40}
    naive.problems = [Problem(f"p{i}", 1 + i % 3) for i in range(60)]
    sampler, names, _ = copied(naive, [])
    whole = [names[handle] for handle in drawn(sampler, 11, 60)]
    for stop in range(60):
        for problem in naive.problems:
            problem.drawn = problem.name in whole[:stop]
            problem.free = not problem.drawn
        again, names, _ = copied(naive, whole[:stop])
        rest = [again.pick(11, number) for number in range(stop + 1, 61)]
        assert [names[handle] for handle in rest if handle is not None] == whole[stop:]


def test_one_problem_left_and_none() -> None:
    sampler = made({0: 1})
    assert [sampler.pick(1, 1), sampler.pick(1, 2)] == [0, None]
    sampler.give_back(0)
    assert sampler.pick(1, 3) == 0
    assert Sampler().pick(1, 1) is None


@pytest.mark.parametrize("bad", [float("nan"), 0.0, -1.0, float("inf")])
def test_an_impossible_weight_is_named(bad: float) -> None:
    with pytest.raises(ValueError, match=r"weight of 'hard': found .*; allowed: a finite number above 0"):
        units(np.array([1.0, bad]), ["easy", "hard"].__getitem__)
    with pytest.raises(ValueError, match="weight of cell 0: found 0; allowed: 1 to"):
        made({0: 1}).weigh(0, 0)


def test_whole_weights_are_within_three_hundred_thousandths_of_the_others() -> None:
    weights = np.concatenate([np.geomspace(1e-3, 1, 1000), [0.7]])
    whole = units(weights, str)
    assert np.abs(whole / TOP / weights - 1).max() < 3.1e-5
    assert len(units(np.zeros(0), str)) == 0


def test_a_cell_with_problems_cannot_be_given_up() -> None:
    with pytest.raises(ValueError, match="cell 0: found 2 problems in it; allowed: none"):
        made({0: 2}).give_up(0)


@given(st.lists(st.integers(0, 20), max_size=60), st.randoms(use_true_random=False))
def test_the_index_finds_every_handle_of_a_key(keys: list[int], chance: random.Random) -> None:
    index, at = Index(), 0
    while at < len(keys):
        some = keys[at : at + chance.randint(1, 7)]
        index.add(np.array(some, dtype=np.uint32), np.arange(at, at + len(some)))
        at += len(some)
    for key in range(21):
        there = [handle for handle, k in enumerate(keys) if k == key]
        assert sorted(index.find(key).tolist()) == there
        (any_of,) = index.any_of(np.array([key], dtype=np.uint32)).tolist()
        assert any_of in (there or [-1])


@settings(max_examples=50)
@given(st.lists(st.lists(st.text(max_size=3), max_size=4), max_size=8))
def test_names_keep_their_handles(chunks: list[list[str]]) -> None:
    names, known = Names(), {}
    for chunk in chunks:
        found = names.intern(chunk)
        for name in chunk:
            assert known.setdefault(name, found[name]) == found[name]
    assert list(names) == sorted(known, key=lambda name: known[name])
    assert all(names.find(name) == handle for name, handle in known.items())
    assert names.find("seven characters and more") is None


def test_names_of_equal_fingerprints_are_told_apart() -> None:
    names, print_of_a = Names(), fingerprints(["a"])
    names.extend(["b"], print_of_a)
    assert names.find("a") is None
    names.extend(["a"], print_of_a)
    assert (names.find("a"), names.known(["a"], print_of_a)) == (1, [1])
    with pytest.raises(IndexError, match="handle 2; allowed: 0 to 1"):
        names[2]


def test_a_column_keeps_its_rows_as_it_grows() -> None:
    column = Column(np.uint16)
    for i in range(100):
        column.extend(np.full(i, i, dtype=np.uint16))
    assert column.view.tolist() == [i for i in range(100) for _ in range(i)]
