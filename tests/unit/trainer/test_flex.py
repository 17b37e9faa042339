"""FlexAttention's mask of a micro-batch. On a CPU it computes densely; benchmarks.gpu_step runs the kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from services.trainer import flex
from services.trainer.layout import Block, attend_shared

BATCHES = {
    "branches": [Block(0, 200, (30, 0, 77)), Block(307, 5, (100,)), Block(412, 150, ())],
    "few rows": [Block(0, 1, (5, 3))],
    "one run": [Block(0, 700, ())],
}


@pytest.mark.parametrize("blocks", BATCHES.values(), ids=BATCHES.keys())
def test_every_row_sees_its_prefix_and_its_own_branch_whichever_rows_a_rank_has(blocks: list[Block]) -> None:
    torch.manual_seed(0)
    N = sum(b.P + sum(b.branches) for b in blocks)
    q, k, v = torch.randn(N, 4, 16) * 0.3, torch.randn(N, 2, 16), torch.randn(N, 2, 16)
    expected = attend_shared(blocks)(0, q, k, v)
    for rows in (np.arange(N), np.r_[0 : N // 4, 3 * N // 4 : N]):
        mask = flex.block_mask(blocks, rows, N, "cpu")
        found = flex_attention(
            *(x.transpose(0, 1)[None] for x in (q[rows], k, v)), block_mask=mask, scale=1.0, enable_gqa=True
        )
        torch.testing.assert_close(found[0].transpose(0, 1), expected[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("blocks", BATCHES.values(), ids=BATCHES.keys())
def test_tiles_are_left_out_masked_or_whole_as_their_rows_say(blocks: list[Block]) -> None:
    N = sum(b.P + sum(b.branches) for b in blocks)
    key = np.arange(N)
    for rows in (key, np.r_[0 : N // 4, 3 * N // 4 : N]):
        runs = flex.seen(blocks, rows)
        a, b, c, d = runs[..., None]
        seen = ((key >= a) & (key < b)) | ((key >= c) & (key < d))
        part, whole = (x.numpy() for x in flex.tiles(torch.as_tensor(runs), N))
        for up in range(part.shape[0]):
            for across in range(part.shape[1]):
                tile = seen[up * flex.TILE : (up + 1) * flex.TILE, across * flex.TILE : (across + 1) * flex.TILE]
                assert whole[up, across] == tile.all()
                assert part[up, across] == (tile.any() and not tile.all())
