"""How fast the embedded engine decodes, beside what others use on a CPU: transformers' generate, llama.cpp and vLLM.

Two models, float32, one thread each: the shipped base policy (a mixture of experts, 1.4M parameters per token) and a dense one
of 30M parameters with random weights. Batches of 1, 8, 32 and 64: the same prompts, the same lengths, temperature 1, no
stop token; only sampled tokens count, and the time is that of the whole batch, prompts included. The decoders take turns in every
repeat, each in a process of its own. transformers is measured with its dynamic and its static cache, and the better one
counts.

Then speculation on the base policy, with the MTP layer that it ships with: one draft per step always, and gated (where that
is measured to pay), each in pairs with none, in one process, on Python source as prompts. `decode.mtp.worst` is the lowest lower
end of the 95 % interval of gated / none over the batches.

The matmul limit is what one thread of this machine reaches in a large float32 product: `decode.*.limit` is the share of
it that the model's own products (2 x parameters per token) are.

python -m benchmarks.decode [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.decoders import Batch, Took
from benchmarks.decoders.process import Decoder, Missing, decoder, environment
from benchmarks.policies import BASE, THIRTY_MILLION, random_policy
from benchmarks.records import Bench, record
from shared.model import ModelConfig, save_checkpoint
from shared.renderers.formats.compact_1 import Compact

BATCHES = (1, 8, 32, 64)
PROMPT, NEW = 32, 96
# Many, for a pair's ratio varies by a fifth and a hundredth is to be told: as many as take one to three minutes.
GATED_PAIRS = {1: 1600, 8: 800, 32: 400, 64: 200}
OURS, PEERS = "ours", ("llama_cpp", "vllm_cpu")
HF = ("hf_dynamic", "hf_static")

Rates = dict[tuple[str, int], list[float]]  # tokens/s by decoder and batch


def flops_per_token(config: ModelConfig) -> float:
    """Of the matrix products: 2 per parameter that a token meets. Attention's own are not counted."""
    D, Dk = config.hidden_size, config.head_dim
    heads = config.num_attention_heads + config.num_key_value_heads
    attention = D * Dk * heads + D * config.v_head_dim * heads
    dense = 3 * D * config.intermediate_size
    total = config.vocab_size * D + config.num_hidden_layers * attention
    for layer in range(config.num_hidden_layers):
        if config.moe and layer in config.moe_layers:
            total += 3 * D * config.moe.intermediate_size * config.num_experts_per_tok + D * config.moe.num_experts
        else:
            total += dense
    return 2.0 * total


def matmul_limit() -> float:
    """float32 operations a second of one thread in a large product, the best of several."""
    torch.set_num_threads(1)
    a, b, best = torch.randn(1024, 1024), torch.randn(1024, 1024), 0.0
    for _ in range(12):
        began = time.perf_counter()
        torch.mm(a, b)
        best = max(best, 2 * 1024**3 / (time.perf_counter() - began))
    return best


def prompts(vocabulary: int, batch: int) -> list[list[int]]:
    """Random tokens."""
    rng = np.random.default_rng(batch)
    return rng.integers(8, vocabulary, (batch, PROMPT)).tolist()


def source(batch: int) -> list[list[int]]:
    """Pieces of the standard library in the base policy's tokens."""
    tokens = Compact.load(BASE).encode(inspect.getsource(argparse))
    return [tokens[i * PROMPT : (i + 1) * PROMPT] for i in range(batch)]


def start(stack: ExitStack, checkpoint: Path, *, make: bool) -> dict[str, Decoder]:
    """Every decoder that runs here; why one does not goes to standard error. `make`: peers that have to be made first are."""
    running = {OURS: stack.enter_context(decoder("embedded", str(checkpoint)))}
    running["hf_dynamic"] = stack.enter_context(decoder("huggingface", str(checkpoint)))
    for name, module, own, more in (
        ("hf_static", "huggingface", False, ["static"]),
        *((peer, peer, True, []) for peer in PEERS),
    ):
        try:
            python = environment(module, make=make) if own else None
            running[name] = stack.enter_context(decoder(module, str(checkpoint), *more, python=python))
        except Missing as error:
            print(f"left out: {error}", file=sys.stderr)
    return running


def measure(bench: Bench, running: dict[str, Decoder], vocabulary: int) -> tuple[Rates, dict[tuple[str, int], Took]]:
    rates: Rates = defaultdict(list)
    last: dict[tuple[str, int], Took] = {}
    for batch in bench.pick(BATCHES, (1, 32)):
        task = Batch(prompts(vocabulary, batch), bench.pick(NEW, 32))
        for name in list(running):
            try:
                running[name].decode(task)  # warm
            except Missing as error:
                print(f"left out: {error}", file=sys.stderr)
                del running[name]
        for _ in range(bench.pick(5, 2)):
            for name, one in running.items():
                last[name, batch] = took = one.decode(task)
                rates[name, batch].append(took.tokens / took.seconds)
    return rates, last


