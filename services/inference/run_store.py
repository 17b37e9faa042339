"""What the object store has of a run: its configuration, its base, its versions. Every call blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.contracts.ids import policy_prefix
from shared.contracts.run import Ref, RunConfig
from shared.model import ModelConfig
from shared.objects import ObjectMissing, Objects
from shared.weights import WeightsError, lost
from shared.weights.checkpoint_objects import download_directory


@dataclass(frozen=True, slots=True)
class RunStore:
    """`folder`: where bases are kept, by checksum."""

    objects: Objects
    folder: Path

    def config(self, ref: Ref) -> RunConfig:
        return msgspec.json.decode(self.objects.get(ref), type=RunConfig)

    def base(self, config: RunConfig) -> Path:
        folder = download_directory(self.objects, config.base, self.folder / config.base.checksum)
        ModelConfig.load(folder)  # a shape that nobody knows is found while the engine of another run still serves
        return folder

    def manifest(self, run: str, serial: int) -> Ref | None:
        """None: there is no such version."""
        try:
            return self.objects.head(f"{policy_prefix(run, serial)}/manifest.json")
        except ObjectMissing:
            return None

    def require(self, run: str, serial: int) -> None:
        """Raises WeightsError where the version cannot be built. What a run began with always can: the base has it."""
        if serial == 0:
            return
        ref = self.manifest(run, serial)
        if ref is None:
            raise WeightsError("it is not there")
        if (gone := lost(self.objects, ref)) is not None:
            raise WeightsError(f"it cannot be built: the weights of version {gone} are deleted")
