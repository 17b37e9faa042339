"""Compiled loops of the embedded engine: Numba, and where its loops keep nothing in registers, LLVM's own vectors.

    vectors     what the loops that are written in LLVM's language share
    matmul      products of a few rows with a matrix
    attention   one token's heads over its row of the cache
    pointwise   norms, exponentials, the router: plain loops
    layer       decoder layers, made of these

Invariants:
- float32 on a CPU, one thread, no interpreter lock held. Nothing is allocated but in `layer`'s callers.
- Loops get addresses (int64) of memory that their callers keep alive, for a table of addresses crosses from Python at once where
  a hundred arrays would take longer than a small step. Nothing checks them: `services.inference.fused` alone fills the table.
- Machine code is kept from process to process under a name that has these sources' digest in it: Numba by itself looks at
  one file alone, and would run old code of the others.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from numba import config, njit


def _cache() -> str:
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(here.glob("*.py")))).hexdigest()[:16]
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    own = here / "__pycache__"
    if chosen is None and not os.access(own if own.exists() else here, os.W_OK):
        chosen = str(Path.home() / ".cache" / "etude")  # a folder of one's own: what lies there is run
    return str((Path(chosen) if chosen else own) / f"kernels-{digest}")


config.CACHE_DIR = _cache()
compiled = njit(fastmath=True, error_model="numpy", nogil=True, cache=True)
inlined = njit(
    fastmath=True, error_model="numpy", nogil=True, inline="always"
)  # part of its callers, compiled with them alone
