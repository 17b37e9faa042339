"""Anyone's own problems: a JSONL file, one problem a line, hidden cases inside (docs/problems.md)."""

from __future__ import annotations

import ast
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shared import syntax
from shared.problems import others
from shared.problems.schema import (
    Case,
    FunctionHidden,
    FunctionProblem,
    Hidden,
    Problem,
    ProblemError,
    parse_line,
    too_long,
)
from shared.problems.values import decode, encode

if TYPE_CHECKING:
    from shared.objects import Objects
    from shared.problems.kinds import Attach

_MAX_ERRORS = 20  # named in one message
_PACKED = {
    b"\x1f\x8b": "gunzip",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"PK\x03\x04": "unzip",
}  # first bytes → what undoes it
_A_LINE = "one JSON object a line (docs/problems.md)"
_ID = re.compile(r"[!-~]{1,128}\Z")  # visible ASCII: ids stand in keys, files and labels
# Of trees that files of problems name, in the state folder; it can be made again.
STORE = Path(os.environ.get("ETUDE_STATE") or ".etude", "cache", "objects")
_MAX_TAG = 200  # characters of `category` and `cell`: both stand in every message and row of their problem


@dataclass(frozen=True, slots=True)
class Line:
    """A problem and the line of the file that it stands on, counted from 1; 0: it is of a pack. Both parts are of the
    problem's kind (shared.problems.kinds)."""

    number: int
    problem: Any
    hidden: Any


def import_jsonl(path: Path, objects: Objects | None = None) -> list[tuple[Any, Any]]:
    """In the order of the file; empty lines are skipped. Raises ProblemError that names every bad line and its field.
    `objects`: where the trees go that lines name; None: to `STORE`."""
    return [(line.problem, line.hidden) for line in read_lines(path, objects)]


def read_lines(path: Path, objects: Objects | None = None) -> list[Line]:
    """As `import_jsonl`, with the numbers of the lines."""
    text = _text(path)
    read = _Reader(path, objects)
    lines = text.split("\n")  # alone: JSON may hold other ends of a line as they are (U+2028, U+0085)
    found: list[Line] = []
    errors: list[str] = []
    first: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            problem, hidden = read(line, number)
            if problem.id in first:
                raise ProblemError(
                    f"line {number}: field 'id': {problem.id!r} stands on line {first[problem.id]} as well"
                )
        except ProblemError as error:
            errors.append(str(error))
            continue
        first[problem.id] = number
        found.append(Line(number, problem, hidden))
    if errors:
        if _over_lines(text):
            raise ProblemError(
                f"{path}: found JSON objects over several lines; allowed: {_A_LINE} (`jq -c .` makes one of the other)"
            )
        raise ProblemError(f"{path}:\n{listed(errors)}")
    if not found:
        raise ProblemError(f"{path}: no problems in it; allowed: {_A_LINE}")
    return found


class _Reader:
    """Reads the lines of one file. Nothing of other kinds is loaded until a line has one."""

    def __init__(self, path: Path, objects: Objects | None) -> None:
        self._folder, self._objects = path.parent, objects
        self._made: Attach | None = None

    def __call__(self, line: str, number: int) -> tuple[Problem, Hidden]:
        """Return both parts, checked and in canonical form. Raises ProblemError."""
        problem, hidden = parse_line(line, number, self._attach)
        if isinstance(problem, FunctionProblem) and isinstance(hidden, FunctionHidden):
            function, cases = canonical(problem, hidden, number)
            check(function, cases, number)
            return function, cases
        if unfit := unspeakable(problem) or _wrong(problem, hidden, self._attach):
            raise ProblemError(f"line {number}: field {unfit[0]!r}: {unfit[1]}")
        return problem, hidden

    def _attach(self) -> Attach:
        if self._made is None:
            from shared.objects.directory import DirectoryObjects
            from shared.problems.kinds import Attach

            self._made = Attach(self._objects or DirectoryObjects(STORE), self._folder)
        return self._made


