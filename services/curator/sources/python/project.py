"""A Python project with tests, from a folder, an archive, a git repository or an installed distribution, as a tree.

Nothing of the project runs here. Caches, builds and other copies of the code are no part of the tree.
"""

from __future__ import annotations

import email.parser
import importlib.metadata
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from services.curator.mine import MAX_FILE_BYTES, licence
from shared.environments.repository import trees
from shared.environments.repository.tree_sources import ALLOWED, is_repository, tree_at
from shared.environments.repository.trees import File, Link, Tree, TreeError

UNKNOWN = "unknown"
# Folders, at any depth, that hold copies of code or what programs leave behind.
_LEFT_OUT = frozenset(
    [
        *(
            "__pycache__",
            ".venv",
            "venv",
            ".tox",
            ".nox",
            ".eggs",
            ".mypy_cache",
            ".pytest_cache",
            ".ruff_cache",
            ".cache",
        ),
        *(".hypothesis", "node_modules", "site-packages", "dist-packages"),
    ]
)
_BUILT = frozenset(["build", "dist"])  # at the top only: packages have folders of these names as well
_BINARY = (".pyc", ".pyo", ".whl", ".egg", ".zip", ".tar.gz")
_TEST_FOLDERS = frozenset(["test", "tests", "testing"])
_NO_SOURCES = frozenset(
    ["docs", "doc", "examples", "example", "benchmarks", "benchmark", "bench", "scripts", "tools", "ci", "perf"]
)
_NO_MODULES = frozenset(["setup.py", "conftest.py", "noxfile.py", "tasks.py", "versioneer.py", "__main__.py"])
_ROOTS = ("src/", "lib/")  # folders of a tree that packages are imported from, besides its root (runtime.import_paths)
_TEST = re.compile(r"(test_[^/]*|[^/]*_test|tests)\.py\Z")
_LICENCES = (  # text of a licence file -> SPDX identifier; the first that fits
    (r"Apache License\s+Version 2\.0", "Apache-2.0"),
    (r"Mozilla Public License Version 2\.0", "MPL-2.0"),
    (r"GNU LESSER GENERAL PUBLIC LICENSE", "LGPL"),
    (r"GNU GENERAL PUBLIC LICENSE\s+Version 3", "GPL-3.0"),
    (r"GNU GENERAL PUBLIC LICENSE", "GPL"),
    (r"Redistribution and use in source and binary forms[\s\S]*(Neither the name|endorse or promote)", "BSD-3-Clause"),
    (r"Redistribution and use in source and binary forms", "BSD-2-Clause"),
    (r"Permission is hereby granted, free of charge", "MIT"),
    (r"Permission to use, copy, modify, and(/or)? distribute this software", "ISC"),
)


class SourceError(ValueError):
    """No problem can be made of the source; the text says what was found and what to do."""


@dataclass(frozen=True, slots=True)
class Project:
    """`name`: of the distribution, e.g. "toolz". `sources`: paths of its modules; `tests`: paths of its files of tests. `path`:
    where it was read; None: it is installed."""

    name: str
    version: str
    licence: str
    tree: Tree
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    path: Path | None = None

    @property
    def label(self) -> str:
        return f"{self.name}=={self.version}" if self.version else self.name

    def text(self, path: str) -> str:
        """Return a file of the tree. Raises KeyError, UnicodeDecodeError."""
        entry = self.tree[path]
        if not isinstance(entry, File):
            raise KeyError(path)
        return entry.data.decode()


def read_project(source: str, tests: Sequence[str] = (), libraries: Path | None = None, commit: str = "") -> Project:
    """Read a project. `source`: a path, or the name of an installed distribution. `tests`: files or folders of tests to use; none:
    all. `libraries`: a folder that `pip install --target` made, for what the tests import. `commit`: of a git repository; empty:
    its HEAD, or the folder as it stands where there is no git. Raises SourceError."""
    path = Path(source)
    try:
        if path.exists():
            at = commit or ("HEAD" if path.is_dir() and is_repository(path) else "")
            tree = _at_top(tree_at(path, at, left_out=[]))  # tests that need a submodule fail, and are not asked for
        else:
            tree, path = _installed(source), None  # type: ignore[assignment]
    except TreeError as error:
        raise SourceError(str(error)) from None
    return project_of(tree, source, path, tests, libraries)


