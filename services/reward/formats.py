"""The tokenizers of runs, as a grader needs them to read what was said: the small files of each run's base checkpoint."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.contracts.run import RunConfig
from shared.objects import Objects
from shared.weights.checkpoint_objects import download_directory


class Formats:
    """Not thread-safe: one per grader. `folder`: where the files go, one folder for each base."""

    def __init__(self, objects: Objects, folder: Path) -> None:
        self._objects, self._folder = objects, folder
        self._known: dict[str, str] = {}

    def of(self, run: str) -> tuple[str, str]:
        """Return (folder, ""), or ("", why there is none). Never raises; a failure is not kept."""
        if run not in self._known:
            try:
                ref = self._objects.head(f"runs/{run}/config.json")
                base = msgspec.json.decode(self._objects.get(ref), type=RunConfig).base
                place = download_directory(self._objects, base, self._folder / base.checksum, weights=False)
            except Exception as error:  # no text is no reason to grade nothing
                return "", f"{type(error).__name__}: {error}"
            self._known[run] = str(place)
        return self._known[run], ""
