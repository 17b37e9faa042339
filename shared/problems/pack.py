"""Packs: many problems as two objects, public and hidden, zstd-compressed JSON lines joined by id.

`read_problems` and `read_hidden` read all of it; `Lines` decompresses once and finds a problem by its id without parsing
the rest. A pack may hold several kinds. Trees are no part of it: a problem has references to them, and `trees/` in the
folder of a pack has the objects (`refs`, `upload_trees`).

Packs may be joined byte by byte: several zstd frames are one pack. Equal problems give equal bytes (same
zstandard version).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast, get_args, get_type_hints, overload

import msgspec
import zstandard

from shared.contracts.run import Ref
from shared.objects import ObjectMissing, Objects
from shared.problems.schema import FunctionHidden, FunctionProblem, Hidden, Problem, ProblemError
from shared.problems.splits import SPLITS

MAX_PACK_BYTES = 1 << 30  # decompressed
_LEVEL = 12
_PIECE = 1024  # bytes that are decompressed at once, to 32 MB at most: a bomb is noticed before it has unfolded

T = TypeVar("T", bound=msgspec.Struct)
P = TypeVar("P", bound=Problem)
H = TypeVar("H", bound=Hidden)
Part = Literal["public", "hidden"]

PARTS: tuple[Part, ...] = ("public", "hidden")
PRETRAIN = "pretrain.jsonl.zst"  # functions of the train split, beside its problems


def file_name(split: str, part: Part) -> str:
    """Of a part of a split in the directory of a pack."""
    return f"{split}.{part}.jsonl.zst"


def splits_in(directory: Path) -> list[str]:
    """Those whose public part the directory of a pack has, the known ones first and in their order."""
    ending = file_name("", "public")
    there = {path.name.removesuffix(ending) for path in directory.glob(f"*{ending}")}
    return [name for name in SPLITS if name in there] + sorted(there - set(SPLITS))


class PackError(ProblemError):
    """The bytes are no pack; the text says what was found."""


class _Head(msgspec.Struct):
    id: str
    kind: str = "function"  # as hidden lines of that kind have none


_HEADS = msgspec.json.Decoder(_Head)


def write(items: Iterable[msgspec.Struct]) -> bytes:
    """One part of a pack, public or hidden: one line each, in the order given. Raises TypeError for hidden parts of another
    kind than `function` that do not name it: nobody could read them again."""
    items = list(items)
    for item in items:
        if isinstance(item, Hidden) and not isinstance(item, FunctionHidden) and item.kind is msgspec.UNSET:
            raise TypeError(f"{type(item).__name__}: field 'kind' is unset; allowed: a default, the name of its kind")
    lines = b"".join(msgspec.json.encode(item) + b"\n" for item in items)
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(lines)


def decompress(data: bytes) -> bytes:
    """The text of all frames. Raises PackError for what is damaged, cut short or larger than MAX_PACK_BYTES."""
    parts: list[bytes] = []
    size = at = 0
    while at < len(data) or not parts:
        reader = zstandard.ZstdDecompressor().decompressobj(read_across_frames=False)
        while not reader.eof:
            piece = data[at : at + _PIECE]
            if not piece:
                raise PackError(f"pack: cut short after {len(data)} bytes")
            try:
                part = reader.decompress(piece)
            except zstandard.ZstdError as error:
                raise PackError(f"pack: no zstd data: {error}") from None
            parts.append(part)
            size += len(part)
            if size > MAX_PACK_BYTES:
                raise PackError(f"pack of more than {MAX_PACK_BYTES} bytes decompressed")
            at += len(piece) - len(reader.unused_data)
    return b"".join(parts)


class Lines(Generic[T]):
    """A read part of a pack: of `Problem` or `Hidden`, then each line is read as its kind's struct when it is asked for; or of
    one kind alone, such as `FunctionProblem`. An iteration has the order of the pack."""

    def __init__(self, data: bytes, kind: type[T]) -> None:
        self._text = decompress(data)
        self._kind = kind
        self._decoders: dict[str, msgspec.json.Decoder[T]] = {}
        self._places: dict[str, tuple[int, int, int, str]] = {}  # id → line number, start, end, kind
        start = number = 0
        while start < len(self._text):
            end = self._text.find(b"\n", start)
            end = len(self._text) if end < 0 else end
            number += 1
            try:
                head = _HEADS.decode(memoryview(self._text)[start:end])
            except msgspec.DecodeError as error:
                raise PackError(f"pack: line {number}: {error}") from None
            self._places[head.id] = (number, start, end, head.kind)
            start = end + 1

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, problem: str) -> bool:
        return problem in self._places

    @property
    def ids(self) -> list[str]:
        return list(self._places)

    def kind(self, problem: str) -> str:
        """KeyError for an id that the pack does not hold."""
        return self._places[problem][3]

    def with_refs(self) -> list[T]:
        """Return the lines of kinds that have fields of type `Ref`, without reading any other. Raises PackError."""
        kinds = {kind: number for number, *_, kind in self._places.values()}
        able = {kind for kind, number in kinds.items() if _has_refs(self._struct_of(number, kind))}
        return [self[problem] for problem, (*_, kind) in self._places.items() if kind in able]

    def __getitem__(self, problem: str) -> T:
        """KeyError for an id that the pack does not hold; PackError for a line that is no such object."""
        number, start, end, kind = self._places[problem]
        if kind not in self._decoders:
            self._decoders[kind] = msgspec.json.Decoder(self._struct_of(number, kind))
        try:
            return self._decoders[kind].decode(memoryview(self._text)[start:end])
        except (msgspec.DecodeError, ValueError) as error:
            raise PackError(f"pack: line {number}: {error}") from None

    def _struct_of(self, number: int, kind: str) -> type[T]:
        """Return the struct of a line of this kind. `number`: the line's. Raises PackError where no environment knows the kind."""
        try:
            return _struct(self._kind, kind)
        except ValueError as error:
            raise PackError(f"pack: line {number}: {error}") from None

    def __iter__(self) -> Iterator[T]:
        return (self[problem] for problem in self._places)


