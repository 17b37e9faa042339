"""Bugs that a project's own tests notice.

The tests are collected once in a warm process. A bug is tried there by giving the function other code, and only the tests that
call the function run. The first reason to reject a candidate ends its run.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

import xxhash

from services.curator.sources.python import Bench, Draft, Rejected, command_of, kept_by_file
from services.curator.sources.python.baseline import Baseline, baseline
from services.curator.sources.python.functions import Function, functions
from services.curator.sources.python.laboratory import Ran, Run, Runs, collected
from services.curator.sources.python.operators import Mutant, mutants
from services.curator.sources.python.project import Project
from shared.contracts.trajectory import Change
from shared.environments.repository import trees
from shared.environments.repository.trees import File
from shared.sandbox import SandboxUnavailable

MAX_FAILING, MAX_PASSING = 20, 20  # tests that a problem names
_PER_FUNCTION = 8  # drafts; more of one function teach little
_TRIES = 20  # candidates of one function
_RUN_S = 2.0  # of tests for one candidate, as measured before anything was changed
_PAIRS = 0.15  # share of drafts that are tried again together with one of another function
# Errors of a program that is not whole: they say nothing of what it should do.
NO_BEHAVIOUR = frozenset(["ImportError", "SyntaxError", "NameError", "SystemExit", "MemoryError", "KeyboardInterrupt"])
_ENDLESS = ("TookTooLong", "MemoryError")
_CRASHES = frozenset(["TypeError", "AttributeError"])  # repaired by a look at the traceback
_SHOWN = 3


class Mutations:
    """See services.curator.sources.python.Source."""

    kind = "mutations"
    whole_gate = False

    async def candidates(self, project: Project, bench: Bench) -> AsyncIterator[Draft | Rejected]:
        folder = bench.folder / "original"
        trees.write(project.tree, folder)
        async with contextlib.AsyncExitStack() as stack:

            async def opened() -> Runs:
                await stack.aclose()  # the one before, if there is one
                return await stack.enter_async_context(
                    collected(bench.sandboxes, bench.cache, folder, project.sources, project.tests)
                )

            runs = await opened()
            found = await baseline(project, runs)
            bench.notes.extend(found.notes)
            search = _Search(project, runs, opened, found, random.Random(f"{bench.seed} {project.label}"))
            async for one in search.candidates():
                yield one


SOURCE = Mutations()


class _Search:
    """`opened`: collects the tests again, in another sandbox."""

    def __init__(
        self,
        project: Project,
        runs: Runs,
        opened: Callable[[], Awaitable[Runs]],
        found: Baseline,
        rng: random.Random,
    ) -> None:
        self._project, self._runs, self._opened, self._found, self._rng = project, runs, opened, found, rng
        self._behaviours: set[tuple[str, ...]] = set()
        self._last: dict[str, Mutant] = {}  # path -> the last one that made a draft

    async def candidates(self) -> AsyncIterator[Draft | Rejected]:
        """Take one mutant of each function in turn, until every function has had its share."""
        waiting = [(one, iter(self._mutants(one))) for one in self._functions()]
        self._rng.shuffle(waiting)
        drafts: dict[str, int] = {}
        while waiting:
            later = []
            for function, rest in waiting:
                place = f"{function.path}:{function.qualname}"
                mutant = next(rest, None) if drafts.get(place, 0) < _PER_FUNCTION else None
                if mutant is None:
                    continue
                later.append((function, rest))
                made = await self._tried([mutant])
                yield made
                if isinstance(made, Draft):
                    drafts[place] = drafts.get(place, 0) + 1
                    if other := self._partner(mutant):
                        yield await self._tried([other, mutant])
                    self._last[function.path] = mutant
            waiting = later

    def _functions(self) -> Iterator[Function]:
        for path in self._project.sources:
            try:
                source = self._project.text(path)
            except UnicodeDecodeError:
                continue
            if "\r" not in source:
                yield from (one for one in functions(path, source) if self._found.covering(path, one.start, one.end))

    def _mutants(self, function: Function) -> Iterator[Mutant]:
        """Yield mutants whose place some test runs: a change elsewhere changes no test."""
        lines, rng = self._found.lines.get(function.path, frozenset()), random.Random(self._rng.random())
        able = (one for one in mutants(function, rng) if {one.line, one.statement} & lines)
        yield from (one for one, _ in zip(able, range(_TRIES), strict=False))

    def _partner(self, mutant: Mutant) -> Mutant | None:
        """Return a mutant of another file, or else of another function, for a problem with two bugs. None: not this time."""
        others = [one for path, one in self._last.items() if path != mutant.function.path] or [
            one for one in self._last.values() if one.function.qualname != mutant.function.qualname
        ]
        return self._rng.choice(others) if others and self._rng.random() < _PAIRS else None

    async def _tried(self, bugs: Sequence[Mutant]) -> Draft | Rejected:
        place = " and ".join(f"{one.function.path}:{one.line} {one.function.qualname} ({one.kind})" for one in bugs)
        each = [_chosen(self._found.covering(one.function.path, one.function.start, one.function.end)) for one in bugs]
        chosen = list({test.name: test for tests in each for test in tests}.values())
        whole = sum(test.seconds for test in chosen)
        try:
            run = await self._runs.run(
                [test.name for test in chosen],
                each_s=[1.0 + 10 * test.seconds for test in chosen],
                time_s=5.0 + 10 * whole,
                edits=[(one.function, one.text) for one in bugs],
                ends_at=_ENDLESS,
            )
        except (SandboxUnavailable, ConnectionError) as error:
            self._runs = await self._opened()
            return Rejected(place, f"ends the process: {error}")
        if why := _objection(run):
            return Rejected(place, why)
        behaviour = tuple(sorted(f"{test.name} {test.kinds[:1]} {test.said}" for test in run.tests if not test.passed))
        if behaviour in self._behaviours:
            return Rejected(place, "duplicate: another candidate makes the same tests fail in the same way")
        self._behaviours.add(behaviour)
        failing = [test for test in run.tests if behaves(test)]
        if len(bugs) > 1 and any(
            {test.name for test in failing}.isdisjoint(test.name for test in tests) for tests in each
        ):
            return Rejected(place, "one of two bugs makes no test fail")
        return self._draft(bugs, place, failing, [test for test in run.tests if test.passed])

    def _draft(self, bugs: Sequence[Mutant], place: str, failing: Sequence[Ran], passing: Sequence[Ran]) -> Draft:
        original = {one.function.path: self._project.text(one.function.path) for one in bugs}
        broken = dict(original)
        for one in sorted(bugs, key=lambda bug: -bug.function.start):  # from the end: lines above stay where they are
            broken[one.function.path] = one.function.within(broken[one.function.path], one.text)
        digest = xxhash.xxh3_128_hexdigest(
            "\0".join([self._project.label, *(one.text for one in bugs), place]).encode()
        )
        changed = {path: File(text.encode(), _executable(self._project, path)) for path, text in broken.items()}
        fail = tuple(test.name for test in failing[:MAX_FAILING])
        others = tuple(kept_by_file(fail, (test.name for test in passing), MAX_PASSING))
        return Draft(
            id=f"m-{digest[:20]}",
            place=place,
            category="bugfix/" + ("several" if len(bugs) > 1 else bugs[0].kind),
            prompt=_prompt(self._project, failing, len(bugs)),
            tree={**self._project.tree, **changed},
            fail_to_pass=fail,
            pass_to_pass=others,
            solution={
                path: Change(text=text, executable=_executable(self._project, path)) for path, text in original.items()
            },
            command=command_of((*fail, *others)),
            code=tuple(one.function.text for one in bugs),
        )


def _chosen(tests: Sequence[Ran]) -> list[Ran]:
    """Return the quickest tests, as many as fit into the time."""
    kept: list[Ran] = []
    spent = 0.0
    for test in tests:
        spent += test.seconds
        if kept and (spent > _RUN_S or len(kept) >= MAX_FAILING + MAX_PASSING):
            break
        kept.append(test)
    return kept


def _objection(run: Run) -> str:
    """Return why a candidate makes no problem; empty: it makes one."""
    if run.unpatchable:
        return f"cannot be tried: {run.unpatchable}"
    if run.late or any(not {*_ENDLESS}.isdisjoint(test.kinds) for test in run.tests):
        return "does not end: a test runs ten times as long as before, or out of memory"
    if not run.whole:
        return "ends the process: a test did not come back"
    failing = [test for test in run.tests if test.outcome == "failed"]
    if not failing:
        return "not noticed: every test that calls the function passes"
    behaving = [test for test in failing if behaves(test)]
    if not behaving:
        return f"no behaviour: tests fail with {', '.join(sorted({test.kinds[0] if test.kinds else '?' for test in failing}))}"
    if len(failing) == len(run.tests) and all(not _CRASHES.isdisjoint(test.kinds) for test in failing):
        return f"crashes: every test that calls the function ends with {failing[0].kinds[0]}"
    return ""


def behaves(test: Ran) -> bool:
    """Say whether a test fails because the code does something else than it should."""
    return test.outcome == "failed" and test.phase == "call" and NO_BEHAVIOUR.isdisjoint(test.kinds)


def _executable(project: Project, path: str) -> bool:
    entry = project.tree[path]
    return isinstance(entry, File) and entry.executable


def _prompt(project: Project, failing: Sequence[Ran], bugs: int) -> str:
    shown = "\n".join(f"- `{test.name}`: {_error(test)}" for test in failing[:_SHOWN])
    more = f"\n- and {len(failing) - _SHOWN} more" if len(failing) > _SHOWN else ""
    what = "There is a bug" if bugs == 1 else f"There are {bugs} bugs"
    return (
        f"{what} in {project.name}: its tests do not pass any more.\n\n{shown}{more}\n\nFind the cause in the code and repair it. "
        f"The tests are right: change none of them."
    )


def _error(test: Ran) -> str:
    said = " ".join(test.said.split())[:160]
    return f"{test.kinds[0] if test.kinds else 'fails'}{f': {said}' if said else ''}"
