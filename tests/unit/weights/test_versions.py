"""Published versions: what is rebuilt is what was published, or an error that names the tensor."""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash
import zstandard

from shared import weights
from shared.contracts.ids import policy_prefix
from shared.contracts.run import Ref
from shared.objects import Objects, connect
from shared.weights import ChainBroken, SerialTaken, Version, WeightsDamaged, WeightsError
from shared.weights.manifest import decode_manifest
from shared.weights.torch_tensors import from_bits, to_bits

RUN = "r-test"


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return connect(f"file:{tmp_path / 'objects'}")


def start() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "layers.0.weight": rng.integers(0, 2**16, (32, 17), dtype=np.uint16),
        "layers.1.weight": rng.integers(0, 2**16, (400,), dtype=np.uint16),
        "router.bias": rng.normal(size=8).astype(np.float32),
    }


def nudge(tensors: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """The next step: a tenth of one matrix moves, all of the other, the rest stays."""
    rng = np.random.default_rng(seed)
    result = {name: array.copy() for name, array in tensors.items()}
    few = rng.random(result["layers.0.weight"].shape) < 0.1
    result["layers.0.weight"][few] += np.uint16(1)
    result["layers.1.weight"] += rng.integers(0, 3, 400).astype(np.uint16)
    return result


@dataclass
class Chain:
    """Serials 0 (base), 1, 2, 3."""

    objects: Objects
    tensors: list[dict[str, np.ndarray]]
    refs: list[Ref]


@pytest.fixture
def chain(objects: Objects) -> Chain:
    tensors = [start()]
    refs = [weights.publish(objects, RUN, 0, 0, 0, None, tensors[0])]
    for serial in (1, 2, 3):
        tensors.append(nudge(tensors[-1], serial))
        previous = Version(serial - 1, refs[-1], tensors[-2])
        refs.append(weights.publish(objects, RUN, serial, 0, serial, previous, tensors[-1]))
    return Chain(objects, tensors, refs)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and a[n].tobytes() == b[n].tobytes() for n in a)


def test_every_version_is_rebuilt_from_the_base(chain: Chain) -> None:
    for ref, expected in zip(chain.refs, chain.tensors, strict=True):
        assert same(weights.rebuild(chain.objects, ref), expected)
        assert weights.checksum(expected) == weights.read_manifest(chain.objects, ref).checksum


def test_rebuilding_starts_from_what_one_has_and_leaves_it_alone(chain: Chain) -> None:
    for name in list(chain.objects.list(policy_prefix(RUN, 0))):
        chain.objects.delete(name)  # the base is not needed any more
    have = {name: array.copy() for name, array in chain.tensors[1].items()}
    assert same(weights.rebuild(chain.objects, chain.refs[3], have=(1, have)), chain.tensors[3])
    assert same(have, chain.tensors[1])
    assert same(weights.rebuild(chain.objects, chain.refs[1], have=(1, have)), chain.tensors[1])


def test_a_base_is_a_safetensors_file_that_anyone_can_read(chain: Chain) -> None:
    manifest = weights.read_manifest(chain.objects, chain.refs[0])
    raw = zstandard.ZstdDecompressor().decompress(weights.read_payload(chain.objects, manifest)[0])
    read = safetensors.torch.load(raw)
    ours = from_bits(chain.tensors[0])
    assert read.keys() == ours.keys()
    assert read["layers.0.weight"].dtype == torch.bfloat16
    assert all(torch.equal(read[n].view(torch.uint8), ours[n].view(torch.uint8)) for n in ours)


