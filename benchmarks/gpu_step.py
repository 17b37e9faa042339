"""Measures the trainer's step on a CUDA device: speed, memory, the gradient against float32, equality of two runs, the FP8 kernel.

- mfu: loss, backward and optimiser of a random 1B-class model over sequences of 4,096 tokens. FLOPs are 6 x parameters x tokens and
  6 x layers x heads x head size x length x tokens for causal attention, over the device's dense bf16 peak. A tied embedding counts
  once, and what is computed twice counts once.
- cosine: of the gradient in bf16 with the gradient in float32 on the same weights; only bf16 uses FlexAttention and the fused
  kernels.
- equal: weights and AdamW's moments after two steps, of two runs.
- fp8: the experts' product with fused rounding beside the emulation.
- attention: tiles of FlexAttention's kernels, each timed alone; then mfu with the fastest, if they are others than the trainer's.

Without a CUDA device it says so; with --quick it then compares cosine and equality on the CPU, on a tiny model.

python -m benchmarks.gpu_step [--quick] [--json FILE] [--only mfu|cosine|equal|fp8|attention]
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

import numpy as np
import torch
import xxhash

from benchmarks.gpu_models import DENSE, MIXTURE, NARROW, QWEN, TINY, model, rollouts, routed
from benchmarks.records import Bench, record, write
from services.trainer import flex
from services.trainer.engine import Engine
from services.trainer.packing import TrainSequence
from services.trainer.replay_step import GradientOnly
from services.trainer.step import Trainer
from shared.contracts.run import TrainConfig
from shared.model import Transformer

PEAK = {"H100": 989.4e12, "H200": 989.4e12}  # dense bf16 of the SXM cards, NVIDIA's data sheet; FLOP/s
LENGTH = 4096
PARTS = ("mfu", "cosine", "equal", "fp8", "attention")
SECONDS = {"mfu": 150, "cosine": 90, "equal": 90, "fp8": 120, "attention": 200}  # at most


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {text}", flush=True)


BEGAN = time.perf_counter()


def attempt(part: str, run: Callable[[], None]) -> str | None:
    """Run a part for at most SECONDS[part]. Return the traceback if it failed."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"{part}: more than {SECONDS[part]} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS[part])
    failure = None
    try:
        run()
    except Exception:
        failure = traceback.format_exc()
        say(f"{part} FAILED\n{failure}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    gc.collect()
    torch.cuda.empty_cache()
    return failure


# Speed


def documents(vocabulary: int, number: int, length: int) -> list[TrainSequence]:
    """Random tokens, each a target."""
    rng = np.random.default_rng(0)
    sampled = np.arange(length + 1) > 0
    return [
        TrainSequence(
            group=i,
            tokens_T=rng.integers(0, vocabulary, length + 1),
            sampled_T=sampled,
            logprobs_T=np.zeros(length + 1, np.float32),
            versions_T=np.zeros(length + 1, np.int32),
            advantages_T=np.ones(length + 1, np.float32),
            temperature=1.0,
            experts_TLK=None,
        )
        for i in range(number)
    ]


def flops(policy: Transformer, tokens: int, length: int) -> float:
    shape = policy.config
    parameters = sum(p.numel() for p in policy.parameters())
    if not shape.tie_word_embeddings:
        parameters -= policy.embed_tokens.weight.numel()  # looked up, not multiplied
    pairs = shape.num_hidden_layers * shape.num_attention_heads * (shape.head_dim + shape.v_head_dim) / 2 * length
    return 6.0 * tokens * (parameters + pairs)


def mfu(bench: Bench) -> None:
    speed(bench, "gpu.mfu", DENSE, micro_batch=16384, sequences=bench.pick(32, 16))
    if not bench.quick:
        speed(bench, "gpu.mfu_qwen3", QWEN, micro_batch=8192, sequences=16)


def attention(bench: Bench) -> None:
    """Find the fastest options. They belong in flex.OPTIONS, if a step with them is faster than `mfu` found."""
    from benchmarks.gpu_attention import fastest

    committed = dict(flex.OPTIONS)
    for size, heads, groups, rows in ((64, 32, 8, 16384), (128, 16, 8, 8192)):
        torch.compiler.reset()
        flex.OPTIONS[size] = fastest(size, heads, groups, rows, LENGTH, milliseconds, say)
        say(f"  head {size}: fastest {flex.OPTIONS[size]}")
    try:
        for id, shape, micro_batch, sequences, size in (
            ("gpu.mfu.tuned", DENSE, 16384, 32, 64),
            ("gpu.mfu_qwen3.tuned", QWEN, 8192, 16, 128),
        ):
            if flex.OPTIONS[size] != committed.get(size, {}):
                speed(bench, id, shape, micro_batch=micro_batch, sequences=sequences)
    finally:
        flex.OPTIONS.clear()
        flex.OPTIONS.update(committed)


def speed(bench: Bench, id: str, shape: dict[str, object], *, micro_batch: int, sequences: int) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()  # one model's kernels are not to serve the widths of the next, as sizes that vary
    config = TrainConfig(
        mtp=False, router_replay=False, norm_tokens=1.0, micro_batch_tokens=micro_batch, learning_rate=1e-5
    )
    policy = model(shape, "cuda")
    size = sum(p.numel() for p in policy.parameters())
    say(f"{id}: {size / 1e9:.3f} B parameters, micro-batches of {micro_batch} tokens, {sequences} sequences a step")
    trainer = Trainer(Engine(policy, config, arithmetic=torch.bfloat16), config, supervised=True)
    batch = documents(policy.config.vocab_size, sequences, LENGTH)
    tokens = sequences * LENGTH
    number = 0

    def step(batch: list[TrainSequence]) -> tuple[float, dict[str, float]]:
        nonlocal number
        number += 1
        torch.cuda.synchronize()
        began = time.perf_counter()
        done = trainer.train(batch, len(batch) * LENGTH, number)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        say(f"  step {number}: {seconds:.3f} s, loss {done.metrics['loss']:.4f}, applied {done.applied}")
        return seconds, done.metrics

    for _ in range(2):
        step(batch[: 2 * micro_batch // LENGTH])  # compiles
    torch.cuda.reset_peak_memory_stats()
    timed = [step(batch) for _ in range(3)]
    name, peak = device_peak()
    work = flops(policy, tokens, LENGTH)
    shares = ", ".join(
        f"{key.removeprefix('seconds_')} {np.mean([m[key] for _, m in timed]):.3f} s"
        for key in timed[0][1]
        if key.startswith("seconds_")
    )
    say(f"  {shares}")
    memory = torch.cuda.max_memory_allocated() / 2**30
    what = f"{size / 1e9:.2f} B parameters, sequences of {LENGTH} tokens, on {name}"
    bench.add(
        record(id, f"FLOPs over the dense bf16 peak, {what}", [work / s / peak for s, _ in timed], "share", "0.40")
    )
    bench.add(record(f"{id}.tokens_per_s", f"trained tokens, {what}", [tokens / s for s, _ in timed], "tokens/s"))
    bench.add(record(f"{id}.memory", f"peak of allocated memory, {what}", [memory], "GiB"))
    say(
        f"  {id} = {[round(work / s / peak, 4) for s, _ in timed]}, {tokens / timed[-1][0]:.0f} tokens/s, {memory:.1f} GiB"
    )
    profile(lambda: step(batch[: 2 * micro_batch // LENGTH]))


def profile(run: Callable[[], object]) -> None:
    """Print the share of the device's time by kind of kernel, and the longest ones."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
    spent = {e.key: e.self_device_time_total for e in found.key_averages() if e.self_device_time_total > 0}
    whole = sum(spent.values())
    kinds = {
        "products": ("gemm", "nvjet", "cutlass", "xmma", "sm90_"),
        "attention": ("flex", "attention", "flash", "fmha"),
    }
    kinds |= {"optimiser": ("adam", "multi_tensor", "foreach"), "fused": ("triton_",), "norms": ("norm", "Norm")}
    shares = dict.fromkeys((*kinds, "other"), 0.0)
    for key, time_us in spent.items():
        kind = "attention" if any(w in key for w in kinds["attention"]) else None
        kind = kind or next((k for k, words in kinds.items() if any(w in key for w in words)), "other")
        shares[kind] += time_us / whole
    say("  device time: " + ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items()))
    for key, time_us in sorted(spent.items(), key=lambda item: -item[1])[:22]:
        print(f"    {time_us / whole:6.1%} {time_us / 1000:9.2f} ms  {key[:120]}", flush=True)


def device_peak() -> tuple[str, float]:
    name = torch.cuda.get_device_name()
    found = [peak for card, peak in PEAK.items() if card in name]
    if not found:
        raise ValueError(f"device: found {name}; its peak is known of {', '.join(PEAK)}")
    return name, found[0]


# Numbers


class Gradient(GradientOnly):
    """Keeps the gradient of the last step, in float32, by parameter."""

    kept: dict[str, torch.Tensor]

    def step(self, step: int, progress: float = 0.0) -> Any:
        named = self.model.named_parameters()
        self.kept = {n: p.grad.detach().float().clone() for n, p in named if p.grad is not None}
        return super().step(step, progress)


def gradient(policy: Transformer, batch: list[TrainSequence], config: TrainConfig, how: torch.dtype) -> dict[str, Any]:
    engine = Gradient(policy, config, how)
    done = Trainer(engine, config).train(batch, len(batch), 1)
    say(f"  {how}: loss {done.metrics['loss']:.6f}, norm {done.metrics['grad_norm']:.6f}")
    return engine.kept


def cosine(bench: Bench, device: str = "cuda") -> None:
    small = device == "cpu"
    mixture = ("gpu.gradient_cosine", TINY if small else MIXTURE)
    for id, shape in (mixture,) if small else (mixture, ("gpu.gradient_cosine.dense", NARROW)):
        policy = model(shape, device)
        experts = policy.config.num_moe_layers > 0
        config = TrainConfig(
            norm_tokens=100.0, micro_batch_tokens=512 if small else 8192, mtp=experts, router_replay=experts
        )
        batch = rollouts(policy.config, 2 if small else 6, 40 if small else 700, routed if experts else None)
        exact = gradient(policy, batch, config, torch.float32)
        found = gradient(policy, batch, config, torch.bfloat16)
        for part, of_mtp in (("", False), (".mtp", True)):
            names = [n for n in exact if n.startswith("mtp_layers.") == of_mtp]
            if not names:
                continue
            each = {n: alike([exact[n]], [found[n]]) for n in names}
            value = alike([exact[n] for n in names], [found[n] for n in names])
            worst = min(each, key=each.__getitem__)
            say(f"  {id}{part} = {value:.6f}; least of a tensor {each[worst]:.6f} ({worst})")
            what = f"gradient in bf16 and in float32, {'MoE, replay and MTP' if experts else 'dense'}, on {device}"
            bench.add(record(id + part, what, [value], "cosine", "0.999"))


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    def dot(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))

    return dot(one, other) / max(1e-300, (dot(one, one) * dot(other, other)) ** 0.5)


def equal(bench: Bench, device: str = "cuda") -> None:
    small = device == "cpu"

    def run() -> dict[str, torch.Tensor]:
        policy = model(TINY if small else MIXTURE, device)
        config = TrainConfig(norm_tokens=100.0, micro_batch_tokens=512 if small else 8192)
        trainer = Trainer(Engine(policy, config, arithmetic=torch.bfloat16), config)
        batch = rollouts(policy.config, 2 if small else 6, 40 if small else 700, routed)
        for number in (1, 2):
            done = trainer.train(batch, len(batch), number)
            assert done.applied
        return trainer.engine.state()  # type: ignore[attr-defined, no-any-return]

    one, other = run(), run()
    unlike = [name for name in one if not torch.equal(one[name], other[name])]
    digest = xxhash.xxh3_128()
    for name in sorted(one):
        digest.update(one[name].numpy().tobytes())
    say(f"  digest of the state {digest.hexdigest()}: another process on the same device must print it too")
    say(f"  {len(one)} tensors of masters and moments, {len(unlike)} differ: {unlike[:8]}")
    what = f"tensors (weights, means and squares of gradients) that two runs of two steps leave equal, MoE and MTP, on {device}"
    bench.add(record("gpu.bit_equal", what, [1 - len(unlike) / len(one)], "share", "1"))


# FP8


def fp8(bench: Bench) -> None:
    from shared.model import grouped_fp8
    from shared.model.fp8 import per_token
    from shared.model.moe import grouped_linear
    from shared.weights.low_precision import round_matrix

    torch.manual_seed(0)
    E, M, K, N = 64, 32768, 2048, 1536
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    weight = torch.stack([round_matrix(torch.randn(N, K, device="cuda"), "fp8") for _ in range(E)]).bfloat16()
    ends = torch.arange(1, E + 1, device="cuda", dtype=torch.int32) * (M // E)
    emulated = milliseconds(lambda: grouped_linear(per_token(x), weight, ends))
    unrounded = milliseconds(lambda: grouped_linear(x, weight, ends))
    exact = grouped_linear(per_token(x[:4096].float()), weight[:8].float(), ends[:8])
    say(f"  emulated {emulated:.3f} ms, plain bf16 product {unrounded:.3f} ms")
    times = {}
    for tile in ((64, 256, 8, 2), (64, 128, 8, 3), (64, 256, 8, 3), (128, 256, 8, 2), (32, 256, 8, 2), (64, 256, 4, 2)):
        try:
            grouped_fp8.TILES[torch.bfloat16] = tile
            times[tile] = milliseconds(lambda: grouped_fp8.grouped_linear_fp8(x, weight, ends))
            off = (grouped_fp8.grouped_linear_fp8(x[:4096], weight[:8], ends[:8]).float() - exact).abs().max()
            say(f"  tile {tile}: {times[tile]:.3f} ms, off by {float(off / exact.abs().max()):.2e} of the largest")
        except Exception as error:
            say(f"  tile {tile}: {type(error).__name__}: {str(error)[:200]}")
    best = min(times, key=times.__getitem__)
    what = f"time of the emulation over the kernel's, {E} experts, {M} rows of {K} to {N}, tile {best}"
    bench.add(record("gpu.fp8_grouped_ratio", what, [emulated / times[best]], "x", "1"))
    folder = Path(__file__).resolve().parents[1]
    test = "tests/unit/model/test_grouped_fp8.py"
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-k", "cuda", test]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    say(f"  {test}: exit {done.returncode}\n{done.stdout[-1500:]}{done.stderr[-500:]}")
    if done.returncode:
        raise RuntimeError(f"{test}: exit code {done.returncode}")


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats


def main() -> None:
    bench = Bench.start(__doc__, parts=PARTS)
    if not torch.cuda.is_available():
        say(
            "no CUDA device here"
            + ("; comparing numbers on the CPU" if bench.quick else "; --quick compares numbers on the CPU")
        )
        for part, check in (("cosine", cosine), ("equal", equal)) if bench.quick else ():
            if bench.wants(part):
                check(bench, "cpu")
        bench.end()
        return
    failed: list[str] = []
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for part, run in zip(PARTS, (mfu, cosine, equal, fp8, attention), strict=True):
        if bench.wants(part):
            say(part)
            if attempt(part, functools.partial(run, bench)):
                failed.append(part)
            if bench.json:
                write(bench.json, bench.records)
    bench.end()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
