"""Behaviour of a function, recorded: inputs that it accepts and what it returns for them, run in the sandbox.

Two probing rounds learn what kinds of input work, a third fills up. Kept is a function with at least 9 diverse cases
whose results are short enough to be shown, differ enough, and are not just the input again.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.curator.bench import ENDLESS, Item, budgeted, execute
from services.curator.hints import guess
from services.curator.inputs import Guess, Pool, Spec, generate
from services.curator.mine import Function
from shared import syntax
from shared.problems.schema import Case
from shared.problems.values import encode, show
from shared.sandbox import CallResult
from shared.sandbox.pool import FunctionPool

PROBES = 32  # calls of each of the two probing rounds
FILL = 56
MAX_CASES = 18
MIN_CASES = 9
MAX_SHOWN = 48  # characters of all arguments together, and of the result
MAX_VISIBLE = 56  # of both together, for a case that is shown to the agent
_SAME_RESULT = 5  # cases at most with one result


@dataclass(slots=True)
class Recorded:
    function: Function
    cases: list[Case]


@dataclass(slots=True)
class _State:
    function: Function
    guess: Guess
    pool: Pool
    rng: random.Random
    source: str
    seen: set[str] = field(default_factory=set)
    good: list[tuple[tuple[Spec, ...], Case]] = field(default_factory=list)
    batch: list[tuple[tuple[Spec, ...], str]] = field(default_factory=list)


def shown(args: str) -> str:
    """Arguments as in a call, without the brackets."""
    return show(args)[1:-1]


def record(pool: FunctionPool, functions: Sequence[Function]) -> list[Recorded]:
    """Those of the functions whose behaviour could be recorded, in order."""
    states = [_state(function) for function in functions]
    for state in states:
        _probe(state, surprise=0.3, count=PROBES)
    _round(pool, states)
    states = [state for state in states if state.good or len(state.function.params) > 1]
    for state in states:
        _probe(state, surprise=0.15, count=PROBES)
    _round(pool, states)
    states = [state for state in states if len(state.good) >= 3]
    for state in states:
        _fill(state)
    _round(pool, states)
    recorded = []
    for state in states:
        cases = choose([case for _, case in state.good])
        if cases:
            recorded.append(Recorded(state.function, cases))
    return recorded


def _state(function: Function) -> _State:
    examples = [ast.literal_eval(syntax.expression(text)) for text in function.examples]
    state = _State(
        function,
        guess(function.source, function.params, function.hints, examples),
        Pool(function.source),
        random.Random(f"fuzz {function.key}"),
        budgeted(function.source),
    )
    for example in examples:
        _add(state, (), example)
    return state


def _add(state: _State, choice: tuple[Spec, ...], args: list[object]) -> None:
    try:
        text = encode(args)
    except ValueError:
        return
    if text not in state.seen and len(shown(text)) <= MAX_SHOWN:
        state.seen.add(text)
        state.batch.append((choice, text))


def _probe(state: _State, *, surprise: float, count: int) -> None:
    for _ in range(count):
        choice = state.guess.draw(state.rng, surprise)
        _add(state, choice, _arguments(state, choice))


def _arguments(state: _State, choice: tuple[Spec, ...]) -> list[object]:
    args = [generate(spec, state.rng, state.pool) for spec in choice]
    optional = len(args) - state.function.required
    if optional and state.rng.random() < 0.2:
        del args[len(args) - state.rng.randint(1, optional) :]
    return args


def _fill(state: _State) -> None:
    """More inputs of the kinds that gave the most different results."""
    results: dict[tuple[Spec, ...], set[str]] = {}
    for choice, case in state.good:
        if choice:
            results.setdefault(choice, set()).add(case.expected)
    best = sorted(results, key=lambda choice: (-len(results[choice]), repr(choice)))[:6]
    for _ in range(FILL):
        if best and state.rng.random() < 0.8:
            choice = best[min(int(state.rng.expovariate(0.6)), len(best) - 1)]
        else:
            choice = state.guess.draw(state.rng, 0.05)
        _add(state, choice, _arguments(state, choice))


def _round(pool: FunctionPool, states: Sequence[_State]) -> None:
    """Runs every state's batch and learns from it."""
    items = [Item(s.source, s.function.entry, tuple(text for _, text in s.batch)) for s in states]
    for state, results in zip(states, execute(pool, items, patience=4), strict=True):
        for (choice, text), result in zip(state.batch, results, strict=True):
            worked = _is_case(result)
            if choice:
                state.guess.learn(choice, worked)
            if worked:
                state.good.append((choice, Case(args=text, expected=result.value or "", changed=result.changed)))
        state.batch = []


def _is_case(result: CallResult) -> bool:
    if result.value is None or result.error in ENDLESS:
        return False
    try:
        text = show(result.value)
    except ValueError:
        return False
    return len(text) <= MAX_SHOWN and not (text.lstrip("-").isdigit() and len(text) > 12)


def choose(cases: Sequence[Case]) -> list[Case]:
    """At most 18 cases, results in turn so that none dominates, short ones first; empty if they say too little."""
    by_result: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda case: (len(shown(case.args)) + len(show(case.expected)), case.args)):
        by_result.setdefault(case.expected, []).append(case)
    turns = [group[turn] for turn in range(_SAME_RESULT) for group in by_result.values() if len(group) > turn]
    # The shortest alone are often the trivial ones: half short, half spread over the rest.
    if len(turns) > MAX_CASES:
        half = MAX_CASES // 2
        rest = turns[half:]
        turns = turns[:half] + [rest[index * len(rest) // half] for index in range(half)]
    chosen = list(dict.fromkeys(turns))
    results = {case.expected for case in chosen}
    few = results <= {"true", "false"}
    identical = sum(case.args == f"[{case.expected}]" for case in chosen)
    if len(chosen) < MIN_CASES or len(results) < (2 if few else 4) or identical > 0.6 * len(chosen):
        return []
    if few and min(sum(case.expected == result for case in chosen) for result in results) < 3:
        return []
    return chosen
