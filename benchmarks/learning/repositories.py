"""Simple repository problems with one bug each: small packages of which one line is wrong. Deterministic by seed.

    task = generate("train", 1, seed=3)[0]
    task.files            the broken tree: kelo/__init__.py, kelo/bimar.py, kelo/tusa.py, README.md
    task.problem.prompt   "In kelo/bimar.py, `pode_zilas([4, 1, 7])` returns -12, but should return 12."
    task.path, task.old, task.new     the repair, as a call of `edit` would make it

The splits share no template and no word (`templates`), so a held-out problem is solved by reading it and not by its name.
Expected values are computed by running the right function; a bug is kept only if a test sees it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from benchmarks.learning.templates import SPLITS, TEMPLATES, Template, word
from shared.contracts.run import Ref
from shared.contracts.trajectory import Change
from shared.environments.repository.problem import RepositoryHidden, RepositoryLimits, RepositoryProblem
from shared.environments.repository.trees import File, encode, store_tree
from shared.objects import Objects

TOOLS = ("grep", "read", "edit", "submit")
LIMITS = RepositoryLimits(turns=6, tokens=700, turn_tokens=112, command_s=20.0, memory_mb=1024, grading_s=60.0)
NAMED_SHARE = 0.6  # of the issues that name the module; the others make the agent search
SWAPS = (
    *((" + ", " - "), (" - ", " + "), (" * ", " + "), (" / ", " * "), (" += ", " -= "), (" *= ", " += ")),
    *((" > ", " < "), (" < ", " > "), (" >= ", " > "), (" <= ", " < "), (" <= ", " >= "), (" == ", " != ")),
    *((" != ", " == "), (" and ", " or "), (" or ", " and "), ("min(", "max("), ("max(", "min("), ("not ", "")),
    *((".lower()", ".upper()"), (".upper()", ".lower()"), ("True", "False"), ("False", "True"), ("[0]", "[1]")),
    *(("[-1]", "[0]"), (" = 0", " = 1"), (" = 1", " = 0"), (".strip()", "")),
)


@dataclass(frozen=True, slots=True)
class Bug:
    """One wrong line. `line`: its index in the function. `kind`: operator, number, name, order, return or default."""

    kind: str
    line: int
    bad: str


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    source: str
    names: tuple[str, ...]  # of its parameters
    cases: tuple[str, ...]  # argument lists as text


@dataclass(frozen=True, slots=True)
class Task:
    """A problem, its hidden part, its broken files and its repair. `named`: the issue names the module."""

    problem: RepositoryProblem
    hidden: RepositoryHidden
    files: dict[str, str]
    path: str
    function: str
    old: str
    new: str
    kind: str
    named: bool


def generate(split: str, count: int, seed: int, objects: Objects | None = None) -> list[Task]:
    """Return `count` different problems. `objects`: where their trees are stored; None: nowhere, for traces alone."""
    if split not in SPLITS:
        raise ValueError(f"split: found {split!r}; allowed: {', '.join(SPLITS)}")
    rng = random.Random(f"{split} {seed}")
    tasks: list[Task] = []
    seen: set[str] = set()
    while len(tasks) < count:
        task = _task(rng, split, f"{split}-{seed}-{len(tasks)}", objects)
        if task is not None and task.problem.tree.checksum not in seen:
            seen.add(task.problem.tree.checksum)
            tasks.append(task)
    return tasks


def _task(rng: random.Random, split: str, id: str, objects: Objects | None) -> Task | None:
    """Return a problem, or None where the draw gave no bug that a test sees and one edit repairs."""
    package, *modules = _different(rng, split, rng.choice((3, 3, 4)))
    functions = {module: _functions(rng, split, rng.choice((2, 2, 3))) for module in modules}
    module = modules[0]
    function = rng.choice(functions[module])
    bugs = list(_bugs(function))
    kinds = sorted({bug.kind for bug in bugs})
    if not kinds:
        return None
    kind = rng.choice(kinds)
    bug = rng.choice([bug for bug in bugs if bug.kind == kind])
    good = function.source.split("\n")
    lines = [*good[: bug.line], bug.bad, *good[bug.line + 1 :]]
    wrong = Function(function.name, "\n".join(lines), function.names, function.cases)
    expected, got = results(function), results(wrong)
    failing = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]
    path = f"{package}/{module}.py"
    files = {f"{package}/__init__.py": f'"""The {package}."""\n', "README.md": f"# {package}\n"}
    for name, group in functions.items():
        files[f"{package}/{name}.py"] = _module(name, group)
    solved = files[path]
    files[path] = _module(module, [wrong if one is function else one for one in functions[module]])
    old, new = bug.bad.strip(), good[bug.line].strip()
    if not failing or not old or files[path].count(old) != 1:
        return None
    named = rng.random() < NAMED_SHARE
    shown = rng.choice(failing)
    prompt = _issue(
        rng, path if named else "", f"{function.name}({function.cases[shown]})", got[shown], expected[shown]
    )
    test_path = f"tests/test_{module}.py"
    text, names = _tests(package, module, functions[module])
    fails = [f"{test_path}::{names[function.name][i]}" for i in failing]
    passes = [f"{test_path}::{name}" for group in names.values() for name in group]
    data = encode({name: File(content.encode()) for name, content in files.items()})
    problem = RepositoryProblem(
        id=id, prompt=prompt, tree=_ref(objects, data), tools=list(TOOLS), limits=LIMITS, origin=f"generated:{kind}"
    )
    hidden = RepositoryHidden(
        id=id,
        fail_to_pass=fails,
        pass_to_pass=[name for name in passes if name not in fails],
        tests={test_path: Change(text=text)},
        solution={path: Change(text=solved)},
    )
    return Task(problem, hidden, files, path, function.name, old, new, kind, named)


def _ref(objects: Objects | None, data: bytes) -> Ref:
    if objects is not None:
        return store_tree(objects, data)
    checksum = xxhash.xxh3_128_hexdigest(data)
    return Ref(key=f"trees/{checksum}.tar.zst", size=len(data), checksum=checksum)


def _functions(rng: random.Random, split: str, count: int) -> list[Function]:
    """Return functions of different templates."""
    return [_filled(rng, split, template) for template in rng.sample(TEMPLATES[split], count)]


def _different(rng: random.Random, split: str, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        if (made := word(rng, split)) not in found:
            found.append(made)
    return found


def _filled(rng: random.Random, split: str, template: Template) -> Function:
    name, x, a, b = _different(rng, split, 4)
    plural = f"{x}s"
    words: dict[str, Any] = {"x": x, "xs": plural, "a": a, "b": b, "n": rng.randint(2, 9)}
    name = f"{name}_{plural if '{xs}' in template.source else x}"
    source = template.source.format(f=name, **words)
    parameters = re.findall(r"\w+", source.partition("(")[2].partition(")")[0])
    names = tuple(word for word in parameters if not word.isdigit())
    return Function(name, source, names, tuple(case.format(**words) for case in template.cases))


def _bugs(function: Function) -> Iterator[Bug]:
    """Every one-line bug that the rules know for the function."""
    for number, line in enumerate(function.source.split("\n")):
        if number == 1:  # the docstring
            continue
        if number == 0:
            if found := re.search(r"=(\d+)\)", line):
                yield Bug("default", 0, line.replace(found[0], f"={int(found[1]) + 1})"))
            continue
        for right, wrong in SWAPS:
            if right in line:
                yield Bug("operator", number, line.replace(right, wrong, 1))
        for found in re.finditer(r"\b\d+\b", line):
            if int(found[0]) > 1:
                yield Bug("number", number, f"{line[: found.start()]}{int(found[0]) + 1}{line[found.end() :]}")
        if line.strip().startswith(("return ", "if ")):
            yield from _wrong_names(function, number, line)
        if found := re.search(r"(\w+), (\w+)(?=\))", line):
            yield Bug("order", number, line.replace(found[0], f"{found[2]}, {found[1]}"))
        if found := re.search(r"\{(\w+)\}(.)\{(\w+)\}", line):
            yield Bug("order", number, line.replace(found[0], f"{{{found[3]}}}{found[2]}{{{found[1]}}}"))
        if line.strip().startswith("return ") and " " in line.strip()[7:]:
            yield Bug("return", number, line.replace("return ", "", 1))


def _wrong_names(function: Function, number: int, line: str) -> Iterator[Bug]:
    for name in function.names:
        for found in re.finditer(rf"\b{name}\b", line):
            for other in function.names:
                if other != name:
                    yield Bug("name", number, f"{line[: found.start()]}{other}{line[found.end() :]}")


def results(function: Function) -> list[str]:
    """Return what each case gives: the repr of a value, or the name of an exception in brackets. Runs the code here: the
    templates are ours, and no rule makes a loop without end."""
    space: dict[str, Any] = {}
    try:
        exec(compile(function.source, function.name, "exec"), space)  # noqa: S102
    except SyntaxError:
        return ["<SyntaxError>"] * len(function.cases)
    found = []
    for case in function.cases:
        try:
            found.append(repr(eval(f"{function.name}({case})", space)))  # noqa: S307
        except Exception as error:
            found.append(f"<{type(error).__name__}>")
    return found


def _module(name: str, functions: list[Function]) -> str:
    return "\n\n\n".join([f'"""{name.capitalize()}."""', *(function.source for function in functions)]) + "\n"


def _tests(package: str, module: str, functions: list[Function]) -> tuple[str, dict[str, list[str]]]:
    """Return the hidden tests as a file, and their names by function."""
    lines = [f"from {package}.{module} import {', '.join(sorted(function.name for function in functions))}\n"]
    names: dict[str, list[str]] = {}
    for function in functions:
        for number, (case, expected) in enumerate(zip(function.cases, results(function), strict=True)):
            name = f"test_{function.name}_{number}"
            names.setdefault(function.name, []).append(name)
            lines.append(f"\ndef {name}():\n    assert {function.name}({case}) == {expected}\n")
    return "\n".join(lines), names


def _issue(rng: random.Random, path: str, call: str, got: str, expected: str) -> str:
    where = f"In {path}, " if path else ""
    if got.startswith("<"):
        return f"{where}`{call}` raises {got[1:-1]}, but should return {expected}."
    told = rng.choice(("returns {got}, but should return {expected}", "gives {got} instead of {expected}"))
    return f"{where}`{call}` {told.format(got=got, expected=expected)}."