def _struct(part: type[T], kind: str) -> type[T]:
    """The struct of a line: of its kind, where `part` is of all kinds. Raises UnknownKind."""
    of_function: dict[type[msgspec.Struct], type[Any]] = {Problem: FunctionProblem, Hidden: FunctionHidden}
    if part not in of_function:
        return part
    if kind == "function":
        return of_function[part]
    from shared.problems import kinds

    public, hidden = kinds.structs(kind)
    return cast("type[T]", public if issubclass(public, part) else hidden)


@overload
def read_problems(data: bytes) -> list[Problem]: ...
@overload
def read_problems(data: bytes, kind: type[P]) -> list[P]: ...
def read_problems(data: bytes, kind: type[Any] = Problem) -> list[Any]:
    """The public part, whole: of problems of every kind, or of one. Raises PackError."""
    return list(Lines(data, kind))


@overload
def read_hidden(data: bytes) -> list[Hidden]: ...
@overload
def read_hidden(data: bytes, kind: type[H]) -> list[H]: ...
def read_hidden(data: bytes, kind: type[Any] = Hidden) -> list[Any]:
    """The hidden part, whole: as `read_problems`. Raises PackError."""
    return list(Lines(data, kind))


def _has_refs(kind: type[msgspec.Struct]) -> bool:
    return any(Ref in (hint, *get_args(hint)) for hint in get_type_hints(kind).values())


def refs(problem: Problem) -> list[Ref]:
    """The objects that a problem needs, such as its tree."""
    return [value for name in problem.__struct_fields__ if isinstance(value := getattr(problem, name), Ref)]


def keep_trees(problems: Iterable[Problem], objects: Objects, folder: Path) -> None:
    """Copy the objects that problems need into the folder of a pack. Raises OSError, ObjectMissing, ObjectDamaged."""
    for ref in _distinct(problems):
        if not (path := folder / ref.key).exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            objects.get_file(ref, path)


def upload_trees(problems: Iterable[Problem], folder: Path, objects: Objects) -> None:
    """Put the objects that problems need from the folder of a pack into the store, unless they are there. Raises OSError, and
    PackError for one that neither has."""
    for ref in _distinct(problems):
        try:
            if objects.head(ref.key).size == ref.size:
                continue
        except ObjectMissing:
            pass
        if not (path := folder / ref.key).is_file():
            raise PackError(f"{path}: missing; a problem of the pack needs it; allowed: a pack with its folder trees/")
        if (put := objects.put_file(ref.key, path)) != ref:
            raise PackError(f"{path}: damaged: found {put.size} bytes, xxh3-128 {put.checksum}; the pack names {ref}")


def _distinct(problems: Iterable[Problem]) -> list[Ref]:
    return list({ref.key: ref for problem in problems for ref in refs(problem)}.values())


def export_line(problem: Problem, hidden: Hidden) -> str:
    """One problem as a line of the documented JSONL, hidden part inside."""
    raw = msgspec.to_builtins(problem)
    if isinstance(hidden, FunctionHidden):
        raw["hidden"] = msgspec.to_builtins(hidden.cases)
        raw["solution"], raw["bug"] = hidden.solution, hidden.bug
    else:
        raw["hidden"] = {
            name: value for name, value in msgspec.to_builtins(hidden).items() if name not in ("id", "kind")
        }
    return msgspec.json.encode(raw).decode()