def test_large_models_are_cut_into_parts(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.weights.store.PART_BYTES", 800)
    a, b = start(), nudge(start(), 1)
    base = weights.publish(objects, RUN, 0, 0, 0, None, a)
    delta = weights.publish(objects, RUN, 1, 0, 1, Version(0, base, a), b)
    assert len(weights.read_manifest(objects, delta).parts) == 3
    assert same(weights.rebuild(objects, delta), b)


class Together:
    """A store whose payloads come only once so many are asked for at a time."""

    def __init__(self, objects: Objects, count: int, limit_s: float = 30) -> None:
        self._objects, self._barrier = objects, threading.Barrier(count, timeout=limit_s)

    def get(self, ref: Ref) -> bytes:
        if ref.key.endswith(".bin"):
            self._barrier.wait()
        return self._objects.get(ref)


def test_parts_of_a_version_are_fetched_together_and_stand_in_their_order(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.weights.store.PART_BYTES", 64)
    tensors = {f"t{i}": np.full(32, i, np.uint16) for i in range(6)}
    ref = weights.publish(objects, RUN, 0, 0, 0, None, tensors)
    assert len(weights.read_manifest(objects, ref).parts) == 6
    assert same(weights.rebuild(Together(objects, 3), ref), tensors)  # type: ignore[arg-type]


def test_versions_on_the_way_are_fetched_together_unless_they_are_too_large(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert same(weights.rebuild(Together(chain.objects, 4), chain.refs[3]), chain.tensors[3])  # type: ignore[arg-type]
    monkeypatch.setattr("shared.weights.fetching.AHEAD_BYTES", 0)
    assert same(weights.rebuild(Together(chain.objects, 1), chain.refs[3]), chain.tensors[3])  # type: ignore[arg-type]
    waiting = Together(chain.objects, 2, limit_s=0.2)
    with pytest.raises(threading.BrokenBarrierError):
        weights.rebuild(waiting, chain.refs[3])  # type: ignore[arg-type]


def test_a_serial_is_published_once(chain: Chain) -> None:
    with pytest.raises(SerialTaken):
        weights.publish(chain.objects, RUN, 2, 1, 1, None, start())
    assert same(weights.rebuild(chain.objects, chain.refs[2]), chain.tensors[2])  # the loser's payload lies elsewhere
    assert weights.highest_serial(chain.objects, RUN) == 3
    assert weights.highest_serial(chain.objects, "r-other") == -1


def test_a_parent_of_another_shape_is_refused(chain: Chain) -> None:
    other = start() | {"layers.1.weight": np.zeros(3, np.uint16)}
    with pytest.raises(WeightsError, match=r"layers\.1\.weight"):
        weights.publish(chain.objects, RUN, 9, 0, 9, Version(3, chain.refs[3], chain.tensors[3]), other)


def test_a_wrong_parent_is_noticed_and_the_tensor_named(chain: Chain) -> None:
    manifest = weights.read_manifest(chain.objects, chain.refs[2])
    payload = weights.read_payload(chain.objects, manifest)
    with pytest.raises(ChainBroken, match=r"layers\.0\.weight"):
        weights.apply(chain.tensors[0], manifest, payload)
    unchanged = chain.tensors[1] | {"router.bias": np.zeros(8, np.float32)}  # even where the delta says "same"
    with pytest.raises(ChainBroken, match=r"router\.bias"):
        weights.apply(unchanged, manifest, payload)
    with pytest.raises(ChainBroken):
        weights.apply(None, manifest, payload)
    with pytest.raises(ChainBroken):
        weights.rebuild(chain.objects, chain.refs[3], have=(1, chain.tensors[0]))


@pytest.mark.parametrize("serial", [0, 1])
def test_every_flipped_byte_of_a_payload_is_detected(chain: Chain, serial: int) -> None:
    manifest = weights.read_manifest(chain.objects, chain.refs[serial])
    (payload,) = weights.read_payload(chain.objects, manifest)
    previous = chain.tensors[0]
    kept = {name: array.copy() for name, array in previous.items()}
    for position in range(len(payload)):
        damaged = bytearray(payload)
        damaged[position] ^= 0x40
        with pytest.raises(WeightsDamaged):
            weights.apply(previous if serial else None, manifest, [bytes(damaged)])
    with pytest.raises(WeightsDamaged):
        weights.apply(previous if serial else None, manifest, [payload[:-1]])
    with pytest.raises(WeightsDamaged):
        weights.apply(previous if serial else None, manifest, [])
    assert same(previous, kept)


def test_damage_behind_a_forged_part_checksum_is_still_detected_by_the_tensors(chain: Chain) -> None:
    """The parts' checksums and the tensors' are independent: either alone finds the damage."""
    manifest = weights.read_manifest(chain.objects, chain.refs[1])
    (payload,) = weights.read_payload(chain.objects, manifest)
    found = 0
    for position in range(0, len(payload), 3):
        damaged = bytearray(payload)
        damaged[position] ^= 0x01
        ref = msgspec.structs.replace(manifest.parts[0], checksum=xxhash.xxh3_128_hexdigest(bytes(damaged)))
        forged = msgspec.structs.replace(manifest, parts=[ref])
        result = None
        with contextlib.suppress(WeightsDamaged, ChainBroken):
            result = weights.apply(chain.tensors[0], forged, [bytes(damaged)])
        found += result is None
        # What gets through are bits of the zstd frame that mean nothing.
        assert result is None or same(result, chain.tensors[1])
    assert found > 0.9 * len(range(0, len(payload), 3))


def test_every_flipped_byte_of_a_manifest_is_detected(chain: Chain, tmp_path: Path) -> None:
    ref = chain.refs[1]
    data = chain.objects.get(ref)
    for position in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[position] ^= 0x02
        chain.objects.put(ref.key, bytes(damaged))
        with pytest.raises(WeightsError):
            weights.rebuild(chain.objects, ref)


def test_a_manifest_that_lies_about_a_tensor_is_refused_without_any_reference(chain: Chain) -> None:
    raw = json.loads(chain.objects.get(chain.refs[1]))
    raw["tensors"]["router.bias"]["shape"] = [4, 2]
    with pytest.raises(WeightsDamaged, match="hash"):
        decode_manifest(json.dumps(raw).encode())


def test_a_missing_version_breaks_the_chain(chain: Chain) -> None:
    chain.objects.delete(chain.refs[1].key)
    with pytest.raises(ChainBroken, match="00000001"):
        weights.rebuild(chain.objects, chain.refs[3])


def test_a_missing_payload_breaks_the_chain(chain: Chain) -> None:
    chain.objects.delete(weights.read_manifest(chain.objects, chain.refs[2]).parts[0].key)
    with pytest.raises(ChainBroken, match="serial 2"):
        weights.rebuild(chain.objects, chain.refs[3])


def test_whether_a_version_can_still_be_built_is_known_without_reading_its_weights(chain: Chain) -> None:
    assert [weights.lost(chain.objects, ref) for ref in chain.refs] == [None] * 4
    chain.objects.delete(weights.read_manifest(chain.objects, chain.refs[2]).parts[0].key)
    assert [weights.lost(chain.objects, ref) for ref in chain.refs] == [None, None, 2, 2]
    chain.objects.delete(chain.refs[1].key)
    with pytest.raises(ChainBroken, match="00000001"):
        weights.lost(chain.objects, chain.refs[1])


def test_a_swapped_parent_breaks_the_chain(chain: Chain) -> None:
    """Another manifest under the parent's key, whole in itself, is not what the child was built on."""
    manifest = weights.read_manifest(chain.objects, chain.refs[2])
    forged = msgspec.structs.replace(manifest, parent_manifest=chain.refs[0])
    ref = chain.objects.put(f"{policy_prefix(RUN, 2)}/manifest.json", msgspec.json.encode(forged))
    with pytest.raises(ChainBroken):
        weights.rebuild(chain.objects, ref)


def test_torch_bf16_comes_back_bit_for_bit_and_memory_is_not_shared() -> None:
    master = {"w": torch.randn(33, 7), "bias": torch.randn(5)}
    published = to_bits(master, keep_float32=frozenset({"bias"}))
    expected = master["w"].to(torch.bfloat16).clone()
    bias = master["bias"].clone()
    master["w"].add_(1)
    master["bias"].add_(1)
    back = from_bits(published)
    assert torch.equal(back["w"], expected)
    assert torch.equal(back["bias"], bias)
    assert (published["w"].dtype, published["bias"].dtype) == (np.uint16, np.float32)
