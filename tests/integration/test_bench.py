"""Many sources in one sandboxed run behave as each alone, whatever their neighbours do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from services.curator.bench import ENDLESS, Item, budgeted, execute
from shared.sandbox import FunctionRun, Limits, connect
from shared.sandbox.pool import FunctionPool

PLAIN = Item("import math\nLIMIT = 9\ndef f(x):\n    return min(math.floor(x), LIMIT)", "f", ("[2.5]", "[99]", '["a"]'))
OTHER = Item("LIMIT = 1\ndef f(x, xs=[]):\n    xs.append(x)\n    return xs", "f", ("[1]", "[2]", "[3, [4]]"))
DEADLY = Item("import os\ndef f(x):\n    os._exit(x)", "f", ("[0]", "[1]"))
LOOPING = Item(
    "def f(n):\n    while n != 0:\n        n -= 1\n    return 'end'", "f", ("[3]", "[-1]", "[4]", "[-1]", "[5]")
)


PATIENT = Limits(time_s=120.0, call_s=60.0)  # on a machine that is busy


@pytest.fixture(scope="module")
def pool() -> Iterator[FunctionPool]:
    functions = connect("bubblewrap" if shutil.which("bwrap") else "process", 1)
    yield functions
    functions.close_sync()


def test_together_as_alone(pool: FunctionPool):
    items = [PLAIN, OTHER, PLAIN]
    alone = pool.run_sync([FunctionRun(item.source, item.entry, item.args, PATIENT) for item in items])
    assert execute(pool, items) == alone


def test_an_item_that_ends_the_process_costs_the_others_nothing(pool: FunctionPool):
    first, deadly, last = execute(pool, [PLAIN, DEADLY, OTHER])
    assert [first, last] == execute(pool, [PLAIN, OTHER])
    assert {result.error for result in deadly} <= ENDLESS


def test_a_budget_of_turns_ends_loops_and_changes_nothing_else(pool: FunctionPool):
    [results] = execute(pool, [Item(budgeted(LOOPING.source), "f", LOOPING.args)], patience=2)
    values, errors = [result.value for result in results], [result.error for result in results]
    assert values == ['"end"', None, '"end"', None, None]
    assert errors == ["", "Overrun", "", "Overrun", "TimeoutError"]


def test_recursion_and_comprehensions_are_counted_too(pool: FunctionPool):
    sources = [
        "def f(n):\n    return sum([1 for a in range(n) for b in range(n)])",
        "def f(n):\n    return 1 if n < 2 else f(n - 1) + f(n - 2)",
    ]
    results = execute(pool, [Item(budgeted(source), "f", ("[5]", "[90]")) for source in sources])
    assert [[result.error for result in own] for own in results] == [["", "Overrun"], ["", "Overrun"]]


def test_a_source_without_loops_is_left_as_it_is():
    assert budgeted(PLAIN.source) == PLAIN.source
