"""Weights between the trainer and the engines: a checksummed, bit-exact chain of versions in the object store.

Owns: the codec (previous, current) -> delta and back, the manifest of a version, the walk along the chain, and how a
Hugging Face directory lies in the object store. Byte by byte: docs/weights.md.

Tensors are `dict[str, numpy.ndarray]` under published Hugging Face names; bf16 is held as uint16 (its bits), so that
nothing here needs torch (`torch_tensors` converts). A float32 tensor is allowed where a checkpoint keeps one.

Invariants:
- What `apply` or `rebuild` returns is, bit for bit, what was published, or they raise: never something in between.
- They never change what they were given; an unchanged tensor of the result may be the same array as in the input.
- A serial is published once. The manifest is written last and only if absent: whoever comes second fails.
"""

from shared.weights.manifest import (
    ChainBroken,
    Manifest,
    SerialTaken,
    TensorEntry,
    Tensors,
    WeightsDamaged,
    WeightsError,
    checksum,
)
from shared.weights.store import Version, apply, highest_serial, lost, publish, read_manifest, read_payload, rebuild

__all__ = [
    "ChainBroken",
    "Manifest",
    "SerialTaken",
    "TensorEntry",
    "Tensors",
    "Version",
    "WeightsDamaged",
    "WeightsError",
    "apply",
    "checksum",
    "highest_serial",
    "lost",
    "publish",
    "read_manifest",
    "read_payload",
    "rebuild",
]
