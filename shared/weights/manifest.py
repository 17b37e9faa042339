"""The manifest of one published version: what it is, what it builds on, and where every tensor lies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import xxhash

from shared.contracts.run import Ref
from shared.weights.codec import Encoding, bits

FORMAT = "etude-weights-1"
Tensors = Mapping[str, np.ndarray]
DTYPES: dict[np.dtype[Any], str] = {np.dtype(np.uint16): "BF16", np.dtype(np.float32): "F32"}  # numpy -> safetensors
NUMPY: dict[str, np.dtype[Any]] = {name: dtype for dtype, name in DTYPES.items()}


class WeightsError(ValueError):
    """Weights cannot be published or rebuilt; the text names the version and the tensor."""


class WeightsDamaged(WeightsError):
    """Bytes in the object store are not those that were published."""


class ChainBroken(WeightsError):
    """A version on the way to a base is missing, or what the caller has is not the parent."""


class SerialTaken(WeightsError):
    """Somebody else has published this serial. A trainer that meets this has been superseded."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Where a tensor's bytes are and what the *resulting* tensor must hash to.

    `start`, `end`: byte range; of the stored part in a delta, of the unpacked safetensors part in a base.
    """

    shape: list[int]
    dtype: str  # BF16 | F32
    part: int
    start: int
    end: int
    encoding: Encoding
    changed: int  # elements that differ from the parent
    checksum: str  # xxh3-128 of the resulting tensor's little-endian bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`parent` -1: a full base. `parent_manifest` chains the checksums: a manifest vouches for all before it."""

    format: str = FORMAT
    run: str
    serial: int
    incarnation: int
    step: int
    parent: int
    parent_manifest: Ref | None
    parent_checksum: str  # `checksum` of the parent's tensors; "" for a base
    checksum: str  # of all tensors together, see `checksum()`
    tensors: dict[str, TensorEntry]
    parts: list[Ref]
    notes: dict[str, str] = {}

    @property
    def is_base(self) -> bool:
        return self.parent < 0

    @property
    def payload_bytes(self) -> int:
        return sum(part.size for part in self.parts)


def tensor_checksum(array: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(bits(array).data)


def dtype_name(name: str, array: np.ndarray) -> str:
    try:
        return DTYPES[array.dtype]
    except KeyError:
        raise WeightsError(f"tensor {name!r}: dtype {array.dtype}; allowed: uint16 (bf16 bits), float32") from None


def combine(parts: Mapping[str, tuple[str, list[int], str]]) -> str:
    """The whole's checksum from every tensor's (dtype, shape, checksum): xxh3-128 of one line each, sorted by name."""
    lines = (f"{name} {dtype} {shape} {digest}\n" for name, (dtype, shape, digest) in sorted(parts.items()))
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def checksum(tensors: Tensors) -> str:
    """One checksum for names, shapes, dtypes and bits of all tensors, in any order. 32 hex digits."""
    return combine({n: (dtype_name(n, a), list(a.shape), tensor_checksum(a)) for n, a in tensors.items()})


def decode_manifest(data: bytes) -> Manifest:
    """Raises WeightsDamaged where the bytes are no manifest, contradict themselves, or are of another format."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WeightsDamaged(f"not a weights manifest: {error}") from None
    where = f"manifest of serial {manifest.serial}"
    if manifest.format != FORMAT:
        raise WeightsDamaged(f"{where}: format {manifest.format!r}; this reader knows {FORMAT!r}")
    if not manifest.is_base and (manifest.parent >= manifest.serial or manifest.parent_manifest is None):
        raise WeightsDamaged(f"{where}: parent {manifest.parent} without a reference or not before it")
    for name, entry in manifest.tensors.items():
        if not (0 <= entry.part < len(manifest.parts) and 0 <= entry.start <= entry.end) or entry.dtype not in NUMPY:
            raise WeightsDamaged(f"{where}: tensor {name!r}: impossible entry {entry}")
    whole = combine({n: (e.dtype, e.shape, e.checksum) for n, e in manifest.tensors.items()})
    if whole != manifest.checksum:
        raise WeightsDamaged(f"{where}: its tensors hash to {whole}, it says {manifest.checksum}")
    return manifest