def project_of(
    tree: Tree, source: str, path: Path | None = None, tests: Sequence[str] = (), libraries: Path | None = None
) -> Project:
    """Return the project of a tree. Raises SourceError where it has no code or no tests."""
    tree = {name: entry for name, entry in tree.items() if belongs(name)}
    found = Project(
        *described(tree, source),
        _with_libraries(_with_metadata(tree), libraries),
        tuple(sorted(_sources(tree))),
        tuple(sorted(path for path in tree if _is_test(path, tree))),
        path,
    )
    if not found.sources:
        raise SourceError(
            f"{source}: found no Python module among {len(tree)} files; allowed: a project whose packages lie at its top, in src/ "
            f"or in lib/ ({ALLOWED})"
        )
    if tests:
        chosen = tuple(path for path in found.tests if any(_below(path, one) for one in tests))
        if not chosen:
            raise SourceError(
                f"--tests: found {', '.join(tests)}; allowed: files or folders among {', '.join(found.tests[:5]) or 'none'}"
            )
        found = replace(found, tests=chosen)
    if not found.tests:
        raise SourceError(
            f"{source}: found {len(found.sources)} modules and no file of tests; allowed: projects with test_*.py or *_test.py. "
            "Wheels often leave the tests out: take the source archive or a clone of the repository"
        )
    return found


def described(tree: Tree, source: str) -> tuple[str, str, str]:
    """Return name, version and licence of a project. The version may be empty. `source`: what it is called where it has no name."""
    facts = _facts(tree)
    name = re.sub(r"[-_.]+", "-", facts.get("name") or _name(source)).lower()
    return name, facts.get("version", ""), facts.get("licence") or _licence_of(tree)


def _below(path: str, wanted: str) -> bool:
    return path == wanted.rstrip("/") or path.startswith(wanted.rstrip("/") + "/")


def _at_top(tree: Tree) -> Tree:
    """Return the tree without a folder that holds everything, as archives have one."""
    first = {path.partition("/")[0] for path in tree}
    if len(first) != 1 or any("/" not in path for path in tree):
        return tree
    start = len(first.pop()) + 1
    if any(path[start:] == "__init__.py" for path in tree):
        return tree  # it is a package
    return {path[start:]: entry for path, entry in tree.items()}


def _installed(name: str) -> Tree:
    """Raises SourceError where there is no such distribution."""
    try:
        distribution = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        raise SourceError(
            f"found {name!r:.80}; allowed: {ALLOWED}, or the name of an installed distribution. For one of a package index: "
            f"`pip download --no-deps --no-binary :all: {name:.80}`, then give the archive that it saved. pip runs the build "
            "script of the package for that, outside of the sandbox"
        ) from None
    tree: dict[str, File | Link] = {}
    for file in distribution.files or ():
        at = Path(str(file.locate()))
        if ".." not in file.parts and not file.is_absolute() and at.is_file() and at.stat().st_size <= 1 << 24:
            tree[file.as_posix()] = File(at.read_bytes())
    return tree


def belongs(path: str) -> bool:
    """Say whether a file is of the project itself, and no cache, build or copy."""
    parts = path.split("/")
    return not (_LEFT_OUT & {*parts} or (len(parts) > 1 and parts[0] in _BUILT) or path.endswith(_BINARY))


def _is_test(path: str, tree: Tree) -> bool:
    parts = path.split("/")
    if not path.endswith(".py") or _NO_SOURCES & {*parts[:-1]}:
        return False
    entry = tree[path]
    in_tests = bool(_TEST_FOLDERS & {*parts[:-1]})
    return (bool(_TEST.search(path)) or in_tests) and isinstance(entry, File) and b"def test" in entry.data


