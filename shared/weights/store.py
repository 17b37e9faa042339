"""Versions in the object store: publish, read, apply, rebuild along the chain.

runs/<run>/policies/<serial>/manifest.json            written last, only if absent
runs/<run>/policies/<serial>/<incarnation>-<part>.bin  payload parts
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash
import zstandard

from shared.contracts.ids import policy_prefix
from shared.contracts.run import Ref
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.weights.codec import LEVEL, Encoding, Room, Undecodable, bits, decode, encode, unpack
from shared.weights.fetching import fetchers, payloads
from shared.weights.manifest import (
    NUMPY,
    ChainBroken,
    Manifest,
    SerialTaken,
    TensorEntry,
    Tensors,
    WeightsDamaged,
    WeightsError,
    combine,
    decode_manifest,
    dtype_name,
    tensor_checksum,
)

PART_BYTES = 256 << 20  # a part is held in memory as a whole by writer and reader
MAX_HEADER = 100 << 20  # as safetensors itself limits it


@dataclass(frozen=True, slots=True)
class Version:
    """A published version and its tensors: what a delta builds on."""

    serial: int
    manifest: Ref
    tensors: Tensors


def _parts_of(tensors: Tensors) -> Iterator[list[str]]:
    """Names, sorted, cut into parts of about PART_BYTES of raw tensor bytes; a larger tensor is a part by itself."""
    names: list[str] = []
    size = 0
    for name in sorted(tensors):
        if names and size + tensors[name].nbytes > PART_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensors[name].nbytes
    yield names


def _safetensors(tensors: Tensors, names: Sequence[str]) -> tuple[bytes, dict[str, int]]:
    """A safetensors file of these tensors and the offset of each in it. Written here because numpy has no bf16."""
    header: dict[str, object] = {}
    offset = 0
    for name in names:
        array = tensors[name]
        span = [offset, offset + array.nbytes]
        header[name] = {"dtype": dtype_name(name, array), "shape": list(array.shape), "data_offsets": span}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    data = b"".join([len(text).to_bytes(8, "little"), text, *(bits(tensors[name]).data for name in names)])
    starts = {name: start + header[name]["data_offsets"][0] for name in names}  # type: ignore[index]
    return data, starts


def _base_part(tensors: Tensors, names: Sequence[str], part: int) -> tuple[bytes, dict[str, TensorEntry]]:
    data, starts = _safetensors(tensors, names)
    entries = {
        name: TensorEntry(
            shape=list(tensors[name].shape),
            dtype=dtype_name(name, tensors[name]),
            part=part,
            start=starts[name],
            end=starts[name] + tensors[name].nbytes,
            encoding=Encoding.full,
            changed=tensors[name].size,
            checksum=tensor_checksum(tensors[name]),
        )
        for name in names
    }
    return zstandard.ZstdCompressor(level=LEVEL).compress(data), entries


def _delta_part(
    previous: Tensors, current: Tensors, names: Sequence[str], part: int
) -> tuple[bytes, dict[str, TensorEntry]]:
    chunks: list[bytes] = []
    entries: dict[str, TensorEntry] = {}
    offset = 0
    for name in names:
        array = current[name]
        encoding, data, changed = encode(previous[name], array)
        entries[name] = TensorEntry(
            shape=list(array.shape),
            dtype=dtype_name(name, array),
            part=part,
            start=offset,
            end=offset + len(data),
            encoding=encoding,
            changed=changed,
            checksum=tensor_checksum(array),
        )
        chunks.append(data)
        offset += len(data)
    return b"".join(chunks), entries


def _layout(tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (dtype_name(name, array), array.shape) for name, array in tensors.items()}


def publish(
    objects: Objects,
    run: str,
    serial: int,
    incarnation: int,
    step: int,
    previous: Version | None,
    current: Tensors,
    notes: dict[str, str] | None = None,
    *,
    again: bool = False,
) -> Ref:
    """Writes `current` as a delta of `previous`, or as a full base (previous None). Returns the manifest's reference.

    Durable when it returns. Raises SerialTaken if the serial has a manifest already; WeightsError if the tensors do not
    match the parent's names, shapes and dtypes (publish a base then). `again`: a try of this process failed on the way to
    the store or back, so that a manifest with these very bytes is its own.
    """
    if not current:
        raise WeightsError(f"serial {serial}: no tensors")
    if previous is not None and _layout(previous.tensors) != _layout(current):
        odd = sorted(set(_layout(previous.tensors).items()) ^ set(_layout(current).items()))[0][0]
        raise WeightsError(
            f"serial {serial}: tensor {odd!r} differs in shape or dtype from serial {previous.serial}: publish a base"
        )
    prefix = policy_prefix(run, serial)
    entries: dict[str, TensorEntry] = {}
    parts: list[Ref] = []
    for i, names in enumerate(_parts_of(current)):
        data, found = (
            _base_part(current, names, i) if previous is None else _delta_part(previous.tensors, current, names, i)
        )
        entries |= found
        parts.append(objects.put(f"{prefix}/{incarnation:04d}-{i:04d}.bin", data))
    manifest = Manifest(
        run=run,
        serial=serial,
        incarnation=incarnation,
        step=step,
        parent=-1 if previous is None else previous.serial,
        parent_manifest=None if previous is None else previous.manifest,
        parent_checksum="" if previous is None else read_manifest(objects, previous.manifest).checksum,
        checksum=combine({n: (e.dtype, e.shape, e.checksum) for n, e in entries.items()}),
        tensors=entries,
        parts=parts,
        notes=notes or {},
    )
    data = msgspec.json.encode(manifest)
    ref = objects.put_if_absent(f"{prefix}/manifest.json", data)
    if ref is None:
        there = objects.head(f"{prefix}/manifest.json")
        if not again or there.checksum != xxhash.xxh3_128_hexdigest(data):
            raise SerialTaken(f"run {run}: serial {serial} is published already")
        return there  # by us: the store had it, only its answer was lost
    return ref


def read_manifest(objects: Objects, ref: Ref) -> Manifest:
    """Raises ChainBroken if it is missing, WeightsDamaged if it is not what the reference names."""
    try:
        return decode_manifest(objects.get(ref))
    except ObjectMissing:
        raise ChainBroken(f"no manifest at {ref.key}") from None
    except ObjectDamaged as error:
        raise WeightsDamaged(f"manifest {ref.key}: {error}") from None


def read_payload(objects: Objects, manifest: Manifest) -> list[bytes]:
    """All parts of a version. Raises ChainBroken or WeightsDamaged."""
    with fetchers() as pool:
        return next(payloads(objects, [manifest], pool))


def _check_parts(manifest: Manifest, payload: Sequence[bytes]) -> None:
    if len(payload) != len(manifest.parts):
        raise WeightsDamaged(f"serial {manifest.serial}: {len(payload)} parts, expected {len(manifest.parts)}")
    for i, (data, ref) in enumerate(zip(payload, manifest.parts, strict=True)):
        if len(data) != ref.size or xxhash.xxh3_128_hexdigest(data) != ref.checksum:
            raise WeightsDamaged(f"serial {manifest.serial}: part {i} ({ref.key}) is not what the manifest names")


def _unpack_base_part(manifest: Manifest, part: int, data: bytes) -> bytes:
    size = max((e.end for e in manifest.tensors.values() if e.part == part), default=0)
    return unpack(data, size)


def apply(previous: Tensors | None, manifest: Manifest, payload: Sequence[bytes]) -> dict[str, np.ndarray]:
    """The version's tensors from its parent's (None for a base). Verifies every part and every resulting tensor first.

    `previous` is never changed. Raises WeightsDamaged or ChainBroken, naming the tensor.
    """
    where = f"serial {manifest.serial}"
    _check_parts(manifest, payload)
    if previous is None and not manifest.is_base:
        raise ChainBroken(f"{where}: a delta of serial {manifest.parent}, applied to nothing")
    if previous is not None and not manifest.is_base and previous.keys() != manifest.tensors.keys():
        odd = sorted(previous.keys() ^ manifest.tensors.keys())[0]
        raise ChainBroken(f"{where}: tensor {odd!r} is on one side only; parent is serial {manifest.parent}")
    try:
        sources = (
            [_unpack_base_part(manifest, i, d) for i, d in enumerate(payload)] if manifest.is_base else list(payload)
        )
    except Undecodable as error:
        raise WeightsDamaged(f"{where}: {error}") from None
    result: dict[str, np.ndarray] = {}
    room = Room()
    for name, entry in manifest.tensors.items():
        data = memoryview(sources[entry.part])[entry.start : entry.end]
        try:
            if manifest.is_base:
                array = np.frombuffer(data, NUMPY[entry.dtype]).reshape(entry.shape)
            else:
                assert previous is not None
                before = previous[name]
                if list(before.shape) != entry.shape or before.dtype != NUMPY[entry.dtype]:
                    raise ChainBroken(
                        f"{where}: tensor {name!r} is {before.dtype}{before.shape}, expected {entry.shape}"
                    )
                array = decode(before, entry.encoding, data, entry.changed, room)
        except ChainBroken:
            raise
        except ValueError as error:  # Undecodable, or bytes that do not fit the shape
            raise WeightsDamaged(f"{where}: tensor {name!r}: {error}") from None
        if tensor_checksum(array) != entry.checksum:
            if manifest.is_base:
                raise WeightsDamaged(f"{where}: tensor {name!r} has another checksum than its entry")
            raise ChainBroken(
                f"{where}: tensor {name!r} has another checksum: what was given is not serial {manifest.parent}"
            )
        result[name] = array
    return result


def rebuild(objects: Objects, target: Ref, have: tuple[int, Tensors] | None = None) -> dict[str, np.ndarray]:
    """The tensors of the version whose manifest is `target`, from `have` (serial, tensors) if the chain passes there,
    else from the nearest full base. Raises WeightsDamaged or ChainBroken; `have` is never changed."""
    chain = [read_manifest(objects, target)]
    if have is not None and have[0] == chain[0].serial:
        _check_same(chain[0], have[1])
        return dict(have[1])
    while not chain[-1].is_base and (have is None or chain[-1].parent != have[0]):
        parent = chain[-1].parent_manifest
        assert parent is not None  # decode_manifest refuses a delta without
        manifest = read_manifest(objects, parent)
        if manifest.serial != chain[-1].parent or manifest.checksum != chain[-1].parent_checksum:
            raise ChainBroken(f"serial {chain[-1].serial}: its parent is not what lies at {parent.key}")
        chain.append(manifest)
    tensors: Tensors | None = None if chain[-1].is_base else have[1]  # type: ignore[index]
    chain.reverse()
    with fetchers() as pool:
        for manifest, payload in zip(chain, payloads(objects, chain, pool), strict=True):
            tensors = apply(tensors, manifest, payload)
    assert tensors is not None
    return dict(tensors)


def _check_same(manifest: Manifest, tensors: Tensors) -> None:
    for name, entry in manifest.tensors.items():
        if name not in tensors or tensor_checksum(tensors[name]) != entry.checksum:
            raise ChainBroken(f"tensor {name!r}: what was given is not serial {manifest.serial}")


def lost(objects: Objects, target: Ref) -> int | None:
    """The version whose weights are not there any more, so that `target` cannot be built; None: everything is. Names are
    looked at, no payload is read. Raises WeightsError for a manifest that is missing or damaged."""
    while True:
        manifest = read_manifest(objects, target)
        there = set(objects.list(f"{policy_prefix(manifest.run, manifest.serial)}/"))
        if any(part.key not in there for part in manifest.parts):
            return manifest.serial
        if manifest.parent_manifest is None:
            return None
        target = manifest.parent_manifest


def highest_serial(objects: Objects, run: str) -> int:
    """Highest serial ever published in the run (that has a manifest); -1: none. The next publication takes one more."""
    root, end = f"runs/{run}/policies/", "/manifest.json"
    keys = (key.removeprefix(root) for key in objects.list(root) if key.endswith(end))
    return max((int(key.removesuffix(end)) for key in keys), default=-1)
