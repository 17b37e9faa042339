"""Repair problems of one recorded function: mutants that its cases notice, as public and hidden part."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from services.curator.bench import ENDLESS, Item, budgeted, execute
from services.curator.fuzz import MAX_SHOWN, MAX_VISIBLE, Recorded, shown
from services.curator.mine import Function
from shared.environments.function.runs import got, passes
from shared.problems.mutations import Mutant, Mutations
from shared.problems.schema import Case, FunctionHidden, FunctionProblem
from shared.problems.values import show
from shared.sandbox import CallResult
from shared.sandbox.pool import FunctionPool

FILE = "solution.py"
MIN_FAILING = 3
MIN_HIDDEN = 5
TRIES = 3.0  # mutants tried per problem wanted
# Errors that any reader of the traceback repairs at once; a problem that shows little else teaches little.
_CRASHES = frozenset(["TypeError", "NameError", "AttributeError", "UnboundLocalError", "Unprintable"])
MAX_CRASHING = 0.75
# Kinds with very many sites would otherwise fill every second turn.
_WEIGHTS = {"target": 0.3, "variable": 0.7, "string": 0.7, "exception": 0.5, "default": 0.6}


Made = tuple[FunctionProblem, FunctionHidden]


@dataclass(frozen=True, slots=True)
class Broken:
    """A mutant and what it does: one result per case of the recorded function."""

    mutant: Mutant
    results: list[CallResult]
    failing: list[int]


def break_functions(pool: FunctionPool, recorded: Sequence[Recorded], wanted: Sequence[int]) -> list[list[Broken]]:
    """For each function at most `wanted` mutants that differ in what they do."""
    drawn: list[tuple[int, Mutant]] = []
    for index, (function, count) in enumerate(zip(recorded, wanted, strict=True)):
        rng = random.Random(f"mutate {function.function.key}")
        mutants = Mutations(function.function.source).draw(rng, _WEIGHTS)
        drawn += [(index, mutant) for mutant, _ in zip(mutants, range(int(count * TRIES)), strict=False)]
    items = [
        Item(
            budgeted(mutant.source), recorded[index].function.entry, tuple(case.args for case in recorded[index].cases)
        )
        for index, mutant in drawn
    ]
    broken: list[list[Broken]] = [[] for _ in recorded]
    behaviours: list[set[tuple[str, ...]]] = [set() for _ in recorded]
    for (index, mutant), results in zip(drawn, execute(pool, items), strict=True):
        failing = noticed(recorded[index].cases, results)
        behaviour = tuple(result.value or result.error for result in results)
        if failing and len(broken[index]) < wanted[index] and behaviour not in behaviours[index]:
            behaviours[index].add(behaviour)
            broken[index].append(Broken(mutant, results, failing))
    return broken


def noticed(cases: Sequence[Case], results: Sequence[CallResult]) -> list[int]:
    """Indices of the failing cases if the mutant makes a problem, else none."""
    if any(result.error in ENDLESS for result in results):
        return []
    failing = [index for index, pair in enumerate(zip(cases, results, strict=True)) if not passes(*pair)]
    crashes = sum(results[index].error in _CRASHES for index in failing)
    return failing if len(failing) >= MIN_FAILING and crashes <= MAX_CRASHING * len(failing) else []


def problem(
    function: Function, licence: str, cases: Sequence[Case], broken: Broken
) -> tuple[FunctionProblem, FunctionHidden] | None:
    """None where no two or three failing cases are short enough to be shown, or too few would stay hidden."""
    rng = random.Random(f"visible {function.key} {broken.mutant.source}")
    visible = _visible(cases, broken, rng)
    hidden = [index for index in range(len(cases)) if index not in visible]
    if len(visible) < 2 or len(hidden) < MIN_HIDDEN or not any(index in broken.failing for index in hidden):
        return None
    name = "p-" + xxhash.xxh3_128_hexdigest(f"{function.key}\0{broken.mutant.source}".encode())[:20]
    return (
        FunctionProblem(
            id=name,
            category=f"debugging/{broken.mutant.kind}",  # for the hardness estimate; no chat format shows it
            prompt=f"`{function.entry}` has a bug in one line: make it return what the tests expect.",
            files={FILE: broken.mutant.source},
            entry=function.entry,
            visible=[cases[index] for index in visible],
            actual=[got(cases[index], broken.results[index]) for index in visible],
            cell=function.key,
            origin=function.origin,
            licence=licence,
        ),
        FunctionHidden(
            id=name,
            cases=[cases[index] for index in hidden],
            solution={FILE: function.source},
            bug=broken.mutant.kind,
        ),
    )


def _visible(cases: Sequence[Case], broken: Broken, rng: random.Random) -> list[int]:
    """Two failing cases, values before exceptions and with different expected results where possible, and a passing one."""
    short = [index for index, case in enumerate(cases) if _fits(case, broken.results[index])]
    failing = [index for index in short if index in broken.failing]
    rng.shuffle(failing)
    failing.sort(key=lambda index: bool(broken.results[index].error))
    if len(failing) < 2:
        return []
    first = failing[0]
    others = [index for index in failing[1:] if cases[index].expected != cases[first].expected] or failing[1:]
    passing = [index for index in short if index not in broken.failing]
    return [first, others[0], *([rng.choice(passing)] if passing else [])]


def _fits(case: Case, result: CallResult) -> bool:
    actual = result.error if result.value is None else show(result.value)
    return len(shown(case.args)) + len(show(case.expected)) <= MAX_VISIBLE and len(actual) <= MAX_SHOWN


def verified(pool: FunctionPool, function: Function, made: Sequence[Made]) -> list[Made]:
    """The gate, on exactly the shipped texts and with the origin out of reach as for graders: oracle = 1 (the solution
    passes every case) and no-op = 0 (the broken file fails visible and hidden cases, and shows what `actual` says). A
    second execution without budget, so it also drops what is flaky."""
    if not made:
        return []
    entry = function.entry
    every = list(dict.fromkeys(case for p, h in made for case in (*p.visible, *h.cases)))
    items = [Item(made[0][1].solution[FILE], entry, tuple(case.args for case in every))]
    items += [Item(p.files[FILE], entry, tuple(c.args for c in (*p.visible, *h.cases))) for p, h in made]
    oracle, *results = execute(pool, items, forbidden=(function.module,))
    if not all(passes(case, result) for case, result in zip(every, oracle, strict=True)):
        return []
    kept = []
    for (p, h), own in zip(made, results, strict=True):
        shown_now = [got(case, result) for case, result in zip(p.visible, own, strict=False)]
        fails = [not passes(case, result) for case, result in zip((*p.visible, *h.cases), own, strict=True)]
        if shown_now == p.actual and any(fails[: len(p.visible)]) and any(fails[len(p.visible) :]):
            kept.append((p, h))
    return kept