def _sources(tree: Tree) -> Iterator[str]:
    for path, entry in tree.items():
        inner = next((path.removeprefix(root) for root in _ROOTS if path.startswith(root)), path)
        parts = inner.split("/")
        if not path.endswith(".py") or not isinstance(entry, File) or len(entry.data) > MAX_FILE_BYTES:
            continue
        if {*parts[:-1]} & (_TEST_FOLDERS | _NO_SOURCES) or _TEST.search(path) or parts[-1] in _NO_MODULES:
            continue
        if len(parts) > 1 and inner == path and f"{parts[0]}/__init__.py" not in tree:
            continue  # no package: a folder of scripts
        if all(part.removesuffix(".py").isidentifier() for part in parts):
            yield path


def module_of(path: str) -> str:
    """Return the name that a module is imported by, e.g. toolz.itertoolz."""
    inner = next((path.removeprefix(root) for root in _ROOTS if path.startswith(root)), path)
    return inner.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _facts(tree: Tree) -> dict[str, str]:
    """Return name, version and licence, as far as its metadata says them."""
    places = [
        path for path in tree if re.fullmatch(r"PKG-INFO|([^/]+/)?[^/]+\.(egg-info/PKG-INFO|dist-info/METADATA)", path)
    ]
    for text in trees.texts(tree, sorted(places, key=len)).values():
        read = email.parser.Parser().parsestr(text, headersonly=True)
        if read["Name"]:
            said = licence(read)
            known = "" if said == UNKNOWN else said
            return {"name": str(read["Name"]), "version": str(read["Version"] or ""), "licence": known}
    try:
        found = tomllib.loads(trees.texts(tree, ["pyproject.toml"]).get("pyproject.toml", "")).get("project", {})
    except tomllib.TOMLDecodeError:
        return {}
    if not isinstance(found, dict):
        return {}
    said = found.get("license", "")
    said = said.get("text", "") if isinstance(said, dict) else said
    parts = {"name": found.get("name", ""), "version": found.get("version", ""), "licence": said}
    return {key: value.strip().split("\n")[0][:60] for key, value in parts.items() if isinstance(value, str)}


def _licence_of(tree: Tree) -> str:
    """Return what the file of the licence says. `unknown`: there is none that is known here."""
    names = [path for path in sorted(tree) if re.match(r"(?i)(licen[cs]e|copying)[^/]*\Z", path)]
    for text in trees.texts(tree, names).values():
        for pattern, name in _LICENCES:
            if re.search(pattern, text):
                return name
    return UNKNOWN


def _name(source: str) -> str:
    name = PurePosixPath(str(Path(source).absolute())).name
    return re.sub(r"(-\d[\w.]*)?(\.tar)?(\.gz|\.zst|\.bundle|\.git|\.tgz)?\Z", "", name) or "project"


def _with_metadata(tree: Tree) -> Tree:
    """Let `importlib.metadata` find the version: source archives have it at their top, where nobody looks."""
    if "PKG-INFO" not in tree or any(".egg-info/" in path or ".dist-info/" in path for path in tree):
        return tree
    name = re.sub(r"[-_.]+", "_", _facts(tree).get("name", "project"))
    return {**tree, f"{name}.egg-info/PKG-INFO": tree["PKG-INFO"]}


def _with_libraries(tree: Tree, libraries: Path | None) -> Tree:
    """Put what the tests import into lib/. Raises SourceError."""
    if libraries is None:
        return tree
    if any(path.startswith("lib/") for path in tree):
        raise SourceError("--libraries: the project has a folder lib/ of its own; allowed: projects without one")
    tops = {path.removeprefix("src/").partition("/")[0] for path in _sources(tree)}
    try:
        found: Mapping[str, File | Link] = trees.from_folder(libraries)
    except TreeError as error:
        raise SourceError(f"--libraries: {error}") from None
    # A released copy of the project itself would hold the solution.
    kept = {path: entry for path, entry in found.items() if belongs(path) and path.partition("/")[0] not in tops}
    return {**tree, **{f"lib/{path}": entry for path, entry in kept.items()}}
