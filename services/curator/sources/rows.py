"""Code that the data sets of the SWE-bench family share: reading rows, naming tests, turning patches into changes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from services.curator.sources import Found, Refused
from shared import syntax
from shared.contracts.trajectory import Change
from shared.environments.repository import checks, patches, trees
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.environments.repository.trees import File, Tree, TreeError
from shared.objects import Objects
from shared.problems import ProblemError, others
from shared.problems.importing import unspeakable

# Endings of tests that pytest does not run.
LANGUAGES = {
    ".c": "C",
    ".cc": "C++",
    ".cpp": "C++",
    ".cs": "C#",
    ".go": "Go",
    ".java": "Java",
    ".js": "JavaScript",
    ".jsx": "JavaScript",
    ".kt": "Kotlin",
    ".php": "PHP",
    ".rb": "Ruby",
    ".rs": "Rust",
    ".scala": "Scala",
    ".swift": "Swift",
    ".ts": "TypeScript",
    ".tsx": "TypeScript",
}
_DJANGO = re.compile(r"\w+ \([\w.]+\)\Z")  # as Django's own runner names a test
MAX_FILE_BYTES = 1 << 20  # of a file of tests; Python takes up to a thousand times as much to read it
_SHOWN = 80  # characters of what was found


def rows_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every row with its number, e.g. 'row 1'. Raises ProblemError for a file without rows, or at the line that is no
    JSON. JSON lines are read one by one; an array is read whole."""
    if path.is_dir() and (said := others.folder(path)):
        raise ProblemError(said)
    number = 0
    for number, row in enumerate(_values(path), 1):
        inner = row.get("instance") if isinstance(row, dict) and isinstance(row.get("instance"), dict) else row
        yield f"row {number}", inner if isinstance(inner, dict) else {}
    if not number:
        raise ProblemError(f"{path}: no rows in it")


def _values(path: Path) -> Iterator[Any]:
    number, first = 0, True
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if first and text.lstrip().startswith("["):
                    yield from json.loads(text + file.read().decode())
                elif text.strip():
                    yield json.loads(text)
                first = first and not text.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ProblemError(
            f"{path}: cannot be read ({error}); allowed: rows as JSON lines, or one JSON array. Of a Parquet file "
            '`pandas.read_parquet(FILE).to_json(OUT, orient="records", lines=True)` makes them'
        ) from None
    except (ValueError, RecursionError) as error:
        place, why = f"line {number}", str(error)
        if isinstance(error, json.JSONDecodeError):  # counts from the line where its text begins
            place, why = f"line {number + error.lineno - 1}, column {error.colno}", error.msg
        raise ProblemError(f"{path}: {place}: no JSON: {why}; allowed: one row a line, or one array of rows") from None


def read_rows(path: Path, make: Callable[[dict[str, Any]], Found]) -> Iterator[Found]:
    """Make a problem of every row. One that cannot become one is refused with its reason. Raises ProblemError."""
    seen: set[str] = set()
    for place, row in rows_of(path):
        name = str(row.get("instance_id") or place).encode("utf-8", "backslashreplace").decode()
        try:
            if not row:
                raise Refused("is no JSON object")
            _require_unicode(row)
            found = make(row)
            if found.row in seen:
                raise Refused("stands in the file twice")
            seen.add(found.row)
        except (Refused, TreeError, patches.PatchError) as error:
            found = Found(name, note=str(error))
        except (AttributeError, KeyError, TypeError) as error:  # inside of a field that is no text
            found = Found(name, note=f"a field holds another type than the data set's: {error}")
        except (ValueError, RecursionError) as error:  # text that is no Unicode, source too deep for Python's parser
            found = Found(name, note=f"a field cannot be read: {type(error).__name__}: {error!s:.{_SHOWN}}")
        yield found


