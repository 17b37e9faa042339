"""Things that are found by name: this project's own, and those that other packages bring by entry points.

    plugins = Plugins("etude.renderers", modules_of(formats, "load"))
    plugins.names()           # imports none of them
    plugins.load("chatml")    # imports that module alone

A name that nothing has is UnknownName, so that a KeyError of a module that is imported is not taken for it. What another package
brings and cannot be imported is Unloadable, which names the entry point.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from shared.structs import settle


class UnknownName(KeyError):
    """Neither this project nor another package brings anything of the name."""


class Unloadable(ValueError):
    """An entry point of another package cannot be used; the text names it and says why."""


@dataclass(frozen=True, slots=True)
class Plugins:
    """`group`: of the entry points. `own`: name -> `module:object` in this project. An own one wins over an entry point of its
    name."""

    group: str
    own: dict[str, str]

    def names(self) -> list[str]:
        """Return all names, sorted, without importing anything."""
        return sorted({*self.own, *(point.name for point in entry_points(group=self.group))})

    def load(self, name: str) -> Any:
        """Import and return the object of this name. Raises UnknownName; Unloadable if another package brings it and its import
        fails."""
        if (value := self.own.get(name)) is not None:
            return _loaded(EntryPoint(name, value, self.group))
        for point in entry_points(group=self.group, name=name):
            try:
                return _loaded(point)
            except Exception as error:  # whatever the module of another package does
                raise Unloadable(f"{self.place(name)} cannot be loaded: {type(error).__name__}: {error}") from error
        raise UnknownName(name)

    def place(self, name: str) -> str:
        """Say where the object of this name comes from, for errors."""
        points = entry_points(group=self.group, name=name)
        value = self.own.get(name) or next((point.value for point in points), "nothing")
        return f"{name!r:.80} ({value}, group {self.group!r})"


def _loaded(point: EntryPoint) -> Any:
    found = point.load()
    settle()
    return found


def modules_of(package: ModuleType, attribute: str) -> dict[str, str]:
    """Return name -> `module:attribute` for each module of a package; packages inside it are left out."""
    found = iter_modules(package.__path__)
    return {module.name: f"{package.__name__}.{module.name}:{attribute}" for module in found if not module.ispkg}


@functools.cache
def modules_named(package: str, attribute: str) -> dict[str, str]:
    """Return as `modules_of`, of a package that the caller may name and must not import: `shared` imports no service."""
    spec = find_spec(package)
    found = iter_modules(spec.submodule_search_locations) if spec and spec.submodule_search_locations else ()
    return {module.name: f"{package}.{module.name}:{attribute}" for module in found if not module.ispkg}
