"""Every small function in the Python code of this machine: the standard library and the installed distributions.

The list of files, and what becomes of each, follows from the installed distributions alone: sorted, without times,
paths of this machine or order of completion.
"""

from __future__ import annotations

import ast
import csv
import importlib.metadata
import re
import sys
import sysconfig
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from services.curator.lift import MAX_CHARS, MAX_LINE, MAX_LINES, Lifted, Refused, lift, plain
from services.curator.module import Module
from shared import syntax
from shared.problems.signatures import fingerprint
from shared.problems.splits import share, split_of

MAX_FILE_BYTES = 600_000  # larger ones are generated tables
MAX_FILES = 800
_MAX_SPAN = 60  # source lines with docstring and comments; more never fits into 15
# The project itself is never its own practice: its tests must stay unseen by construction. The others came after the packs
# that published results were made with.
_EXCLUDED = frozenset(["etude", "atif", "bm25s", "cramjam", "gguf", "lz4", "python-snappy", "ripgrep"])
_PYTHON_LICENCE = "PSF-2.0"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A module file: `distribution` is `python` for the standard library."""

    path: str
    distribution: str
    version: str
    module: str
    licence: str

    @property
    def split(self) -> str:
        return split_of(self.distribution, self.module)


class Function(msgspec.Struct, kw_only=True):
    """A small function. `executable`: it stands alone, `source` is the whole file; else `source` is its text, for
    pretraining. `key` and `minima` are its fingerprint: equal keys are the same function under other names."""

    distribution: str
    module: str
    qualname: str
    source: str
    entry: str
    executable: bool
    key: str = ""
    minima: bytes = b""
    params: list[str] = []
    required: int = 0
    hints: dict[str, str] = {}
    examples: list[str] = []  # Python literals, each a list of arguments

    @property
    def split(self) -> str:
        return split_of(self.distribution, self.module)

    @property
    def origin(self) -> str:
        return f"{self.distribution}:{self.module}:{self.qualname}"


@dataclass(frozen=True, slots=True)
class Inventory:
    """What is installed: `versions` of distributions that hold Python files, and their files in order."""

    files: list[SourceFile]
    versions: dict[str, str] = field(default_factory=dict)
    licences: dict[str, str] = field(default_factory=dict)


def inventory(also: Path | None = None) -> Inventory:
    """`also`: a directory of further distributions, as `pip install --target` makes one."""
    files: list[SourceFile] = []
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    licences = {"python": _PYTHON_LICENCE}
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if not {"site-packages", "dist-packages", "lib2to3"} & set(relative.parts) and not is_test(relative):
            files.append(SourceFile(str(path), "python", versions["python"], module_name(relative), _PYTHON_LICENCE))
    for distribution in importlib.metadata.distributions(path=[*sys.path, *([str(also)] if also else [])]):
        metadata = distribution.metadata  # every look at it parses the file again
        name, version = _canonical(metadata["Name"] or ""), metadata["Version"] or ""
        recorded = _recorded(distribution)
        if not recorded or not name or name in _EXCLUDED or name in versions:
            continue
        versions[name], licences[name] = version, licence(metadata)
        files += [
            SourceFile(str(distribution.locate_file(file)), name, version, module_name(file), licences[name])
            for file in recorded
        ]
    unique = {(f.distribution, f.module): f for f in sorted(files, key=lambda f: (f.distribution, f.module, f.path))}
    return Inventory(_fair(list(unique.values())), dict(sorted(versions.items())), dict(sorted(licences.items())))


def carried(function: Function, names: Collection[str]) -> bool:
    """Whether a sandbox carries the function's module where no mount hides it. `names`: the modules that its interpreter has
    loaded, frozen or built in. So does a twin: `_operator` has what `operator` has, `io` what `_pyio` has."""
    module = function.module
    bare = module.removeprefix("_py").removeprefix("_")
    return function.distribution == "python" and not {module, f"_{module}", bare, f"_{bare}"}.isdisjoint(names)


def _fair(files: list[SourceFile]) -> list[SourceFile]:
    """At most MAX_FILES of a distribution, chosen by hash: a giant does not drown the rest, and mining stays short."""
    by_distribution: dict[str, list[SourceFile]] = {}
    for file in files:
        by_distribution.setdefault(file.distribution, []).append(file)
    chosen = []
    for own in by_distribution.values():
        own.sort(key=lambda f: (share(f"{f.distribution}:{f.module}:order"), f.module))
        chosen += sorted(own[:MAX_FILES], key=lambda f: f.module)
    return chosen


def _recorded(distribution: importlib.metadata.Distribution) -> list[PurePosixPath]:
    """The Python files that the installer recorded. Read here, because `Distribution.files` takes 1 ms a hundred files."""
    record = distribution.read_text("RECORD") or ""
    paths = [PurePosixPath(row[0]) for row in csv.reader(record.splitlines()) if row and row[0].endswith(".py")]
    return [p for p in paths if ".." not in p.parts and not p.parts[0].endswith(".data") and not is_test(p)]


def is_test(path: PurePosixPath | Path) -> bool:
    """Tests call what others wrote: hardly one function in them stands alone."""
    return not _TESTS.isdisjoint(path.parts) or path.name.startswith("test_") or path.name == "conftest.py"


_TESTS = frozenset(["test", "tests", "testing", "_tests", "idle_test", "_examples"])


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def module_name(relative: PurePosixPath | Path) -> str:
    parts = [*relative.parts[:-1], relative.stem]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def licence(metadata: Any) -> str:
    """SPDX expression if the distribution has one, else its licence classifier, else the first line of its field."""
    expression = metadata.get("License-Expression")
    if expression:
        return str(expression)
    classifiers = [c.split(" :: ")[-1] for c in metadata.get_all("Classifier") or () if c.startswith("License ::")]
    if classifiers:
        return " AND ".join(sorted(classifiers))
    text = str(metadata.get("License") or "").strip().split("\n")[0]
    return text[:60] or "unknown"


def functions(file: SourceFile, *, texts: bool) -> list[Function]:
    """All small functions of one file, in the order of the source; without `texts` only those that stand alone. A file
    that this Python cannot read has none."""
    try:
        data = Path(file.path).read_bytes()
        if len(data) > MAX_FILE_BYTES or b"def " not in data:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = syntax.parse(data)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    module = Module.of(tree)
    found = []
    for qualname, node in _definitions(tree, ""):
        if (node.end_lineno or 0) - node.lineno < _MAX_SPAN and _statements(node) <= MAX_LINES + 1:
            try:
                found += _function(file, module, qualname, node, texts)
            except (ValueError, RecursionError, TypeError, AttributeError):
                continue  # a tree that this Python cannot write back
    return found


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods; not functions inside functions, whose meaning lies in what surrounds them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _definitions(child, prefix)


def _statements(node: ast.AST) -> int:
    """Each takes a line at least, but for the docstring."""
    return sum(1 + (_statements(child) if isinstance(child, _BLOCKS) else 0) for child in _children(node))


_BLOCKS = (ast.FunctionDef, ast.If, ast.For, ast.While, ast.Try, ast.With, ast.ExceptHandler)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for name in ("body", "handlers", "orelse", "finalbody"):
        yield from getattr(node, name, ())


def _function(file: SourceFile, module: Module, qualname: str, node: ast.FunctionDef, texts: bool) -> list[Function]:
    try:
        lifted: Lifted | None = lift(node, module)
    except Refused:
        lifted = None
    if lifted is None and not texts:
        return []
    source = lifted.source if lifted else ast.unparse(plain(node))
    if not lifted and not _fits(source):
        return []
    own = lifted or Lifted(source=source, entry=node.name, params=[], required=0)
    return [
        Function(
            distribution=file.distribution,
            module=file.module,
            qualname=qualname,
            source=source,
            entry=own.entry,
            executable=lifted is not None,
            params=own.params,
            required=own.required,
            hints=own.hints,
            examples=[repr(example) for example in own.examples],
        )
    ]


def _fits(source: str) -> bool:
    """Neither too small nor too large to learn from."""
    lines = source.split("\n")
    sized = 3 <= len(lines) <= MAX_LINES and len(source) <= MAX_CHARS and max(map(len, lines)) <= MAX_LINE
    return sized and source.isascii()


def with_fingerprint(function: Function) -> Function | None:
    try:
        key, minima = fingerprint(function.source)
    except (SyntaxError, ValueError, RecursionError):
        return None  # what was taken out left an empty block
    return msgspec.structs.replace(function, key=key, minima=minima)
