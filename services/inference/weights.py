"""The live weights of a replica: two models of one shape, one that samples and one that the next version is built in.

A version is rebuilt, copied into the shadow and verified while the engine samples; the swap exchanges the two between
two steps, so the pause is that of exchanging a reference.
"""

from __future__ import annotations

import threading

import numpy as np

from services.inference.engine import Engine
from shared.model import ModelConfig, Transformer, published_tensors
from shared.model.checkpoint import KEPT_IN_FLOAT32
from shared.weights import WeightsDamaged, checksum
from shared.weights.torch_tensors import from_bits, to_bits

Bits = dict[str, np.ndarray]


def bits_of(model: Transformer) -> Bits:
    """The published form of a model's weights: bf16 bits, and float32 where a checkpoint keeps it."""
    tensors = published_tensors(model)
    return to_bits(tensors, keep_float32=frozenset(name for name in tensors if name.endswith(KEPT_IN_FLOAT32)))


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
    """What the engine samples with. Its methods block and may be called from any thread; one swap at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.bits = bits_of(engine.model)  # of the serving version: what the next delta is applied to
        self._shadow = empty_model(engine.model.config)
        self._guard = threading.Lock()

    @property
    def serial(self) -> int:
        return self.engine.serial

    def load(self, serial: int, bits: Bits, expected: str) -> float:
        """Returns when the engine samples with this version: the pause in seconds. Raises WeightsDamaged where the copied
        weights do not hash to `expected`; the engine then goes on with what it had."""
        with self._guard:
            write_bits(self._shadow, bits)
            found = checksum(bits_of(self._shadow))
            if found != expected:
                raise WeightsDamaged(f"serial {serial}: the engine's copy hashes to {found}, expected {expected}")
            serving = self.engine.model
            pause = self.engine.swap(self._shadow, serial).result()
            self._shadow, self.bits = serving, bits
            return pause

    def live_checksum(self) -> tuple[int, str]:
        """(serial, checksum) of the weights that sample, read from the model itself."""
        with self._guard:
            return self.engine.serial, checksum(bits_of(self.engine.model))
