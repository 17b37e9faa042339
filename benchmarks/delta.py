"""Weight deltas: size and speed of `shared.weights` against the formats that others publish.

Peers, each with zstd-1: XOR of the whole tensors; index and value of every changed element (6 bytes); the changed tensors whole.
Two kinds of change: real AdamW steps on Python source, of the demo's policy, of one of 30M parameters and of SmolLM2 where it is
here; and random masks of a stated share over 30M parameters. Processor seconds of one thread, checksums counted.

python -m benchmarks.delta [--quick] [--json FILE] [--only steps|masks]
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch
import zstandard

from benchmarks.policies import SMOLLM, THIRTY_MILLION, Tensors, adamw_steps, is_here, random_policy, tokens
from benchmarks.records import Bench, record
from shared.model import load_checkpoint, published_tensors
from shared.weights.codec import Encoding, Room, bits, decode, encode
from shared.weights.manifest import tensor_checksum
from shared.weights.torch_tensors import to_bits

T = TypeVar("T")
DENSITIES = (0.0002, 0.001, 0.01, 0.03, 0.05)
Delta = dict[
    str, tuple[Encoding, bytes, int, str]
]  # by tensor: encoding, data, changed elements, checksum of the result


def write(previous: Tensors, current: Tensors) -> Delta:
    return {name: (*encode(previous[name], array), tensor_checksum(array)) for name, array in current.items()}


def read(previous: Tensors, delta: Delta) -> Tensors:
    found, room = {}, Room()  # as `shared.weights.apply` does
    for name, (encoding, data, changed, checksum) in delta.items():
        found[name] = decode(previous[name], encoding, data, changed, room)
        assert tensor_checksum(found[name]) == checksum
    return found


def _compressed(data: bytes) -> int:
    return len(zstandard.ZstdCompressor(level=1).compress(data))


def peers(previous: Tensors, current: Tensors) -> dict[str, int]:
    """Return the bytes of each peer's delta."""
    sizes = {"XOR + zstd": 0, "index and value + zstd": 0, "changed tensors + zstd": 0}
    for name in current:
        before, after = bits(previous[name]), bits(current[name])
        changed = np.flatnonzero(before != after)
        sizes["XOR + zstd"] += _compressed((before ^ after).tobytes())
        pairs = changed.astype(np.uint32).tobytes() + after[changed].tobytes()
        sizes["index and value + zstd"] += _compressed(pairs)
        sizes["changed tensors + zstd"] += _compressed(after.tobytes()) if len(changed) else 0
    return sizes


def processor_seconds(call: Callable[[], T]) -> tuple[float, T]:
    began = time.process_time()
    result = call()
    return time.process_time() - began, result


class Case:
    """What one kind of change measures, pair by pair of versions."""

    def __init__(self) -> None:
        self.shares: list[float] = []  # of the elements that changed
        self.sizes: list[float] = []  # of the delta, as a share of the whole weights
        self.ratios: dict[str, list[float]] = {}  # our size / the peer's
        self.encode: list[float] = []  # GB of whole weights a processor second
        self.apply: list[float] = []

    def add(self, previous: Tensors, current: Tensors) -> None:
        whole = sum(a.nbytes for a in current.values())
        spent, delta = processor_seconds(lambda: write(previous, current))
        self.encode.append(whole / spent / 1e9)
        spent, back = processor_seconds(lambda: read(previous, delta))
        self.apply.append(whole / spent / 1e9)
        assert all(np.array_equal(back[name], current[name]) for name in current)
        size = sum(len(data) for _, data, *_ in delta.values())
        self.sizes.append(size / whole)
        self.shares.append(sum(changed for _, _, changed, _ in delta.values()) / sum(a.size for a in current.values()))
        for name, theirs in peers(previous, current).items():
            self.ratios.setdefault(name, []).append(size / theirs)

    def report(self, bench: Bench, suffix: str, what: str, rates_suffix: str = "") -> None:
        what = f"{what}, {np.median(self.shares):.2%} of the elements change"
        best = max(self.ratios, key=lambda name: float(np.median(self.ratios[name])))
        against = "; ".join(f"{name}: {np.median(found):.2f}" for name, found in self.ratios.items())
        bench.add(record(f"delta.size_vs_best_peer.{suffix}", what, self.ratios[best], "of its size", against))
        size = f"delta {100 * np.median(self.sizes):.2f} % of the whole weights"
        bench.add(record(f"delta.encode_gbps{rates_suffix}", f"encode, {what}", self.encode, "GB/s", size))
        bench.add(record(f"delta.apply_gbps{rates_suffix}", f"apply, {what}", self.apply, "GB/s", size))


def masks(bench: Bench) -> None:
    previous = to_bits(published_tensors(random_policy(THIRTY_MILLION)))
    for density in DENSITIES:
        case, rng = Case(), np.random.default_rng(0)
        for _ in range(bench.pick(5, 2)):
            case.add(previous, {name: masked(array, density, rng) for name, array in previous.items()})
        case.report(bench, f"{density:g}", "30M, random mask", f".mask.{density:g}")


def masked(array: np.ndarray, density: float, rng: np.random.Generator) -> np.ndarray:
    """Return the tensor with a random share of its elements one or two units in the last place larger or smaller."""
    flat = bits(array).copy()
    where = np.flatnonzero(rng.random(len(flat)) < density)
    flat[where] += rng.choice(np.array([1, 2, 65534, 65535], flat.dtype), len(where), p=[0.45, 0.05, 0.05, 0.45])
    return flat.view(array.dtype).reshape(array.shape)


def steps(bench: Bench) -> None:
    _steps(bench, "demo", 3e-4, adamw_steps(3e-4))
    for rate in (1e-6, 3e-6):
        _steps(bench, "30m", rate, adamw_steps(rate, random_policy(THIRTY_MILLION)))
        if is_here(SMOLLM) and not bench.quick:
            model = load_checkpoint(SMOLLM, dtype=torch.float32)
            _steps(bench, "smollm2", rate, adamw_steps(rate, model, tokens(model.config.vocab_size, SMOLLM)), pairs=3)


def _steps(bench: Bench, name: str, rate: float, versions: Iterator[Tensors], pairs: int = 6) -> None:
    case = Case()
    next(versions)  # Adam's first step moves every weight by the full rate
    for pair in itertools.pairwise(itertools.islice(versions, bench.pick(pairs, 2) + 1)):
        case.add(*pair)
    case.report(bench, f"{name}.lr{rate:g}", f"{name}, AdamW, lr {rate:g}", f".{name}.lr{rate:g}")


def main() -> None:
    bench = Bench.start(__doc__, parts=("steps", "masks"))
    torch.set_num_threads(1)
    if bench.wants("masks"):
        masks(bench)
    if bench.wants("steps"):
        steps(bench)
    bench.end()


if __name__ == "__main__":
    main()
