"""Problem packs as a grader needs them: public and hidden part joined by id, remembered by checksum."""

from __future__ import annotations

from collections import OrderedDict

from shared.contracts.run import Ref
from shared.objects import Objects
from shared.problems import Hidden, Problem
from shared.problems.pack import read_hidden, read_problems

REMEMBERED = 4  # parts of packs: a run's and its evaluation's


class PackError(ValueError):
    """The pack cannot be used for this attempt; the text says why."""


class Packs:
    """Not thread-safe: one per grader."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._parts: OrderedDict[str, dict[str, Problem] | dict[str, Hidden]] = OrderedDict()

    def problem(self, pack: Ref, pack_hidden: Ref, problem: str) -> tuple[Problem, Hidden]:
        """Raises ObjectMissing, ObjectDamaged, PackError."""
        public = self._part(pack, read_problems).get(problem)
        hidden = self._part(pack_hidden, read_hidden).get(problem)
        for part, ref in ((public, pack), (hidden, pack_hidden)):
            if part is None:
                raise PackError(f"pack {ref.key} has no problem {problem!r}")
        return public, hidden  # type: ignore[return-value]

    def _part(self, ref: Ref, read: object) -> dict:
        key = f"{read.__name__}:{ref.checksum}"  # type: ignore[attr-defined]
        if key not in self._parts:
            self._parts[key] = {entry.id: entry for entry in read(self._objects.get(ref))}  # type: ignore[operator]
            while len(self._parts) > REMEMBERED:
                self._parts.popitem(last=False)
        self._parts.move_to_end(key)
        return self._parts[key]