def _wrong(problem: Problem, hidden: Hidden, attach: Callable[[], Attach]) -> tuple[str, str] | None:
    """The field that a problem of another kind cannot have as it is, and why; None where all is well, or where only the kind's
    own admission can tell."""
    from shared.environments.repository import checks
    from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem

    if not isinstance(problem, RepositoryProblem) or not isinstance(hidden, RepositoryHidden):
        return None
    tree = attach().read(problem.tree)
    if not tree:
        return "tree", "has no files in it; allowed: a folder, an archive or a commit with some"
    return checks.wrong_problem(problem, tree) or checks.wrong_hidden(hidden, tree)


def _text(path: Path) -> str:
    """Of a file that may be one of problems. Raises ProblemError."""
    try:
        data = path.read_bytes()
        if packed := next((command for mark, command in _PACKED.items() if data.startswith(mark)), None):
            raise ProblemError(f"{path}: found a compressed file; allowed: {_A_LINE}, as `{packed}` unpacks it")
        if data.startswith(others.PARQUET):
            raise ProblemError(others.parquet(path))
        if b"\0" in data:  # JSON never has it; half of UTF-16 is made of it
            raise ProblemError(f"{path}: found bytes that are 0, as in UTF-16; allowed: text in UTF-8")
        text = data.decode("utf-8-sig")  # a mark of the byte order is no part of a line
    except IsADirectoryError:
        raise ProblemError(
            others.folder(path) or f"{path}: found a folder; allowed: {_A_LINE}; a pack is taken by --pack"
        ) from None
    except OSError as error:
        raise ProblemError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ProblemError(f"{path}: line {number}: found {data[error.start]:#04x}; allowed: text in UTF-8") from None
    if said := others.rows(path, text):
        raise ProblemError(said)
    if text.lstrip().startswith("["):
        raise ProblemError(f"{path}: found a JSON array; allowed: {_A_LINE} (`jq -c '.[]'` makes one of the other)")
    return text


def _over_lines(text: str) -> bool:
    """Whether it begins with JSON of more than one line."""
    text = text.lstrip()
    try:
        _, end = json.JSONDecoder(parse_int=str).raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end]


def listed(reasons: Sequence[str]) -> str:
    """One a line; of very many the first, and how many more there are."""
    more = [f"… and {len(reasons) - _MAX_ERRORS} more"] if len(reasons) > _MAX_ERRORS else []
    return "\n".join([*reasons[:_MAX_ERRORS], *more])


def unspeakable(problem: Problem) -> tuple[str, str] | None:
    """The field of its names that cannot stand in messages, keys and labels, and why; None where all can."""
    if not _ID.match(problem.id):
        return "id", f"found {problem.id[:200]!r}; allowed: 1 to 128 visible ASCII characters"
    for field, text in (("category", problem.category), ("cell", problem.cell)):
        if len(text) > _MAX_TAG or not text.isprintable():
            what = f"found {text[:60]!r}, {len(text)} characters; allowed: at most {_MAX_TAG}, all printable"
            return field, what
    return None


def entry_of(problem: FunctionProblem) -> tuple[str, str]:
    """(path, name) of the function under test. Raises ValueError."""
    path, _, name = problem.entry.rpartition("::")
    name = unicodedata.normalize("NFKC", name)  # as Python reads the names of its code
    if not path and len(problem.files) == 1:
        (path,) = problem.files
    if path not in problem.files or not name.isidentifier():
        raise ValueError(
            f"found {problem.entry!r}; allowed: path::name with a path of 'files' "
            f"({', '.join(sorted(problem.files))}), or name where there is one file; a function at the top level, no method"
        )
    return path, name


