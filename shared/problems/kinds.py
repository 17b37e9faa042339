"""Lines of every kind but `function`: public fields, and an object `hidden` with the hidden ones.

A kind's environment names its structs (`shared.environments.registry`). Two types of fields have a short form in a line:
- `Ref`: a path, relative to the file. The tree that lies there becomes an object (`Attach`).
- `dict[str, Change]`: path -> text, null for a deleted file, or an object as `Change`; or all as one unified diff of the tree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from shared.contracts.run import Ref
from shared.contracts.trajectory import Change
from shared.environments import registry
from shared.environments.repository import patches, tree_sources, trees
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.problems.schema import (
    FunctionHidden,
    FunctionProblem,
    Hidden,
    Problem,
    converted,
    unknown_field,
)

_OWN = ("kind", "id")  # of the hidden part: a line says them once
_A_TREE = "a path to a folder, an archive or a git bundle, or the reference of a stored object"
_IMAGE = "image"
_IMAGES = (_IMAGE, "docker_image", "image_name")  # as data sets call it


@dataclass(slots=True)
class Attach:
    """Stores the trees that lines name. `folder`: where their paths begin, the folder of the file. Lines of one tree read it
    once."""

    objects: Objects
    folder: Path
    _stored: dict[tuple[str, str], Ref] = field(default_factory=dict)
    _last: tuple[str, trees.Tree] = ("", {})

    def tree(self, path: str, commit: str) -> Ref:
        """Store the tree at `path` and return its reference. `commit`: empty: as `tree_at` says. Raises TreeError."""
        if (ref := self._stored.get((path, commit))) is None:
            tree = tree_sources.tree_at(self.folder / path, commit)
            tree_sources.require_files(self.folder / path, tree)
            ref = self._stored[path, commit] = trees.store_tree(self.objects, trees.encode(tree))
            self._last = (ref.key, tree)
        return ref

    def read(self, ref: Ref) -> trees.Tree:
        """Return a stored tree. Raises TreeError, and what the store raises."""
        if self._last[0] != ref.key:
            self._last = (ref.key, trees.decode(self.objects.get(ref)))
        return self._last[1]

    def known(self, ref: Ref) -> Ref:
        """Copy the referenced tree from the file's folder into the store if it is missing, and return the reference. Raises
        ValueError where neither has it."""
        from shared.objects.directory import DirectoryObjects

        for objects in (self.objects, DirectoryObjects(self.folder)):
            try:
                return trees.store_tree(self.objects, objects.get(ref))
            except (ObjectMissing, ObjectDamaged, ValueError):
                continue
        raise ValueError(
            f"found no object {ref.key!r:.100} beside the file; allowed: a path, or a pack's own trees/ there"
        )


def structs(kind: str) -> tuple[type[Problem], type[Hidden]]:
    """Return the public and the hidden struct of a kind. Raises UnknownKind."""
    if kind == "function":
        return FunctionProblem, FunctionHidden
    if kind == "repository":  # named here so that the environment is not imported
        return RepositoryProblem, RepositoryHidden
    environment: Any = registry.factory(kind)
    try:
        return environment.problem, environment.hidden
    except AttributeError as error:
        raise registry.UnknownKind(
            f"field 'kind': the environment of {kind!r} names no structs ({error}); allowed: a class with `problem` and `hidden`"
        ) from None


def parse(raw: dict[str, Any], attach: Callable[[], Attach] | None) -> tuple[Problem, Hidden]:
    """Return both parts of a line. Raises ValueError naming the field."""
    kind = raw["kind"]
    if not isinstance(kind, str):
        raise ValueError(f"field 'kind': found {kind!r:.60}; allowed: {', '.join(registry.kinds())}")
    public, secret = structs(kind)
    hidden = raw.get("hidden")
    if not isinstance(hidden, dict):
        fields = ", ".join(name for name in secret.__struct_fields__ if name not in _OWN)
        found = f"found {hidden!r:.60}" if "hidden" in raw else "is missing"
        raise ValueError(f"field 'hidden': {found}; allowed for kind {kind!r}: an object with {fields}")
    given = {name: value for name, value in raw.items() if name != "hidden"}
    for image in _IMAGES:
        if image in given and image not in public.__struct_fields__:
            way_out = f"the field {_IMAGE!r}" if _IMAGE in public.__struct_fields__ else "none: the kind has no image"
            raise ValueError(f"field {image!r}: found {given[image]!r:.60}; allowed: {way_out} (docs/problems.md)")
    _require_known(given, public, "", ("hidden",))
    _require_known(hidden, secret, "hidden.")
    problem = converted(_with_changes(_with_refs(given, public, attach), public, "", None, None), public)
    spread = _with_changes(hidden, secret, "hidden.", problem, attach)
    return problem, converted({**spread, "id": problem.id, "kind": kind}, secret, "hidden.")


def _require_known(raw: Mapping[str, Any], kind: type[msgspec.Struct], place: str, also: tuple[str, ...] = ()) -> None:
    """Raise ValueError for a field that nobody reads, here or in an object inside, and for a word that a field cannot have."""
    names = [name for name in kind.__struct_fields__ if not (place and name in _OWN)]
    if unknown := unknown_field(raw, [*names, *also], place):
        raise ValueError(unknown)
    for name, hint in _hints(kind).items():
        value = raw.get(name)
        if get_origin(hint) is Literal and name in raw and value not in get_args(hint):
            allowed = ", ".join(map(repr, get_args(hint)))
            raise ValueError(f"field {place + name!r}: found {value!r:.60}; allowed: {allowed}")
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct) and isinstance(value, dict) and hint is not Ref:
            _require_known(value, hint, f"{place}{name}.")
        if (inner := _listed(hint)) and isinstance(value, list):
            for number, one in enumerate(value):
                if isinstance(one, dict):
                    _require_known(one, inner, f"{place}{name}[{number}].")


@functools.cache
def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(kind)


def _with_refs(raw: dict[str, Any], kind: type[Problem], attach: Callable[[], Attach] | None) -> dict[str, Any]:
    done = dict(raw)
    required = {each.name for each in msgspec.structs.fields(kind) if each.required}
    for name, hint in _hints(kind).items():
        value = raw.get(name)
        if hint is not Ref or (name not in raw and name not in required):
            continue
        if not isinstance(value, str | dict):
            found = f"found {value!r:.60}" if name in raw else "is missing"
            raise ValueError(f"field {name!r}: {found}; allowed: {_A_TREE}")
        if attach is None:
            raise ValueError(f"field {name!r}: found {value!r:.60}; no tree can be stored here")
        try:
            if isinstance(value, str):
                done[name] = attach().tree(value, str(raw.get("commit") or ""))
            else:
                done[name] = attach().known(converted(value, Ref, f"{name}."))
        except trees.TreeError as error:
            raise ValueError(f"field {name!r}: found {value!r:.100}: {error}") from None
    return {name: msgspec.to_builtins(value) if isinstance(value, Ref) else value for name, value in done.items()}


def _listed(hint: Any) -> type[msgspec.Struct] | None:
    """Return the struct of a field that is a list of structs."""
    inner = get_args(hint)[0] if get_origin(hint) is list else None
    return inner if isinstance(inner, type) and issubclass(inner, msgspec.Struct) else None


def _with_changes(
    raw: Mapping[str, Any], kind: type[msgspec.Struct], place: str, problem: Any, attach: Callable[[], Attach] | None
) -> dict[str, Any]:
    """Return the object with each `dict[str, Change]` spread out. `place`: stands before its names of fields."""
    done = dict(raw)
    for name, hint in _hints(kind).items():
        value = raw.get(name)
        if (inner := _listed(hint)) and isinstance(value, list):
            done[name] = [
                _with_changes(one, inner, f"{place}{name}[{number}].", problem, attach)
                if isinstance(one, dict)
                else one
                for number, one in enumerate(value)
            ]
        if hint != dict[str, Change]:
            continue
        if isinstance(value, str):
            done[name] = msgspec.to_builtins(_of_diff(value, f"{place}{name}", problem, attach))
        elif isinstance(value, dict):
            done[name] = {path: _change(change) for path, change in value.items()}
    return done


def _change(value: Any) -> Any:
    if value is None:
        return {}
    return {"text": value} if isinstance(value, str) else value


def _of_diff(text: str, name: str, problem: Problem, attach: Callable[[], Attach] | None) -> dict[str, Change]:
    tree: Any = getattr(problem, "tree", None)
    if not isinstance(tree, Ref) or attach is None:
        raise ValueError(f"field {name!r}: found a text; allowed: an object from path to text")
    try:
        return patches.changes_of(attach().read(tree), text)
    except patches.PatchError as error:
        raise ValueError(f"field {name!r}: {error}") from None
