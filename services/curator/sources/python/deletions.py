"""Features that are taken out of a project: a public function, class or method with a docstring and tests of its own.

The definition goes, with the imports of its name, its entries in `__all__` and in stubs, and the tests that refer to it. The rest
must be collected and pass. The removed tests are the hidden ones; signature and docstring are the task.
"""

from __future__ import annotations

import ast
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from services.curator.sources.python import Bench, Draft, Rejected, command_of
from services.curator.sources.python.baseline import Baseline, baseline
from services.curator.sources.python.contamination import marks
from services.curator.sources.python.functions import Node, functions, parse, span
from services.curator.sources.python.laboratory import Ran, collected
from services.curator.sources.python.project import Project, SourceError, module_of
from services.curator.sources.python.removal import Target, head, targets, without_lines, without_name, without_tests
from shared.contracts.trajectory import Change
from shared.environments.repository import runtime, trees
from shared.environments.repository.graders.python_names import file_of, function_of
from shared.environments.repository.trees import File, Tree
from shared.problems.signatures import Signatures

MAX_FAILING, MAX_PASSING = 30, 30  # tests that a problem names
_LEAST_LINES = 4  # of a definition, without its docstring
_REST_S = 10.0  # of the other tests that are run again, as measured before
_SLACK = 10


class Deletions:
    """See services.curator.sources.python.Source."""

    kind = "deletions"
    whole_gate = True

    async def candidates(self, project: Project, bench: Bench) -> AsyncIterator[Draft | Rejected]:
        if project.name in runtime.DISTRIBUTIONS:
            raise SourceError(f"{project.name}: every sandbox has a copy of it, for pytest; allowed: other projects")
        folder = bench.folder / "original"
        trees.write(project.tree, folder)
        async with collected(bench.sandboxes, bench.cache, folder, project.sources, project.tests) as runs:
            found = await baseline(project, runs)
        bench.notes.extend(found.notes)
        features = [one for path in project.sources for one in _features(project, path)]
        random.Random(f"{bench.seed} {project.label}").shuffle(features)
        known = Signatures()
        for number, target in enumerate(features):
            place = f"{target.path}:{target.qualname}"
            prints = list(marks(target.text)) if isinstance(target.node, Node) else []
            if any(known.has_near(*one) for one in prints):
                yield Rejected(place, "duplicate: another feature has nearly the same code")
                continue
            made = await _tried(project, bench, found, target, number)
            if isinstance(made, Draft):
                for one in prints:
                    known.add(*one)
            yield made


SOURCE = Deletions()


@dataclass(frozen=True, slots=True)
class _Removed:
    """`files`: path -> text without the feature, of all that change. `tests`: path -> (original text, names that are gone)."""

    files: Mapping[str, str]
    tests: Mapping[str, tuple[str, frozenset[str]]]


def _features(project: Project, path: str) -> Iterator[Target]:
    try:
        source = project.text(path)
    except UnicodeDecodeError:
        return
    for one in targets(path, source):
        code = one.end - one.start + 1 - len((ast.get_docstring(one.node, clean=False) or "").splitlines())
        if code >= _LEAST_LINES:
            yield one


async def _tried(project: Project, bench: Bench, found: Baseline, target: Target, number: int) -> Draft | Rejected:
    place = f"{target.path}:{target.qualname}"
    covering = {test.name for test in found.covering(target.path, target.start, target.end)}
    if not covering:
        return Rejected(place, "no test: none that passes calls it")
    if copy := _copy(project, target):
        return Rejected(place, f"copy: {copy} has nearly the same function")
    try:
        removed = _removed(project, target)
    except (SyntaxError, ValueError) as error:
        return Rejected(place, f"cannot be removed: {error}")
    fail = [name for name in sorted(covering) if _gone(name, removed)]
    if not fail:
        return Rejected(place, "no test of its own: the tests that call it do not name it")
    tree = {**project.tree, **{path: _file(project, path, text) for path, text in removed.files.items()}}
    folder = bench.folder / f"removed-{number}"
    trees.write(tree, folder)
    chosen = _quick([test for test in found.tests.values() if not _gone(test.name, removed)])
    visible = [path for path in project.tests if b"def test" in _data(tree, path)]
    try:
        async with collected(bench.sandboxes, bench.cache, folder, project.sources, visible) as runs:
            if new := [error for error in runs.errors if error[0] not in found.uncollected]:
                return Rejected(place, f"the rest does not import: {new[0][0]}: {new[0][1]}")
            run = await runs.run([test.name for test in chosen], each_s=_SLACK * 2.0, time_s=30.0 + _SLACK * _REST_S)
    except SourceError as error:
        return Rejected(place, f"the rest does not import: {error}")
    passed = {test.name for test in run.tests if test.passed}
    if broken := [test.name for test in chosen if test.name not in passed]:
        return Rejected(
            place, f"the rest does not pass: {len(broken)} tests without it in their text, such as {broken[0]}"
        )
    hidden = sorted(path for path, (_, gone) in removed.tests.items() if gone)
    others = [test.name for test in chosen if file_of(test.name) in hidden]
    return _draft(project, target, removed, tree, fail[:MAX_FAILING], others[:MAX_PASSING], hidden)


