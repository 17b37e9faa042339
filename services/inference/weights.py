"""The live weights of a replica: two models of one shape, one that samples and one that the next version is built in.

A version is rebuilt, copied into the shadow and verified while the engine samples; the swap exchanges the two between
two steps, so the pause is that of exchanging a reference.
"""

from __future__ import annotations

import asyncio
import threading

from services.inference.engine import Engine
from services.inference.live import Bits
from services.inference.published import bits_of
from shared.model import ModelConfig, Transformer, published_tensors
from shared.weights import WeightsDamaged, checksum
from shared.weights.torch_tensors import from_bits


def write_bits(model: Transformer, bits: Bits) -> None:
    """Copies published tensors into the model. Raises WeightsDamaged where names or shapes differ from the model's."""
    targets = published_tensors(model)
    if targets.keys() != bits.keys():
        odd = sorted(targets.keys() ^ bits.keys())[0]
        raise WeightsDamaged(f"tensor {odd!r} is in the model or in the published version, but not in both")
    for name, source in from_bits(bits).items():
        if source.shape != targets[name].shape:
            raise WeightsDamaged(
                f"tensor {name!r}: published {tuple(source.shape)}, the model has {tuple(targets[name].shape)}"
            )
        targets[name].copy_(source)


def empty_model(config: ModelConfig) -> Transformer:
    """A model to write weights into."""
    return Transformer(config).eval().requires_grad_(False)


class LiveWeights:
    """What the engine samples with. Implements services.inference.live.Live."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.bits = bits_of(engine.model)  # of the serving version: what the next delta is applied to
        self._shadow = empty_model(engine.model.config)
        self._guard = threading.Lock()

    @property
    def serial(self) -> int:
        return self.engine.serial

    async def load(self, serial: int, bits: Bits, expected: str) -> float:
        """Raises WeightsDamaged where the copied weights do not hash to `expected`."""
        return await asyncio.to_thread(self._load, serial, bits, expected)

    async def checksum(self) -> tuple[int, str]:
        return await asyncio.to_thread(self._checksum)

    async def stop(self) -> None:
        await asyncio.to_thread(self.engine.stop)

    def _load(self, serial: int, bits: Bits, expected: str) -> float:
        with self._guard:
            write_bits(self._shadow, bits)
            found = checksum(bits_of(self._shadow))
            if found != expected:
                raise WeightsDamaged(f"serial {serial}: the engine's copy hashes to {found}, expected {expected}")
            serving = self.engine.model
            pause = self.engine.swap(self._shadow, serial).result()
            self._shadow, self.bits = serving, bits
            return pause

    def _checksum(self) -> tuple[int, str]:
        with self._guard:
            return self.engine.serial, checksum(bits_of(self.engine.model))
