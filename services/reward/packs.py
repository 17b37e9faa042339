"""Problem packs as a grader needs them: public and hidden part joined by id, remembered by checksum."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

import msgspec
import zstandard

from shared.contracts.run import Ref
from shared.objects import Objects
from shared.problems import Hidden, Problem

REMEMBERED = 4  # parts of packs: a run's and its evaluation's

Entry = TypeVar("Entry", Problem, Hidden)


class PackError(ValueError):
    """The pack cannot be used for this attempt; the text says why."""


class Packs:
    """Not thread-safe: one per grader."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._problems: OrderedDict[str, dict[str, Problem]] = OrderedDict()
        self._hidden: OrderedDict[str, dict[str, Hidden]] = OrderedDict()

    def problem(self, pack: Ref, pack_hidden: Ref, problem: str) -> tuple[Problem, Hidden]:
        """Raises ObjectMissing, ObjectDamaged, PackError."""
        return (
            self._find(self._problems, pack, Problem, problem),
            self._find(self._hidden, pack_hidden, Hidden, problem),
        )

    def _find(self, known: OrderedDict[str, dict[str, Entry]], ref: Ref, kind: type[Entry], problem: str) -> Entry:
        if ref.checksum not in known:
            known[ref.checksum] = self._read(ref, kind)
            if len(known) > REMEMBERED:
                known.popitem(last=False)
        known.move_to_end(ref.checksum)
        try:
            return known[ref.checksum][problem]
        except KeyError:
            raise PackError(f"pack {ref.key} has no problem {problem!r}") from None

    def _read(self, ref: Ref, kind: type[Entry]) -> dict[str, Entry]:
        data = self._objects.get(ref)
        try:
            lines = zstandard.ZstdDecompressor().decompressobj().decompress(data)
            entries: list[Entry] = msgspec.json.Decoder(kind).decode_lines(lines)
        except (zstandard.ZstdError, msgspec.DecodeError) as error:
            raise PackError(f"pack {ref.key}: {error}") from None
        return {entry.id: entry for entry in entries}
