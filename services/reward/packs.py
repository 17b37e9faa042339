"""Problem packs as a grader needs them: public and hidden part joined by id, remembered by checksum."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import xxhash

from shared.contracts.run import Ref
from shared.objects import Objects
from shared.problems import Hidden, Problem
from shared.problems.pack import Lines, PackError, Part

REMEMBERED = 4  # packs: a run's and its evaluation's; each some megabytes


class Packs:
    """Not thread-safe: one per grader."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._problems: OrderedDict[str, Lines[Problem]] = OrderedDict()
        self._hidden: OrderedDict[str, Lines[Hidden]] = OrderedDict()

    def hold(self, data: bytes, part: Part) -> Ref:
        """Take a part that is in no object store, and return what to ask for it by. Raises PackError."""
        ref = Ref(key=f"{part} part", size=len(data), checksum=xxhash.xxh3_128_hexdigest(data))
        if part == "public":
            self._problems[ref.checksum] = Lines(data, Problem)
        else:
            self._hidden[ref.checksum] = Lines(data, Hidden)
        return ref

    def problem(self, pack: Ref, pack_hidden: Ref, problem: str) -> tuple[Problem, Hidden]:
        """Raises ObjectMissing, ObjectDamaged, PackError."""
        if pack.checksum not in self._problems:
            self._problems[pack.checksum] = Lines(self._objects.get(pack), Problem)
        if pack_hidden.checksum not in self._hidden:
            self._hidden[pack_hidden.checksum] = Lines(self._objects.get(pack_hidden), Hidden)
        public, hidden = self._problems[pack.checksum], self._hidden[pack_hidden.checksum]
        _touch(self._problems, pack)
        _touch(self._hidden, pack_hidden)
        for part, ref in ((public, pack), (hidden, pack_hidden)):
            if problem not in part:
                raise PackError(f"pack {ref.key} has no problem {problem!r}")
        return public[problem], hidden[problem]


def _touch(parts: OrderedDict[str, Any], used: Ref) -> None:
    parts.move_to_end(used.checksum)
    while len(parts) > REMEMBERED:
        parts.popitem(last=False)
