"""The live weights of a replica: two models of one shape, one that samples and one that the next version is built in.

A version is rebuilt, copied into the shadow and verified while the engine samples; the swap exchanges the two between
two steps, so the pause is that of exchanging a reference.
"""

from __future__ import annotations

import asyncio
import threading

from services.inference.engine import Engine
from services.inference.live import Bits
from services.inference.published import Checksum
from shared.model import ModelConfig, Transformer, published_tensors
from shared.model.checkpoint import narrowed
from shared.model.fp8 import round_inputs, round_weights
from shared.weights import WeightsDamaged, checksum
from shared.weights.low_precision import in_format
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


def empty_like(model: Transformer) -> Transformer:
    """A model of the same shape, type and place to write weights into."""
    empty = narrowed(Transformer(model.config), model.embed_tokens.weight.dtype)
    return empty.to(model.embed_tokens.weight.device).eval().requires_grad_(False)


class LiveWeights:
    """What the engine samples with. Implements services.inference.live.Live."""

    def __init__(self, engine: Engine, bits: Bits) -> None:
        """`bits`: the published tensors that the engine's model was made of."""
        self.engine = engine
        self.bits = bits  # of the serving version: what the next delta is applied to
        self._format = engine.model.emulates
        self._shadow = empty_like(engine.model)
        if self._format:
            round_inputs(self._shadow, self._format)
        self._guard = threading.Lock()
        self._checksum_of = Checksum(engine.model)
        self._sampling = published_tensors(engine.model)

    @property
    def serial(self) -> int:
        return self.engine.serial

    @property
    def model(self) -> ModelConfig:
        return self.engine.model.config

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
            found = self._checksum_of(published_tensors(self._shadow))
            if found != expected:
                raise WeightsDamaged(f"serial {serial}: the engine's copy hashes to {found}, expected {expected}")
            if self._format:
                round_weights(self._shadow, self._format)
            serving = self.engine.model
            pause = self.engine.swap(self._shadow, serial).result()
            self._shadow, self.bits = serving, bits
            self._sampling = published_tensors(self.engine.model)  # after the swap, which may lay weights out anew
            return pause

    def _checksum(self) -> tuple[int, str]:
        with self._guard:
            serial, found = self.engine.serial, self._checksum_of(self._sampling)
            if self._format is None:
                return serial, found
            if found != checksum(in_format(self.bits, self._format)):
                raise WeightsDamaged(
                    f"serial {serial}: the engine's weights are not what {self._format} makes of the version"
                )
            return serial, checksum(self.bits)
