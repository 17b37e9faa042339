"""Source trees as folders: each is unpacked once per machine, below a service's cache, and copied from there.

Invariants:
- A folder in the cache is whole: it gets its name when the last file is written.
- Nobody writes into it afterwards. Attempts and gradings work on copies.
- A tree is hashed once per process while its map of files is kept.
- Trees that no process used for a week go when another is unpacked.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from shared.contracts.run import Ref
from shared.environments import InfrastructureError
from shared.environments.repository.inside import files
from shared.environments.repository.kept import Kept, sweep, used
from shared.environments.repository.trees import TreeError, unpack_tree
from shared.objects import Objects
from shared.scratch import scratch

Entries = dict[str, list[Any]]
"""path -> [kind, digest or target, executable, bytes], as `inside.files.entries` gives them."""


MOST_ENTRIES = 300_000  # of all maps that a process keeps, some 0.5 kB each; a large tree has 100_000


class Unpacked:
    """The trees of one process. Methods block: call them in a thread."""

    def __init__(self, objects: Objects | None, cache: Path) -> None:
        self._objects, self._cache = objects, cache.absolute() / "trees"
        self._locks: dict[Path, threading.Lock] = {}  # one for each tree: large ones hold up no others
        self._entries: Kept[Entries] = Kept(MOST_ENTRIES, len)

    def folder(self, tree: Ref) -> Path:
        """Return the folder that holds the tree. Raises InfrastructureError, OSError."""
        folder = self._cache / f"{tree.checksum}-{tree.size}"
        with self._locks.setdefault(folder, threading.Lock()):  # setdefault is atomic
            if not folder.is_dir():
                self._unpack(tree, folder)
            used(folder)
        return folder

    def _unpack(self, tree: Ref, folder: Path) -> None:
        if self._objects is None:
            raise InfrastructureError(f"tree {tree.key!r}: this service has no object store to read it from")
        try:
            data = self._objects.get(tree)
        except (KeyError, ValueError) as error:
            raise InfrastructureError(f"tree {tree.key!r}: {type(error).__name__}: {error}") from None
        sweep(self._cache)
        with scratch(self._cache, "unpacking-") as draft:
            try:
                unpack_tree(data, draft / "tree")
            except TreeError as error:
                raise InfrastructureError(f"tree {tree.key!r}: {error}") from None
            try:
                (draft / "tree").rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was first
                    raise

    def entries(self, tree: Ref) -> Entries:
        """Return the tree's files as the workspace's scan would see them. Raises InfrastructureError, OSError."""
        folder = self.folder(tree)
        return self._entries.get(folder, lambda: dict(files.entries(str(folder))))

    def texts(self, tree: Ref, paths: tuple[str, ...]) -> dict[str, str]:
        """Return the text of those paths that the tree has as regular files in UTF-8. Raises as `folder`."""
        folder, known, found = self.folder(tree), self.entries(tree), {}
        for path in paths:
            if known.get(path, ["none"])[0] == "file":
                try:
                    found[path] = (folder / path).read_bytes().decode()
                except UnicodeDecodeError:
                    continue
        return found
