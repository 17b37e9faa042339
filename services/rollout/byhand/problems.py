"""The problem that a command names: `FILE.jsonl`, `FILE.jsonl#ID` or `PACKDIR#ID`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from shared.objects import Objects
from shared.problems import Hidden, Problem, ProblemError
from shared.problems.importing import import_jsonl
from shared.problems.pack import Lines, PackError, file_name, splits_in, upload_trees

_NEAR = 3  # ids that an error offers

T = TypeVar("T", Problem, Hidden)


@dataclass(frozen=True, slots=True)
class Chosen:
    """`hidden`: None where the hidden part does not lie beside the public one; the attempt is not graded then. `source`: what
    was named, with the id. `others`: further problems of the same file or pack."""

    problem: Problem
    hidden: Hidden | None
    source: str
    others: int


def choose(named: str, objects: Objects) -> Chosen:
    """Return the problem. The trees that it needs are put into the store. Raises ProblemError that says what is there."""
    place, _, id = named.rpartition("#") if "#" in named and not Path(named).exists() else (named, "", "")
    path = Path(place)
    if path.is_dir():
        return _of_pack(path, id, objects)
    if not path.exists():
        raise ProblemError(f"{path}: not there; allowed: FILE.jsonl, FILE.jsonl#ID or PACKDIR#ID")
    pairs = import_jsonl(path, objects)
    if not id:
        return Chosen(*pairs[0], f"{path}#{pairs[0][0].id}", len(pairs) - 1)
    for problem, hidden in pairs:
        if problem.id == id:
            return Chosen(problem, hidden, f"{path}#{id}", len(pairs) - 1)
    raise _unknown(path, id, [problem.id for problem, _ in pairs])


def _of_pack(folder: Path, id: str, objects: Objects) -> Chosen:
    seen: list[str] = []
    for split in splits_in(folder):
        public: Lines[Problem] = _lines(folder / file_name(split, "public"), Problem)
        if id in public:
            problem = public[id]
            try:
                upload_trees([problem], folder, objects)
            except OSError as error:
                raise ProblemError(f"{folder}: a tree of {id!r} cannot be stored: {error}") from None
            return Chosen(problem, _hidden(folder, split, id), f"{folder}#{id}", len(public) - 1)
        seen += public.ids
    if not seen:
        raise ProblemError(f"{folder}: found no *.public.jsonl.zst there; allowed: the folder of a pack")
    raise _unknown(folder, id, seen)


def _hidden(folder: Path, split: str, id: str) -> Hidden | None:
    path = folder / file_name(split, "hidden")
    if not path.exists():
        return None
    lines: Lines[Hidden] = _lines(path, Hidden)
    try:
        return lines[id]
    except KeyError:
        return None


def _lines(path: Path, kind: type[T]) -> Lines[T]:
    try:
        return Lines(path.read_bytes(), kind)
    except PackError as error:
        raise PackError(f"{path}: {error}") from None
    except OSError as error:
        raise ProblemError(f"{path}: cannot be read ({error.strerror})") from None


def _unknown(place: Path, id: str, known: Sequence[str]) -> ProblemError:
    near = get_close_matches(id, known, _NEAR, 0.4) or sorted(known)[:_NEAR]
    what = f"found no problem {id!r:.80}" if id else "found no id behind the path"
    return ProblemError(f"{place}: {what} among {len(known)}; near: {', '.join(f'{place}#{name}' for name in near)}")
