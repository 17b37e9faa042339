"""The bases that a service's sandboxes begin with: fetched and unpacked once, held until the service ends."""

from __future__ import annotations

import threading
from pathlib import Path

from shared.objects import Objects
from shared.sandbox.bases import cache as bases
from shared.sandbox.bases.store import PREFIX, BaseRefused


class Held:
    """`cache`: the folder of a service's machine that has `bases` in it. `most_bytes`: see `bases.unpacked`."""

    def __init__(self, objects: Objects | None, cache: Path, most_bytes: int = bases.MOST_BYTES) -> None:
        self._objects, self._cache, self._most = objects, cache, most_bytes
        self._roots: dict[str, Path] = {}  # by digest
        self._changing = threading.Lock()

    async def hold(self, image: str) -> str:
        """Hold a base, unpacked, and return it by its digest: `base:DIGEST`. Raises BaseRefused for one that no sandbox here can
        begin with, SandboxUnavailable."""
        root = await bases.unpacked(self._objects, self._cache, image, most_bytes=self._most)
        digest = root.parent.name
        with self._changing:
            if digest in self._roots:
                bases.release(root)  # one hold is enough
            self._roots[digest] = root
        return PREFIX + digest

    def folder(self, image: str) -> Path:
        """Return the folder of a base that is held. Raises BaseRefused (a ValueError)."""
        with self._changing:
            root = self._roots.get(image.removeprefix(PREFIX))
        if root is None:
            raise BaseRefused(
                f"image {image!r:.100}: this service does not hold it; hold it before a sandbox is opened"
            )
        return root

    def close(self) -> None:
        """Let go of all bases. Repeating it does nothing."""
        with self._changing:
            roots, self._roots = list(self._roots.values()), {}
        for root in roots:
            bases.release(root)
