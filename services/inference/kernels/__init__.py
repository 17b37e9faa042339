"""Compiled loops of the embedded engine: Numba, and where its loops keep nothing in registers, LLVM's own vectors.

    vectors     what the loops that are written in LLVM's language share
    matmul      products of a few rows with a matrix
    attention   one token's heads over its row of the cache
    pointwise   norms, exponentials, the router: plain loops
    layer       decoder layers, made of these

Invariants:
- float32 on a CPU, one thread, no interpreter lock held.
- Loops get addresses (int64) of memory that their callers keep alive, for a table of addresses crosses from Python at once where
  a hundred arrays would take longer than a small step. Nothing checks them: `services.inference.fused` alone fills the table.
- Machine code is kept from process to process under a name that has these sources' digest in it: Numba by itself looks at
  one file alone, and would run old code of the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from numba import config, njit


def _cache() -> str:
    """A folder that can be written: were it not, Numba would take another, without the digest in its name."""
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(here.glob("*.py")))).hexdigest()[:16]
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    homes = [Path(chosen)] if chosen else [here / "__pycache__", Path(os.path.expanduser("~")) / ".cache" / "etude"]
    for home in homes:
        folder = home / f"kernels-{digest}"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return str(folder)
    return tempfile.mkdtemp(prefix="etude-kernels-")  # of this process alone: code that another could write is not run


config.CACHE_DIR = _cache()
compiled = njit(fastmath=True, error_model="numpy", nogil=True, cache=True)
# Part of its callers, and compiled with them alone.
inlined = njit(fastmath=True, error_model="numpy", nogil=True, inline="always")