def ratios(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def compare(bench: Bench, model: str, prefix: str, checkpoint: Path, limit: float) -> None:
    config = ModelConfig.load(checkpoint)
    with ExitStack() as stack:
        running = start(stack, checkpoint, make=not bench.quick)
        names = {key: one.name for key, one in running.items()}
        rates, last = measure(bench, running, config.vocab_size)
    for (name, batch), values in rates.items():
        took = last[name, batch]
        told = f"{took.memory_mib:.0f} MiB" + (f", first token {took.first_s * 1e3:.0f} ms" if took.first_s else "")
        what = f"{names[name]}; {model}, batch {batch}"
        bench.add(record(f"{prefix}.{name}.b{batch}", what, values, "tokens/s", told))
    for batch in sorted({batch for _, batch in rates}):
        ours = rates[OURS, batch]
        share = [x * flops_per_token(config) / limit for x in ours]
        bench.add(
            record(f"{prefix}.limit.b{batch}", f"ours / matmul limit, {model}, batch {batch}", share, "x",
                   f"{limit / 1e9:.0f} GFLOP/s, one thread")
        )  # fmt: skip
        best = max((rates[name, batch] for name in HF if (name, batch) in rates), key=statistics.median)
        wanted = {("decode", 32): "; wanted: at least 8", ("decode", 1): "; wanted: at least 2"}.get(
            (prefix, batch), ""
        )
        what, told = f"ours / transformers, {model}, batch {batch}", f"{statistics.median(best):.0f} tokens/s{wanted}"
        bench.add(record(f"{prefix}.vs_hf.b{batch}", what, ratios(ours, best), "x", told))
        if there := [name for name in PEERS if (name, batch) in rates]:
            name = max(there, key=lambda name: statistics.median(rates[name, batch]))
            peer = rates[name, batch]
            what = f"ours / the faster CPU peer of {len(there)}, {model}, batch {batch}"
            told = f"{names[name]}: {statistics.median(peer):.0f} tokens/s"
            bench.add(record(f"{prefix}.vs_cpu_peer.b{batch}", what, ratios(ours, peer), "x", told))


def speculation(bench: Bench) -> None:
    lowest = []
    with decoder("embedded", str(BASE), "1") as engine:
        for batch in bench.pick(BATCHES, (1, 32)):
            task, note = Batch(source(batch), NEW), ""

            def rate(way: str, task: Batch = task) -> float:
                nonlocal note
                took = engine.decode(replace(task, drafts=way))
                note = took.note if way == "always" else note
                return took.tokens / took.seconds

            for way in ("none", "always", "gated"):
                for _ in range(bench.pick(8, 4)):  # until the gate has made its first trials
                    rate(way)
            always = in_pairs(lambda: rate("always"), lambda: rate("none"), bench.pick(30, 4))
            wanted = "; wanted: at least 1.5" if batch == 1 else ""
            what = f"one MTP draft per step / none, base policy, batch {batch}"
            bench.add(record(f"decode.mtp.b{batch}", what, always, "x", note + wanted))
            gated = in_pairs(lambda: rate("gated"), lambda: rate("none"), bench.pick(GATED_PAIRS[batch], 8))
            low = lower_end(gated)
            lowest.append(low)
            what = f"gated / none, base policy, batch {batch}"
            bench.add(
                record(f"decode.mtp.gated.b{batch}", what, gated, "x", f"lower end of the 95 % interval {low:.3f}")
            )
    what = "gated / none: lowest lower end of a 95 % interval over the batches"
    bench.add(record("decode.mtp.worst", what, [min(lowest)], "x", "wanted: at least 0.97"))


def in_pairs(one: Callable[[], float], other: Callable[[], float], pairs: int) -> list[float]:
    """one / other, of two right after each other; each goes first as often. The machine's moments are short."""
    found = []
    for i in range(pairs):
        if i % 2:
            below = other()
            found.append(one() / below)
        else:
            above = one()
            found.append(above / other())
    return found


def lower_end(values: list[float]) -> float:
    """Of the 95 % interval of the geometric mean, by the bootstrap: the mean of a / b and of b / a would both be above 1."""
    rng = np.random.default_rng(0)
    means = rng.choice(np.log(values), (4000, len(values))).mean(1)
    return float(np.exp(np.quantile(means, 0.025)))


def main() -> None:
    bench = Bench.start(__doc__)
    limit = matmul_limit()
    speculation(bench)
    compare(bench, "base policy", "decode", BASE, limit)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(random_policy(THIRTY_MILLION), folder)
        compare(bench, "30M dense", "decode.30m", Path(folder), limit)
    bench.end()


if __name__ == "__main__":
    main()
