"""The versions that one incarnation of a run publishes, one after the other.

`copy` is all that needs the trainer: it takes the published bits out of the masters, into one of two sets of buffers. `publish`
puts them into the object store: the next step may compute meanwhile. One publication at a time: the second set of buffers still
holds the version that the delta builds on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import structlog
from torch import Tensor

from services.trainer import rollback
from services.trainer.checkpoints import Superseded
from services.trainer.masters import PublishedBits
from services.trainer.persistence import insist
from shared import weights
from shared.contracts.ids import policy_prefix
from shared.contracts.messages import PolicyPublished
from shared.contracts.run import Ref
from shared.objects import ObjectMissing, Objects

log = structlog.get_logger()


class Versions:
    """`incarnation`: the one that publishes. `base_every`: versions from one full base to the next. `check`: raises Superseded
    when a newer incarnation has the run; called before anything becomes visible."""

    def __init__(
        self, objects: Objects, run: str, incarnation: int, base_every: int, check: Callable[[], None]
    ) -> None:
        self._objects, self._run, self._incarnation = objects, run, incarnation
        self._base_every, self._check = base_every, check
        self._buffers = PublishedBits(), PublishedBits()
        self._positions: dict[int, tuple[int, int]] = {}
        self._last: weights.Version | None = None
        self._trained: Mapping[str, int] | None = None  # as `publish` was told for the last one
        self._base = self._since_base = 0

    @property
    def serial(self) -> int:
        """The version that was published last."""
        assert self._last is not None
        return self._last.serial

    def builds_on(self, serial: int) -> bool:
        """Whether the version is part of the chain that an engine must read to build the present one."""
        return self._base <= serial <= self.serial

    def copy(self, masters: Mapping[str, Tensor]) -> weights.Tensors:
        """Return the bits that the masters, by published name, round to. They stay as they are until the next `copy` but one."""
        self._buffers = self._buffers[1], self._buffers[0]
        return self._buffers[0].copy(masters)

    def publish(
        self, step: int, bits: weights.Tensors, trained: Mapping[str, int] | None = None, *, as_base: bool = False
    ) -> PolicyPublished:
        """Put a version into the object store; durable when it returns. `trained`: groups that its step trained, and how old they
        were; None: the version is no step's. Raises Superseded."""
        base = as_base or self._last is None or self._since_base + 1 >= self._base_every
        previous = None if base else self._last
        while True:
            self._check()
            serial = self.serial + 1 if self._last else weights.highest_serial(self._objects, self._run) + 1
            try:
                ref = self._put(serial, step, previous, bits, {} if trained is None else rollback.note(trained))
                break
            except weights.SerialTaken:
                # Only a process that has lost its claim takes a serial of ours after we looked, and only at our start.
                if self._last is not None:
                    raise Superseded(self._run, f"somebody else published serial {serial}") from None
            except (weights.ChainBroken, weights.WeightsDamaged) as error:
                if previous is None:
                    raise
                log.warning("parent_damaged", run=self._run, serial=serial, parent=previous.serial, error=str(error))
                base, previous = True, None  # nobody could build a delta of it
        self._base, self._since_base = (serial, 0) if base else (self._base, self._since_base + 1)
        self._trained = trained
        self._last = weights.Version(serial, ref, bits)
        self._positions[serial] = (self._incarnation, step)
        return PolicyPublished(
            run=self._run,
            serial=serial,
            incarnation=self._incarnation,
            step=step,
            parent=-1 if previous is None else previous.serial,
            manifest=ref,
        )

    def again(self, step: int) -> PolicyPublished:
        """Put the present version once more, as a full base under a new serial. Raises Superseded."""
        assert self._last is not None
        return self.publish(step, self._last.tensors, self._trained, as_base=True)

    def _put(
        self, serial: int, step: int, previous: weights.Version | None, bits: weights.Tensors, notes: dict[str, str]
    ) -> Ref:
        tries, place = itertools.count(), (self._incarnation, step)
        return insist(
            lambda: weights.publish(
                self._objects, self._run, serial, *place, previous, bits, notes, again=next(tries) > 0
            )
        )

    def manifest(self, serial: int) -> tuple[weights.Manifest, Ref] | None:
        """Return what lies under the serial; None: nothing that can be read."""

        def read() -> tuple[weights.Manifest, Ref]:
            ref = self._objects.head(f"{policy_prefix(self._run, serial)}/manifest.json")
            return weights.read_manifest(self._objects, ref), ref

        try:
            return insist(read)
        except (ObjectMissing, weights.WeightsError):
            return None

    def position(self, serial: int) -> tuple[int, int] | None:
        """Return (incarnation, step) of a version; None: no manifest of this run names it."""
        if serial not in self._positions:
            found = self.manifest(serial)
            if found is None:
                return None
            self._positions[serial] = (found[0].incarnation, found[0].step)
        return self._positions[serial]


def publication(manifest: weights.Manifest, ref: Ref) -> PolicyPublished:
    return PolicyPublished(
        run=manifest.run,
        serial=manifest.serial,
        incarnation=manifest.incarnation,
        step=manifest.step,
        parent=manifest.parent,
        manifest=ref,
    )
