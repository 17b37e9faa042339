"""Weight deltas: size and time of `shared.weights` against the whole bf16 safetensors file and against plain XOR + zstd-1.

The tensors are those of the shipped base policy (a random one of the same shape if it is absent) before and after real
AdamW steps on Python source, at the demo's learning rate and at one that large runs use.

python -m benchmarks.delta [--quick] [--json FILE]
"""

from __future__ import annotations

import inspect
import itertools
import textwrap
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import zstandard

from benchmarks.records import Bench, record
from shared.model import ModelConfig, Transformer, causal_rows, load_checkpoint, published_tensors
from shared.weights.codec import bits, decode, encode
from shared.weights.torch_tensors import to_bits

BASE = Path(__file__).parents[1] / "etude" / "data" / "base"
DEMO_SHAPE = {
    "model_type": "qwen3_moe", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 192, "norm_topk_prob": True, "tie_word_embeddings": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
Tensors = dict[str, np.ndarray]
ROWS, LENGTH = 16, 128


def start() -> Transformer:
    if (BASE / "model.safetensors").exists():
        return load_checkpoint(BASE)
    torch.manual_seed(0)
    return Transformer(ModelConfig.from_dict(DEMO_SHAPE))


def tokens(vocab: int) -> torch.Tensor:
    """Source of the standard library: by the base policy's tokenizer, or byte by byte."""
    text = "".join(inspect.getsource(module) for module in (inspect, textwrap))
    if (BASE / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        return torch.tensor(Tokenizer.from_file(str(BASE / "tokenizer.json")).encode(text).ids)
    return torch.tensor(list(text.encode())) % vocab


def adamw_steps(rate: float, steps: int) -> list[Tensors]:
    """The published bits after every step, the start first."""
    model = start()
    data = tokens(model.config.vocab_size)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    found = [to_bits(published_tensors(model))]
    rng = np.random.default_rng(0)
    positions = torch.arange(LENGTH).repeat(ROWS)
    attend = causal_rows(ROWS, LENGTH)
    for _ in range(steps):
        starts = rng.integers(0, len(data) - LENGTH - 1, ROWS)
        x = torch.cat([data[s : s + LENGTH] for s in starts])
        y = torch.cat([data[s + 1 : s + LENGTH + 1] for s in starts])
        optimiser.zero_grad()
        F.cross_entropy(model.logits(model(x, positions, attend).hidden_ND), y).backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimiser.step()
        found.append(to_bits(published_tensors(model)))
    return found


def delta(previous: Tensors, current: Tensors) -> dict[str, tuple]:
    return {name: encode(previous[name], current[name]) for name in current}


def plain_xor(previous: Tensors, current: Tensors) -> list[bytes]:
    compressor = zstandard.ZstdCompressor(level=1)
    return [compressor.compress((bits(previous[name]) ^ bits(current[name])).tobytes()) for name in current]


def milliseconds(function, *arguments) -> tuple[float, object]:  # type: ignore[no-untyped-def]
    began = time.perf_counter()
    result = function(*arguments)
    return (time.perf_counter() - began) * 1e3, result


def compare(bench: Bench, name: str, rate: float) -> None:
    versions = adamw_steps(rate, bench.pick(8, 3))
    pairs = list(itertools.pairwise(versions))[1:]  # Adam's first step moves every weight by the full rate
    whole = sum(a.nbytes for a in versions[0].values())
    sizes, writes, reads, xors, xor_writes, changed = [], [], [], [], [], []
    for previous, current in pairs:
        spent, coded = milliseconds(delta, previous, current)
        writes.append(spent)
        sizes.append(sum(len(data) for _, data, _ in coded.values()))
        changed.append(sum(count for *_, count in coded.values()) / (whole / 2))
        spent, back = milliseconds(lambda p=previous, c=coded: {n: decode(p[n], *c[n]) for n in c})
        reads.append(spent)
        assert all(np.array_equal(back[n], current[n]) for n in current)
        spent, plain = milliseconds(plain_xor, previous, current)
        xor_writes.append(spent)
        xors.append(sum(map(len, plain)))
    share = f"whole bf16 file {whole / 1e6:.2f} MB; plain XOR + zstd-1 {np.median(xors) / 1e6:.3f} MB"
    what = f"{{}}, lr {rate:g}, {np.median(changed):.0%} of the weights change"
    mine, full = what.format("delta"), [100 * s / whole for s in sizes]
    bench.add(record(f"delta.{name}.size", mine, [s / 1e6 for s in sizes], "MB", share))
    against = f"plain XOR + zstd-1 {100 * np.median(xors) / whole:.1f} %"
    bench.add(record(f"delta.{name}.share", what.format("delta / whole file"), full, "%", against))
    bench.add(
        record(f"delta.{name}.write", what.format("encode"), writes, "ms", f"plain XOR {np.median(xor_writes):.0f} ms")
    )
    bench.add(record(f"delta.{name}.read", what.format("apply"), reads, "ms", ""))


def main() -> None:
    bench = Bench.start(__doc__)
    torch.set_num_threads(1)
    compare(bench, "demo", 3e-4)
    compare(bench, "large", 1e-6)
    bench.end()


if __name__ == "__main__":
    main()
