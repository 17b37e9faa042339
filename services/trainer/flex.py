"""Attention of a micro-batch's blocks by FlexAttention: one kernel for all units and branches, without padding, on CUDA.

A row of a branch sees two runs of keys: its unit's whole prefix, and its own branch up to itself. A row of a prefix sees that
prefix up to itself. The runs are known before the kernel starts; it skips tiles that no row sees and masks only tiles seen in
part. Its backward pass adds in a fixed order: two runs of the same steps are bit-equal (docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from services.trainer.layout import Block
from shared.model.fused import compiled

TILE = 128  # rows and keys
_CHUNK = 1 << 22  # numbers at a time, while tiles are counted

# Of the kernels, by the size of a query's head: what benchmarks.gpu_attention found fastest on an H200. Others: torch's own choice,
# which nothing that was tried beat for 128. Every row sees itself, so that its sum is never empty (ROWS_GUARANTEED_SAFE).
OPTIONS: dict[int, dict[str, Any]] = {
    64: {
        "ROWS_GUARANTEED_SAFE": True,
        **{"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3},
        **{"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 64},
        **{"bwd_num_warps": 8, "bwd_num_stages": 3},
    }
}

_flex: Any = compiled(flex_attention)


def seen(blocks: Sequence[Block], rows: np.ndarray) -> np.ndarray:
    """Return int32 [4, n], a column (a, b, c, d) for each of `rows`: the row sees the keys [a, b) and [c, d)."""
    N = sum(b.P + sum(b.branches) for b in blocks)
    runs = np.zeros((4, N), np.int32)
    runs[3] = np.arange(1, N + 1)
    for block in blocks:
        end = block.start + block.P
        runs[2, block.start : end] = block.start  # the prefix itself is one run
        for length in block.branches:
            branch = slice(end, end + length)
            runs[0, branch], runs[1, branch], runs[2, branch] = block.start, block.start + block.P, end
            end += length
    return runs[:, rows]


def tiles(runs: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """Return which tiles of keys [0, N) each tile of rows sees in part, and which wholly: two bool tensors [row tiles, key
    tiles], on the runs' device."""
    n = runs.shape[1]
    up = -(-n // TILE)
    first = torch.arange(0, N, TILE, device=runs.device, dtype=torch.int32)
    last = (first + TILE).clamp(max=N)
    rows = torch.full((up, 1), TILE, device=runs.device)
    rows[-1] = n - (up - 1) * TILE
    tiled = F.pad(runs, (0, up * TILE - n)).view(4, up, TILE, 1)  # rows that see nothing fill the last tile
    step = max(1, _CHUNK // (TILE * len(first)))
    sums = []
    for a, b, c, d in (tiled[:, at : at + step] for at in range(0, up, step)):
        prefix = (torch.minimum(b, last) - torch.maximum(a, first)).clamp(min=0)
        own = (torch.minimum(d, last) - torch.maximum(c, first)).clamp(min=0)
        sums.append((prefix + own).sum(1))
    seen_in = torch.cat(sums)
    whole = seen_in == rows * (last - first)
    return (seen_in > 0) & ~whole, whole


def block_mask(blocks: Sequence[Block], rows: np.ndarray, N: int, device: torch.device | str) -> BlockMask:
    """Return the mask of the flat rows over all N keys."""
    runs = torch.as_tensor(seen(blocks, rows)).to(device)
    a, b, c, d = runs.unbind()

    def mask(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return ((key >= a[row]) & (key < b[row])) | ((key >= c[row]) & (key < d[row]))

    (part, in_part), (whole, wholly) = map(_listed, tiles(runs, N))
    return BlockMask.from_kv_blocks(
        part, in_part, whole, wholly, BLOCK_SIZE=TILE, mask_mod=mask, seq_lengths=(len(rows), N)
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return per row of tiles how many are chosen, and which: those first, in order. Both int32."""
    order = chosen.int().argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """q [n, H, Dk], k [N, G, Dk], v [N, G, Dv] → [n, H, Dv]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out: Tensor = _flex(
        q, k, v, block_mask=mask, scale=1.0, enable_gqa=q.shape[1] != k.shape[1],
        # Not the kernel for decoding; this one's backward adds in a fixed order.
        kernel_options={"BACKEND": "TRITON"} | OPTIONS.get(q.shape[-1], {}),
    )  # fmt: skip
    return out[0].transpose(0, 1)