def check(problem: FunctionProblem, hidden: FunctionHidden, number: int) -> None:
    """What the types do not say. Raises ProblemError."""

    def refuse(field: str, what: str) -> ProblemError:
        return ProblemError(f"line {number}: field {field!r}: {what}")

    if unfit := unspeakable(problem):
        raise refuse(*unfit)
    for field, files in (("files", problem.files), ("solution", hidden.solution)):
        if long := too_long(files):
            raise refuse(field, long)
    try:
        path, name = entry_of(problem)
    except ValueError as error:
        raise refuse("entry", str(error)) from None
    for field, text in ((f"files[{path}]", problem.files[path]), (f"solution[{path}]", hidden.solution.get(path))):
        if text is not None and (objection := _objection(text, name)):
            raise refuse(field, objection)
    unknown = sorted(set(hidden.solution) - set(problem.files))
    if unknown:
        raise refuse("solution", f"found {unknown[0]!r}, which is not in 'files'")
    if not problem.visible:
        raise refuse("visible", "is empty; the agent needs at least one case to see")
    if problem.actual and len(problem.actual) != len(problem.visible):
        raise refuse("actual", f"found {len(problem.actual)} texts for {len(problem.visible)} visible cases")
    if objection := problem.limits.objection():
        raise refuse("limits", objection)


def _objection(text: str, name: str) -> str:
    """Empty for code that defines the function, and for code that Python does not take: a syntax error may be the bug; the gate
    sees what it does."""
    try:
        tree = syntax.parse(text)
    except (SyntaxError, ValueError):
        return ""
    except (RecursionError, MemoryError):
        return "is nested too deeply for Python to read"
    found = {what for bound, what in _bound(tree) if bound == name}
    if "" in found:
        return ""
    return f"defines no function {name!r} at its top level{''.join(f', but a {what} of that name' for what in sorted(found))}"


_SCOPES = ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def _bound(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names that a module binds, within `if`, `try` and the like too; each with what it is where that is no function for sure."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef):
            yield node.name, ""
        elif isinstance(node, ast.AsyncFunctionDef):
            yield node.name, "coroutine"
        elif isinstance(node, ast.ClassDef):
            yield node.name, "class"
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, "") for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, ""
        elif not isinstance(node, _SCOPES):
            nodes += ast.iter_child_nodes(node)


def canonical(problem: FunctionProblem, hidden: FunctionHidden, number: int) -> tuple[FunctionProblem, FunctionHidden]:
    """The same, each text of a value as `encode` writes it: one value, one text. What the sandbox gives is compared with it as
    text. Code loses its mark of the byte order, as Python reads a file. Raises ProblemError."""
    visible, cases = (
        [_canonical(case, f"line {number}: field '{field}[{index}]") for index, case in enumerate(found)]
        for field, found in (("visible", problem.visible), ("hidden", hidden.cases))
    )
    actual = [_tidy(text) for text in problem.actual]
    files, solution = _unmarked(problem.files), _unmarked(hidden.solution)
    return msgspec.structs.replace(problem, files=files, visible=visible, actual=actual), msgspec.structs.replace(
        hidden, cases=cases, solution=solution
    )


def _unmarked(files: dict[str, str]) -> dict[str, str]:
    return {path: text.removeprefix("\ufeff") for path, text in files.items()}


def _tidy(text: str) -> str:
    """Of what came out: a value, or an exception's name as it is."""
    try:
        return encode(decode(text))
    except (ValueError, RecursionError):
        return text


def _canonical(case: Case, where: str) -> Case:
    texts = {}
    for field in ("args", "expected"):
        text = getattr(case, field)
        try:
            value = decode(text)
            texts[field] = encode(value)
        except (ValueError, RecursionError) as error:
            raise ProblemError(
                f"{where}.{field}': found {text[:60]!r}: {error}; allowed: tagged JSON (docs/problems.md)"
            ) from None
        if field == "args" and not isinstance(value, list):
            raise ProblemError(f"{where}.args': found {text[:60]!r}; allowed: a JSON list of positional arguments")
    if case.changed is True and not isinstance(value, list | dict | set):
        raise ProblemError(
            f"{where}.changed': found true with the expected value {case.expected[:60]}; allowed: a list, dict or set, which a "
            "call can change in place"
        )
    return msgspec.structs.replace(case, **texts)
