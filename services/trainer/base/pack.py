"""Reads what the curator made: functions to pretrain on, and problems with their hidden parts.

Files of a pack directory: `pretrain.jsonl.zst` (functions of the train split), and for each split of train, rl, dev and
held_out `<split>.public.jsonl.zst` and `<split>.hidden.jsonl.zst`.
"""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import xxhash
import zstandard

from shared.problems import FunctionHidden, FunctionProblem
from shared.problems.pack import PRETRAIN, file_name, read_hidden, read_problems


class PackError(ValueError):
    """The directory is no pack; the text names the file and what was expected."""


class PretrainFunction(msgspec.Struct, frozen=True):
    """A line of pretrain.jsonl.zst; other fields are ignored."""

    source: str
    origin: str = ""


def _bytes(path: Path) -> bytes:
    if not path.is_file():
        raise PackError(f"no {path}; expected a pack directory as `etude tasks mutate --out DIR` makes it")
    return path.read_bytes()


def functions(pack: Path) -> list[PretrainFunction]:
    decoder = msgspec.json.Decoder(PretrainFunction)
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(_bytes(pack / PRETRAIN))) as stream:
        return [decoder.decode(line) for line in io.BufferedReader(stream) if line.strip()]


def problems(pack: Path, split: str) -> list[tuple[FunctionProblem, FunctionHidden]]:
    """Public and hidden parts joined by id, in the order of the public file."""
    hidden = {h.id: h for h in read_hidden(_bytes(pack / file_name(split, "hidden")), FunctionHidden)}
    public = read_problems(_bytes(pack / file_name(split, "public")), FunctionProblem)
    missing = [p.id for p in public if p.id not in hidden]
    if missing:
        raise PackError(f"{pack}: {len(missing)} problems of split {split} have no hidden part, as {missing[0]}")
    return [(p, hidden[p.id]) for p in public]


def solution(hidden: FunctionHidden) -> str:
    """The original function of a problem: the text of its only file."""
    return next(iter(hidden.solution.values()), "")


def digest(pack: Path, names: tuple[str, ...]) -> str:
    """Changes whenever one of the files does."""
    hasher = xxhash.xxh3_128()
    for name in names:
        hasher.update(name.encode() + (pack / name).read_bytes() if (pack / name).is_file() else name.encode())
    return hasher.hexdigest()