def _require_unicode(row: Mapping[str, Any]) -> None:
    """JSON may spell half a character, as in "\\ud800", which no pack can hold. Raises Refused, RecursionError."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Refused(f"found half a character ({error.object[error.start]!a}); allowed: UTF-8") from None


def text(row: Mapping[str, Any], field: str, *, empty: bool = False) -> str:
    """Return a field that has to be a text. `empty`: it may be blank. Raises Refused."""
    value = row.get(field)
    if not isinstance(value, str) or not (empty or value.strip()):
        raise Refused(f"field {field!r}: found {value!r:.{_SHOWN}}; allowed: a text")
    return value


def names(row: Mapping[str, Any], field: str) -> list[str]:
    """Return a list of tests: a list, or JSON of one as a text. Raises Refused."""
    value = row.get(field)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = row.get(field)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise Refused(f"field {field!r}: found {value!r:.{_SHOWN}}; allowed: a list of tests, or JSON of one")
    return list(dict.fromkeys(value))


def located(found: Sequence[str], changed: Iterable[str], tree: Tree) -> list[str]:
    """Return names of tests as pytest writes them. A bare name of a function belongs to the only changed test file that
    defines it. Raises Refused for the names of other runners."""
    changed = sorted(changed)
    return [_located(name, changed, tree) for name in found]


def _located(name: str, changed: Sequence[str], tree: Tree) -> str:
    if _of_pytest(name):
        return name
    if why := no_runner(name, changed):
        raise Refused(why)
    bare = name.partition("[")[0]
    holders = [path for path in changed if bare in tests_in(tree, path)]
    if not bare.isidentifier() or len(holders) != 1:
        where = f"{len(holders)} of {len(changed)} changed test files define it"
        raise Refused(f"found the test {name!r:.{_SHOWN}}, and {where}; allowed: path/of/test_file.py::name")
    return f"{holders[0]}::{name}"


def no_runner(name: str, changed: Iterable[str]) -> str | None:
    """Return why no runner here can run a test, or None if one may. `changed`: the files that the row's test patch changes."""
    if _of_pytest(name):
        return None
    if others := {LANGUAGES[end] for end in map(_ending, (*changed, name.partition("::")[0])) if end in LANGUAGES}:
        return f"needs a runner of tests in {' and '.join(sorted(others))}; allowed: Python tests, which pytest runs"
    if _DJANGO.match(name):
        return f"needs Django's own test runner (found the test {name!r:.{_SHOWN}}); allowed: tests that pytest names"
    return None


def _of_pytest(name: str) -> bool:
    path, mark, _ = name.partition("::")
    return bool(mark) and path.endswith(".py")


def tests_in(tree: Tree, path: str) -> list[str]:
    """Return the tests that a file of the tree defines: functions at its top level, and methods as `Class::name`. Decorators
    may make several tests of one; `parametrised` says where."""
    return [name for name, _ in _tests(tree, path)]


def parametrised(tree: Tree, path: str) -> list[str]:
    """Return the tests of a file whose names only pytest knows."""
    return [name for name, many in _tests(tree, path) if many]


def _tests(tree: Tree, path: str) -> list[tuple[str, bool]]:
    entry = tree.get(path)
    if not isinstance(entry, File) or not path.endswith(".py") or len(entry.data) > MAX_FILE_BYTES:
        return []
    try:
        module = syntax.parse(entry.data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: list[tuple[str, bool]] = []
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            found.append((node.name, _many(node)))
        if isinstance(node, ast.ClassDef):
            of_unittest = any("TestCase" in ast.unparse(base) for base in node.bases)
            if node.name.startswith("Test") or of_unittest:
                found += [
                    (f"{node.name}::{inner.name}", _many(inner) or _many(node))
                    for inner in node.body
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test")
                ]
    return found


def _many(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any("parametrize" in ast.unparse(decorator) for decorator in node.decorator_list)


def wanted_tests(row: Mapping[str, Any]) -> tuple[list[str], list[str], str]:
    """Return FAIL_TO_PASS, PASS_TO_PASS without the names that the data set has cut, and a note of how many; empty: none.
    Raises Refused for a cut name of FAIL_TO_PASS."""
    fail, cut = _whole(names(row, "FAIL_TO_PASS"))
    if cut:
        raise Refused(
            f"field 'FAIL_TO_PASS': found {cut[0]!r:.{_SHOWN}}, cut within its brackets; allowed: whole names"
        )
    others, cut = _whole(names(row, "PASS_TO_PASS"))
    note = f"{len(cut)} names of PASS_TO_PASS are cut within their brackets and not asked for" if cut else ""
    return fail, others, note


def _whole(found: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names that are whole, and those that a data set has cut at a blank inside of brackets."""
    cut = [name for name in found if name.count("[") > name.count("]")]
    return [name for name in found if name not in cut], cut


def _ending(path: str) -> str:
    return PurePosixPath(path).suffix


def finished(
    objects: Objects, tree: Tree, row: str, note: str = "", *, public: Mapping[str, Any], hidden: Mapping[str, Any]
) -> Found:
    """Return both parts of a problem, whose tree is stored. Raises Refused for what an import by hand would refuse."""
    problem = RepositoryProblem(id=row, tree=trees.store_tree(objects, trees.encode(tree)), **public)
    secret = RepositoryHidden(id=row, **hidden)
    wrong = unspeakable(problem) or checks.wrong_problem(problem, tree) or checks.wrong_hidden(secret, tree)
    if wrong:
        raise Refused(f"field {wrong[0]!r}: {wrong[1]}")
    return Found(row, problem, secret, note)


def kept_tests(fail: Sequence[str], others: Sequence[str], tests: Mapping[str, Change]) -> list[str]:
    """Return named test files that the hidden part does not bring. A submission cannot change them."""
    return sorted({name.partition("::")[0] for name in (*fail, *others)} - set(tests))
