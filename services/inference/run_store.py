"""What the object store has of a run: its configuration, its base, its versions. Every call blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from services.inference.live import Bits, Live
from services.inference.published import bits_of
from shared.contracts.ids import policy_prefix
from shared.contracts.run import Ref, RunConfig
from shared.model import ModelConfig, load_checkpoint
from shared.objects import ObjectMissing, Objects
from shared.weights import WeightsError, checksum, lost, read_manifest, rebuild
from shared.weights.checkpoint_objects import download_directory

T = TypeVar("T")


class VersionDamaged(WeightsError):
    """What the store has of a published version is damaged or incomplete: no replica can build it from there."""


class StoreAway(Exception):
    """The object store does not answer, or fails: nothing is said of any version."""


async def from_store(call: Callable[..., T], *arguments: Any) -> T:
    """What a call makes of the store's answers, in a thread. Raises StoreAway."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except OSError as error:
        raise StoreAway(f"{type(error).__name__}: {error}") from None


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

    def version(self, run: str, serial: int) -> tuple[int, Ref | None] | None:
        """(serial, its manifest); manifest None: the base as it is. None: it is not there (yet)."""
        ref = self.manifest(run, serial)
        if serial == 0 and (ref is None or lost(self.objects, ref) is not None):
            return 0, None  # what the run began with, not published yet or deleted since: the base has it
        return None if ref is None else (serial, ref)

    def require(self, run: str, serial: int) -> None:
        """Raises WeightsError where the version cannot be built. What a run began with always can: the base has it."""
        if serial == 0:
            return
        ref = self.manifest(run, serial)
        if ref is None:
            raise WeightsError("it is not there")
        if (gone := lost(self.objects, ref)) is not None:
            raise WeightsError(f"it cannot be built: the weights of version {gone} are deleted")

    def rebuilt(
        self, live: Live, run: str, base: Path, serial: int, ref: Ref | None, from_base: bool
    ) -> tuple[Bits, str] | None:
        """A version's tensors and their checksum, from what is live or, `from_base`, from its full base; `ref` None: the base
        directory as it is. None: what is live is this version already. Raises VersionDamaged where the full base and what
        follows it do not give the version; WeightsError where what is live does not."""
        if ref is None:
            bits = bits_of(load_checkpoint(base))
            return bits, checksum(bits)
        try:
            return self._from_chain(live, run, serial, ref, from_base)
        except WeightsError as error:
            if from_base:
                raise VersionDamaged(str(error)) from error
            raise

    def _from_chain(self, live: Live, run: str, serial: int, ref: Ref, from_base: bool) -> tuple[Bits, str] | None:
        """See `rebuilt`."""
        manifest = read_manifest(self.objects, ref)
        if manifest.serial != serial or manifest.run != run:
            raise WeightsError(f"manifest {ref.key} is of run {manifest.run} serial {manifest.serial}, not {serial}")
        if live.serial == serial and checksum(live.bits) == manifest.checksum:
            return None
        usable = not from_base and live.serial != serial
        have = (live.serial, live.bits) if usable else None
        return rebuild(self.objects, ref, have), manifest.checksum
