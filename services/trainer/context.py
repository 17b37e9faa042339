"""Context parallelism: several ranks compute one micro-batch, each a part of its tokens.

The N flat rows of a micro-batch are cut into 2 x ranks chunks. Rank i computes chunks i and 2 x ranks - 1 - i, so that each has
early rows, which attend to little, and late ones, which attend to much. Every layer gathers keys and values of all rows; queries,
outputs and everything else stay with their rank. The gradient of a key is the sum of what all ranks return for it.

Every rank makes the same calls in the same order, whatever its own rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from services.trainer.layout import Batch, Block, MtpBatch, attend_nothing, attend_shared
from services.trainer.mesh import Mesh
from shared.model import Attend, Replay
from shared.model.fused import is_half_on_cuda

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


LEAST_HEAD = 16  # dimensions of a head that FlexAttention's kernel takes


def own_rows(N: int, rank: int, ranks: int) -> np.ndarray:
    """Return the flat rows of this rank, in order: [n] int64."""
    size = -(-N // (2 * ranks))
    chunks = (np.arange(i * size, min(N, (i + 1) * size)) for i in (rank, 2 * ranks - 1 - rank))
    return np.concatenate(list(chunks))


class Context:
    """The ranks that share a micro-batch, as one of them sees it. With one rank every method returns its input."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank, self.ranks = mesh.context_rank, mesh.context
        self._group: Any = None
        for ranks in mesh.context_groups if mesh.context > 1 else ():  # every rank makes all groups, in the same order
            group = dist.new_group(ranks)
            if mesh.rank in ranks:
                self._group = group

    def rows(self, N: int) -> np.ndarray:
        return own_rows(N, self.rank, self.ranks)

    def cut(self, batch: Batch) -> Batch:
        """Return this rank's tokens and predictions. `blocks`, `units` and `mtp` remain those of the whole."""
        if self.ranks == 1:
            return batch
        rows = self.rows(len(batch.tokens_N))
        mine, local = _local(batch.predict_S.cpu().numpy(), rows, len(batch.tokens_N))
        own, chosen = self._on(rows, batch), self._on(np.flatnonzero(mine), batch)
        return replace(
            batch,
            tokens_N=batch.tokens_N[own],
            positions_N=batch.positions_N[own],
            predict_S=self._on(local, batch),
            target_S=batch.target_S[chosen],
            sampled_logprobs_S=batch.sampled_logprobs_S[chosen],
            advantage_S=batch.advantage_S[chosen],
            temperature_S=batch.temperature_S[chosen],
            group_S=batch.group_S[mine],
            version_S=batch.version_S[mine],
            place_S=batch.place_S[mine],
        )

    def cut_mtp(self, mtp: MtpBatch) -> MtpBatch:
        """Return this rank's rows of the MTP layer. `source_M` and `teacher_R` remain indices of the whole (see `gather`)."""
        if self.ranks == 1:
            return mtp
        rows = self.rows(len(mtp.source_M))
        mine, local = _local(mtp.student_R.cpu().numpy(), rows, len(mtp.source_M))
        own = torch.as_tensor(rows, device=mtp.source_M.device)
        return replace(
            mtp,
            source_M=mtp.source_M[own],
            next_M=mtp.next_M[own],
            positions_M=mtp.positions_M[own],
            student_R=torch.as_tensor(local, device=own.device),
            teacher_R=mtp.teacher_R[torch.as_tensor(np.flatnonzero(mine), device=own.device)],
        )

    def cut_replay(self, recorded: Replay | None) -> Replay | None:
        if self.ranks == 1 or recorded is None:
            return recorded
        own = torch.as_tensor(self.rows(len(recorded.valid_N)), device=recorded.valid_N.device)
        return Replay(recorded.experts_NLK[own], recorded.valid_N[own], recorded.tau)

    def attend(self, blocks: Sequence[Block], device: torch.device) -> Attend:
        """Return what `layout.attend_shared` returns, for this rank's rows. In 16 bits on CUDA FlexAttention computes it."""
        if not blocks:
            return attend_nothing
        N = sum(block.P + sum(block.branches) for block in blocks)

        @cache
        def plain() -> Attend:
            return attend_shared(blocks, device) if self.ranks == 1 else self._attend_by_mask(blocks, device)

        @cache
        def mask() -> BlockMask:
            from services.trainer import flex

            return flex.block_mask(blocks, self.rows(N), N, device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not (is_half_on_cuda(q) and len(q) and min(q.shape[-1], v.shape[-1]) >= LEAST_HEAD):
                return plain()(layer, q, k, v)
            from services.trainer import flex

            return flex.attend(q, self.gather(k, N), self.gather(v, N), mask())

        return attend

    def _attend_by_mask(self, blocks: Sequence[Block], device: torch.device) -> Attend:
        N = sum(block.P + sum(block.branches) for block in blocks)
        mask = torch.as_tensor(_mask(blocks, self.rows(N), N)).to(device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = (self.gather(x, N).transpose(0, 1)[None] for x in (k, v))
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None], keys, values, attn_mask=mask, scale=1.0, enable_gqa=grouped
            )
            return out[0].transpose(0, 1)

        return attend

    def gather(self, x: Tensor, N: int) -> Tensor:
        """Return the rows [N, ...] of all ranks, in flat order, from this rank's [n, ...]. The gradient goes back to each."""
        return x if self.ranks == 1 else _Gather.apply(x, N, self.rank, self.ranks, self._group)

    def add_up(self, counts: Tensor) -> Tensor:
        """Return the sum over the ranks that share a micro-batch, in place; without a gradient."""
        if self.ranks > 1:
            dist.all_reduce(counts, group=self._group)
        return counts

    def union(self, found: set[int]) -> set[int]:
        """Return what any rank of these found."""
        if self.ranks == 1:
            return found
        all_of_them: list[set[int]] = [set()] * self.ranks
        dist.all_gather_object(all_of_them, found, group=self._group)
        return set().union(*all_of_them)

    @staticmethod
    def _on(index: np.ndarray, batch: Batch) -> Tensor:
        return torch.as_tensor(index, device=batch.tokens_N.device)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, N: int, rank: int, ranks: int, group: Any) -> Tensor:
        rows = [own_rows(N, r, ranks) for r in range(ranks)]
        most = max(map(len, rows))
        padded = x.new_zeros(most, *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded.contiguous(), group=group)
        full = x.new_empty(N, *x.shape[1:])
        for part, index in zip(parts, rows, strict=True):
            full[torch.as_tensor(index, device=x.device)] = part[: len(index)]
        ctx.own, ctx.group = torch.as_tensor(rows[rank], device=x.device), group
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.own], None, None, None, None


def _local(index: np.ndarray, rows: np.ndarray, N: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the flat indices lie in `rows` (bool), and for those their places in `rows`."""
    place = np.full(N, -1)
    place[rows] = np.arange(len(rows))
    found = place[index]
    return found >= 0, found[found >= 0]


def _mask(blocks: Sequence[Block], rows: np.ndarray, N: int) -> np.ndarray:
    """Return which keys each of the rows sees: [n, N] bool. A branch sees its prefix and what came before in itself."""
    unit, branch = np.zeros(N, np.int64), np.full(N, -1)
    for number, block in enumerate(blocks):
        at = block.start + block.P
        unit[block.start : at + sum(block.branches)] = number
        for index, length in enumerate(block.branches):
            branch[at : at + length] = index
            at += length
    same = unit[rows, None] == unit
    seen = (branch == -1) | (branch[rows, None] == branch)
    return same & seen & (np.arange(N) <= rows[:, None])
