"""Fields of a config.json, each read as what it has to be.

A field of another kind or beyond its range is refused with its name, what was found and what is allowed. `null` is no
number and no flag; who takes it for something asks `null` first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST = 2**31 - 1  # a size beyond it is none
FARTHEST = 1e30  # so is a number


class UnknownModel(ValueError):
    """The checkpoint is of a kind or shape that this implementation does not know; the text names the field. `path`: the file
    or folder that the text begins with; None: the text names no place."""

    def __init__(self, said: str, path: Path | None = None) -> None:
        super().__init__(said if path is None else f"{path}: {said}")
        self.path = path


@dataclass(frozen=True, slots=True)
class Fields:
    """`what`: said behind the name of one that is missing. `where`: said before every name, of an object within the file."""

    raw: dict[str, Any]
    what: str = ""
    where: str = ""

    def null(self, name: str) -> bool:
        """Whether it is there and null."""
        return name in self.raw and self.raw[name] is None

    def whole(self, name: str, default: int | None = None, *others: str, least: int = 1, most: int = LARGEST) -> int:
        """A whole number; without a `default` it must be there. `others`: names that mean the same."""
        name, value = self._given(name, others, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._refused(name, value, f"a whole number, {least} to {most}")
        return value

    def number(
        self, name: str, default: float | None = None, *, least: float = 0.0, above: float | None = None
    ) -> float:
        """A finite number of at least `least`, or `above` it; without a `default` it must be there."""
        name, value = self._given(name, (), default)
        low = least if above is None else above
        fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= FARTHEST
        if not fits or value == above:
            raise self._refused(name, value, f"a number {'of at least' if above is None else 'above'} {low:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name, default)
        if not isinstance(value, bool):
            raise self._refused(name, value, "true or false")
        return value

    def items(self, name: str, kind: type[int] | type[str]) -> list[Any]:
        """A list of one kind; empty where it is absent or null."""
        value = self.raw.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise self._refused(name, value, f"a list of {'whole numbers' if kind is int else 'texts'}")
        return value

    def inner(self, name: str) -> Fields:
        """An object; empty where it is absent or null."""
        value = self.raw.get(name)
        if not isinstance(value, dict | None):
            raise self._refused(name, value, "a JSON object")
        return Fields(value or {}, self.what, f"{self.where}{name}.")

    def _given(self, name: str, others: tuple[str, ...], default: Any) -> tuple[str, Any]:
        there = [key for key in (name, *others) if key in self.raw]
        if not there and default is None:
            raise UnknownModel(f"config.json: field '{self.where}{name}' is missing{self.what}")
        if len(there) > 1 and self.raw[there[0]] != self.raw[there[1]]:
            values = " and ".join(f"{key} {self.raw[key]!r:.80}" for key in there)
            raise UnknownModel(f"config.json: found {values}, which are one thing; allowed: one of them")
        return (there[0], self.raw[there[0]]) if there else (name, default)

    def _refused(self, name: str, value: Any, allowed: str) -> UnknownModel:
        return UnknownModel(f"config.json: {self.where}{name} is {value!r:.80}; allowed: {allowed}")