def _quick(tests: Sequence[Ran]) -> list[Ran]:
    """Return the quickest tests, as many as fit into the time."""
    chosen: list[Ran] = []
    spent = 0.0
    for test in sorted(tests, key=lambda one: (one.seconds, one.name)):
        spent += test.seconds
        if spent > _REST_S:
            break
        chosen.append(test)
    return chosen


def _draft(
    project: Project,
    target: Target,
    removed: _Removed,
    tree: Tree,
    fail: list[str],
    others: list[str],
    hidden: list[str],
) -> Draft:
    digest = xxhash.xxh3_128_hexdigest(f"{project.label}\0{target.path}\0{target.qualname}\0{target.text}".encode())
    tests = {path: removed.tests[path][0] for path in hidden}
    solution = {path: Change(text=project.text(path)) for path in removed.files if path not in removed.tests}
    return Draft(
        id=f"d-{digest[:20]}",
        place=f"{target.path}:{target.qualname}",
        category="feature/"
        + ("class" if isinstance(target.node, ast.ClassDef) else "method" if target.holder else "function"),
        prompt=_prompt(project, target, removed),
        tree=tree,
        fail_to_pass=tuple(fail),
        pass_to_pass=tuple(others),
        solution=solution,
        tests={path: Change(text=text) for path, text in tests.items()},
        command=command_of((*fail, *others)),
        code=(target.text,) if isinstance(target.node, Node) else (),
    )


def _removed(project: Project, target: Target) -> _Removed:
    """Raises SyntaxError, ValueError."""
    files: dict[str, str] = {}
    tests: dict[str, tuple[str, frozenset[str]]] = {}
    for path, entry in project.tree.items():
        if not path.endswith((".py", ".pyi")) or path.startswith("lib/") or not isinstance(entry, File):
            continue
        if target.name.encode() not in entry.data:
            continue
        source = text = entry.data.decode()
        if path in project.tests:
            text, gone = without_tests(source, target.name)
            tests[path] = (source, gone)
        else:
            if path == target.path:
                text = without_lines(text, [(target.start, target.end)])
            elif path == f"{target.path}i":
                text = without_lines(text, _stub(text, target))
            if target.holder is None:
                text = without_name(text, target.name)
        if text != source:
            files[path] = text
    return _Removed(files, tests)


def _stub(source: str, target: Target) -> list[tuple[int, int]]:
    """Return the lines of the same definition in a stub, overloads too."""
    body = parse(source).body
    if target.holder is not None:
        body = [
            one
            for node in body
            if isinstance(node, ast.ClassDef) and node.name == target.holder.name
            for one in node.body
        ]
    return [span(node) for node in body if isinstance(node, Node | ast.ClassDef) and node.name == target.name]


def _gone(test: str, removed: _Removed) -> bool:
    """Say whether the tree shows the test no more."""
    _, gone = removed.tests.get(file_of(test), ("", frozenset()))
    return "::".join(function_of(test)) in gone


def _copy(project: Project, target: Target) -> str:
    """Return another file of the tree that has nearly the same function; empty: none has."""
    known = Signatures()
    if not isinstance(target.node, Node):
        return ""
    for mark in marks(target.text):
        known.add(*mark)
    for path, entry in project.tree.items():
        if (
            path.endswith(".py")
            and path != target.path
            and isinstance(entry, File)
            and target.name.encode() in entry.data
        ):
            for one in functions(path, entry.data.decode(errors="replace")):
                if one.name == target.name and any(known.has_near(*mark) for mark in marks(one.text)):
                    return path
    return ""


def _file(project: Project, path: str, text: str) -> File:
    entry = project.tree[path]
    return File(text.encode(), isinstance(entry, File) and entry.executable)


def _data(tree: Tree, path: str) -> bytes:
    entry = tree[path]
    return entry.data if isinstance(entry, File) else b""


def _prompt(project: Project, target: Target, removed: _Removed) -> str:
    what = "class" if isinstance(target.node, ast.ClassDef) else "method" if target.holder else "function"
    module = module_of(target.path)
    where = f"`{target.path}`" + (f", in the class `{target.holder.name}`" if target.holder else "")
    text = f"{project.name} has no {what} `{module}.{target.qualname}` yet. Write it in {where}:\n\n"
    text += f"```python\n{head(project.text(target.path), target.node)}\n```\n"
    elsewhere = sorted(
        module_of(path)
        for path in removed.files
        if path in project.sources and path != target.path and target.holder is None
    )
    if elsewhere:
        text += f"\nIt can also be imported from {', '.join(f'`{name}`' for name in elsewhere)}.\n"
    if target.holder is None and "__all__" in project.text(target.path):
        text += f"\nList it in `__all__` of `{module}` if the functions beside it are listed there.\n"
    return text + "\nHidden tests check what the text above says."
