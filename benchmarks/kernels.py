"""Products of a few rows with a matrix: the engine's compiled loops beside torch's BLAS, one thread, float32.

The matrices are those of a step of the base policy (an expert's two, the vocabulary's) and of a dense model of 30M parameters. Each
comes from a pool that no near cache holds (10 MiB, 100 MiB), as in a step, where every product has its own. Both are called
from Python; in a step the engine's are called from compiled code.

python -m benchmarks.kernels [--quick] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.records import Bench, record
from services.inference.kernels.matmul import SET, matmul

MIB = 1 << 20
SHAPES = (("base", 128, 384, 10), ("base", 192, 128, 10), ("base", 128, 2048, 10), ("30m", 512, 3072, 100))
ROWS = (1, 2, 8, 16, 32)


def once_through(multiply: Callable[[torch.Tensor], None], pool: list[torch.Tensor], times: int) -> float:
    """Seconds a product."""
    began = time.perf_counter()
    for _ in range(times):
        for w in pool:
            multiply(w)
    return (time.perf_counter() - began) / (times * len(pool))


def main() -> None:
    bench = Bench.start(__doc__)
    torch.set_num_threads(1)
    with torch.inference_mode():
        for model, K, N, mib in SHAPES:
            pool = [torch.randn(K, N) for _ in range(max(2, mib * MIB // (4 * K * N)))]
            for M in bench.pick(ROWS, (1, 16)):
                a, out = torch.randn(M, K), torch.empty(M, N)

                def ours(w: torch.Tensor, a: torch.Tensor = a, out: torch.Tensor = out) -> None:
                    (M, K), N = a.shape, w.shape[1]
                    matmul(a.data_ptr(), K, w.data_ptr(), N, out.data_ptr(), N, M, K, N, SET)

                def blas(w: torch.Tensor, a: torch.Tensor = a, out: torch.Tensor = out) -> None:
                    torch.mm(a, w, out=out)

                times = bench.pick(max(1, 400 // len(pool)), 1)
                ratios, rates = [], []
                for _ in range(1 + bench.pick(9, 3)):
                    mine, theirs = once_through(ours, pool, times), once_through(blas, pool, times)
                    ratios.append(theirs / mine)
                    rates.append(2 * M * K * N / mine / 1e9)
                what = f"{M} rows by [{K}, {N}], {model}"
                told = f"torch {torch.__version__}; {sorted(rates[1:])[len(rates) // 2]:.0f} GFLOP/s"
                bench.add(record(f"kernels.{model}.{K}x{N}.b{M}", f"ours / torch.mm, {what}", ratios[1:], "x", told))
    bench.end()


if __name__ == "__main__":
    main()
