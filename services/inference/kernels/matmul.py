"""out[M, N] = a[M, K] @ w[K, N] (or +=), for the few rows that a decoding step has.

A tile of `out` stays in registers while K passes: up to ROWS rows of two vectors, or fewer rows of more. A BLAS packs both
operands first, which pays from hundreds of rows on. `python -m benchmarks.kernels` measures both: of two rows and more this is
1.3 to 2.6 times as fast as MKL, of one row 0.8 to 1.5 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from services.inference.kernels import compiled
from services.inference.kernels.vectors import AVX512, I64, SIZE, WIDTH, Emitter, Value

ROWS = 12 if AVX512 else 6  # two vectors of each, and what they are made of, fill 32 or 16 registers
# Of a tile of so many rows; more rows: two. Rows in several blocks must all have two, for they share their columns.
VECTORS = (0, 8, 8, 6, 4) if AVX512 else (0, 8, 6)
# Columns come in multiples of it.
WHOLE = 2 * WIDTH
# Rows of w at once: a tile's part of them is then at most 32 KiB (64 for few rows).
AT_ONCE_K = 256
# The same for up to 4 rows of a, and for up to ROWS, of a w from FAR bytes on, which no near cache holds: so many rows of w side by
# side are streams that the processor fetches ahead.
STREAMS = 8, 16
FAR = 1 << 20
# Rows of a that stay near while w passes.
AT_ONCE_M = 96

COLUMNS = np.array([WIDTH * (VECTORS[r] if r < len(VECTORS) else 2) for r in range(ROWS + 1)], np.int64)


def _tile(most: int, columns: Sequence[int]) -> Any:
    """tile(rows, a, lda, w, ldw, k, out, ldo, add): columns[rows] columns of up to `most` rows."""

    @intrinsic  # type: ignore[misc]
    def tile(typing, rows, a, lda, w, ldw, k, out, ldo, add):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            rows, *rest = arguments
            emit, end = Emitter(builder), builder.append_basic_block("end")
            choice = builder.switch(rows, end)
            for r in range(1, most + 1):
                block = builder.append_basic_block(f"rows_{r}")
                choice.add_case(I64(r), block)
                builder.position_at_end(block)
                _rows(emit, r, int(columns[r]) // WIDTH, *rest)
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return tile


def _rows(emit: Emitter, R: int, C: int, a: Value, lda: Value, w: Value, ldw: Value, k: Value, out: Value, ldo: Value,
          add: Value) -> None:  # fmt: skip
    """A tile of R rows and C vectors."""
    builder = emit.builder
    sums = [emit.variables(C) for _ in range(R)]
    rows = [emit.at(a, I64(r), lda) for r in range(R)]
    with cgutils.for_range(builder, k) as loop:
        row_of_w = emit.at(w, loop.index, ldw)
        columns = [emit.load(row_of_w, WIDTH * c) for c in range(C)]
        for line in range(0, WIDTH * C, 64 // SIZE):  # the next tile's
            emit.prefetch(row_of_w, WIDTH * C + line)
        for r in range(R):
            value = emit.spread(emit.at(rows[r], loop.index))
            for c in range(C):
                emit.add_product(sums[r][c], value, columns[c])
    added = builder.icmp_signed("!=", add, I64(0))
    for r in range(R):
        target = emit.at(out, I64(r), ldo)
        for c in range(C):
            total = builder.load(sums[r][c])
            with builder.if_else(added) as (yes, no):
                with yes:
                    emit.store(builder.fadd(total, emit.load(target, WIDTH * c)), target, WIDTH * c)
                with no:
                    emit.store(total, target, WIDTH * c)


SET, ADD = np.int64(0), np.int64(1)  # what `add` may be; a plain 0 would be a type of its own to Numba

_wide = _tile(ROWS, COLUMNS)
_rest = _tile(len(VECTORS) - 1, [WHOLE] * len(VECTORS))  # of the columns that a wide tile of few rows leaves


@compiled
def matmul(a, lda, w, ldw, out, ldo, M, K, N, add):  # type: ignore[no-untyped-def]
    """Addresses, and distances from row to row in float32; N a multiple of WHOLE. `add`: SET or ADD."""
    for m0 in range(0, M, AT_ONCE_M):
        height = min(AT_ONCE_M, M - m0)
        blocks = (height + ROWS - 1) // ROWS
        least, more = height // blocks, height % blocks  # rows of a block; so many have one more
        width = COLUMNS[height] if blocks == 1 else WHOLE
        at_once = AT_ONCE_K
        if blocks == 1 and SIZE * K * N > FAR:
            at_once = STREAMS[0] if height <= 4 else STREAMS[1]
        for k0 in range(0, K, at_once):
            k, plus = min(at_once, K - k0), 1 if add != 0 or k0 > 0 else 0
            n = 0
            while n < N:
                wide, m = n + width <= N, m0
                for block in range(blocks):
                    r = least + (1 if block < more else 0)
                    a_at, w_at, out_at = (
                        a + SIZE * (m * lda + k0),
                        w + SIZE * (k0 * ldw + n),
                        out + SIZE * (m * ldo + n),
                    )
                    if wide:
                        _wide(r, a_at, lda, w_at, ldw, k, out_at, ldo, plus)
                    else:
                        _rest(r, a_at, lda, w_at, ldw, k, out_at, ldo, plus)
                    m += r
                n += width if wide else WHOLE
