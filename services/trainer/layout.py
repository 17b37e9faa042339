"""A micro-batch of units as flat tensors for `shared.model`, and the `attend` that knows who may look at whom.

Flat order, unit by unit: prefix, then every branch. No padding goes through the model; only the attention of a unit's
branches is padded, a few branches of similar length together. Shapes: N fed tokens, S predictions, B branches of a
bucket, C rows of its longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.trainer.packing import Unit
from shared.model import Attend

BUCKET = 4  # branches padded together, sorted by length by `packing`; 1 to 4 are equally fast on a CPU, 8 is slower


@dataclass(frozen=True, slots=True)
class Block:
    """A prefix of P tokens at flat index `start`, then branches of the given lengths (0 is allowed)."""

    start: int
    P: int
    branches: tuple[int, ...]


class _Reorder(torch.autograd.Function):
    """rows[take]; the gradient is grad[back], and zero for the rows `void`: two gathers instead of a gather and a
    scatter-add. Right where every other row is taken at the one place that `back` names, and what is taken besides
    (padding) gets no gradient of its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, take: Tensor, back: Tensor, void: Tensor | None) -> Tensor:
        ctx.save_for_backward(back, void)
        return rows.index_select(0, take)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back, void = ctx.saved_tensors
        result = grad.index_select(0, back)
        return result if void is None else result.index_fill_(0, void, 0.0), None, None, None


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Branches of one block, padded to C rows each: rows [B * C] of the padded layout. `prefix`: which prefix."""

    prefix: int
    B: int
    C: int
    mask: Tensor


def attend_shared(blocks: Sequence[Block], device: torch.device | str = "cpu") -> Attend:
    """Causal attention within every block; a branch sees its prefix and itself, never a sibling. Without blocks there are no rows.

    A branch without siblings needs no padding and no mask: with its prefix it is one causal block.

    The padded layout is: all prefixes, then all buckets. Padding repeats some real row; it stands behind every real row
    of its branch, so that causality hides it as a key, and as a query it is dropped.
    """
    if not blocks:
        return attend_nothing
    blocks = [Block(b.start, b.P + sum(b.branches), ()) if len(b.branches) == 1 else b for b in blocks]
    buckets: list[_Bucket] = []
    take = [np.arange(b.start, b.start + b.P) for b in blocks]  # padded row -> flat row
    N = sum(b.P + sum(b.branches) for b in blocks)
    padded = sum(b.P for b in blocks)
    back = np.zeros(N, np.int64)  # flat row -> padded row
    back[np.concatenate(take)] = np.arange(padded)
    for index, block in enumerate(blocks):
        at = block.start + block.P
        for first in range(0, len(block.branches), BUCKET):
            lengths = block.branches[first : first + BUCKET]
            C = max(lengths)
            if C == 0:
                continue
            buckets.append(_Bucket(index, len(lengths), C, _branch_mask(block.P, C, device)))
            for length in lengths:
                take.append(at + np.minimum(np.arange(C), max(length - 1, 0)) if length else np.full(C, block.start))
                back[at : at + length] = padded + np.arange(length)
                at += length
                padded += C
    take_M = torch.as_tensor(np.concatenate(take)).to(device)
    back_N = torch.as_tensor(back).to(device)
    real = np.zeros(len(take_M), bool)
    real[back] = True
    padding = torch.as_tensor(np.flatnonzero(~real)).to(device)
    sizes = [b.P for b in blocks] + [b.B * b.C for b in buckets]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        qs, ks, vs = (_Reorder.apply(x, take_M, back_N, None).split(sizes) for x in (q, k, v))
        U = len(blocks)
        outputs = [_prefix(*x) if len(x[0]) else x[0] for x in zip(qs[:U], ks[:U], vs[:U], strict=True)]
        for b, qb, kb, vb in zip(buckets, qs[U:], ks[U:], vs[U:], strict=True):
            outputs.append(_branches(b, qb, kb, vb, ks[b.prefix], vs[b.prefix]))
        return _Reorder.apply(torch.cat(outputs), back_N, take_M, padding)

    return attend


def attend_nothing(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of no rows at all: [0, heads, Dv]. It keeps the graph, so that all weights get a gradient, of zero."""
    return q[..., :1].expand(-1, -1, v.shape[-1]) + k.sum() + v.sum()


def _branch_mask(P: int, C: int, device: torch.device | str) -> Tensor:
    """[C, P + C]: the whole prefix, and of the branch what came before."""
    own = torch.ones(C, C, dtype=torch.bool, device=device).tril()
    return torch.cat((torch.ones(C, P, dtype=torch.bool, device=device), own), 1)


def _prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


def _branches(bucket: _Bucket, q: Tensor, k: Tensor, v: Tensor, kp: Tensor, vp: Tensor) -> Tensor:
    B, C = bucket.B, bucket.C
    q = q.view(B, C, *q.shape[1:]).transpose(1, 2)
    k, v = (
        torch.cat((p.expand(B, *p.shape), x.view(B, C, *x.shape[1:])), 1).transpose(1, 2) for p, x in ((kp, k), (vp, v))
    )
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask, scale=1.0, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one forward needs. `predict_S` are flat indices of the positions whose logits predict `target_S`."""

    tokens_N: Tensor
    positions_N: Tensor
    blocks: tuple[Block, ...]
    predict_S: Tensor
    target_S: Tensor
    sampled_logprobs_S: Tensor
    advantage_S: Tensor
    temperature_S: Tensor
    group_S: np.ndarray
    version_S: np.ndarray
    place_S: np.ndarray  # of each prediction, its place among those of the whole micro-batch
    lengths: tuple[int, ...]  # predictions of each sequence of the whole micro-batch, which lie one after the other
    units: tuple[Unit, ...]
    mtp: MtpBatch | None


@dataclass(frozen=True, slots=True)
class MtpBatch:
    """The MTP layer's own layout: position t reads h_t and x_{t+1}. The last position of a shared prefix has a different
    next token in every branch, so it is the first position of each branch here (M tokens in all).

    source_M: flat index of h_t; next_M: x_{t+1}. student_R (index into M) matches teacher_R (flat index of h_{t+1}),
    wherever position t + 1 predicts a sampled token.
    """

    source_M: Tensor
    next_M: Tensor
    positions_M: Tensor
    blocks: tuple[Block, ...]
    student_R: Tensor
    teacher_R: Tensor


def lay_out(units: Sequence[Unit], *, follow: Sequence[bool] = (), device: torch.device | str = "cpu") -> Batch:
    """`follow`: per unit, whether its tokens train the MTP layer; empty: none does. No units make a batch of no rows."""
    tokens, positions, blocks = [], [], []
    predict, rows = [], []  # rows: (sequence, target positions)
    N = 0
    for unit in units:
        P = unit.prefix
        tokens.append(unit.sequences[0].tokens_T[:P])
        positions.append(np.arange(P))
        lengths = tuple(len(s.tokens_T) - 1 - P for s in unit.sequences)
        blocks.append(Block(N, P, lengths))
        at = N + P
        for s, length in zip(unit.sequences, lengths, strict=True):
            tokens.append(s.tokens_T[P:-1])
            positions.append(np.arange(P, P + length))
            targets = np.flatnonzero(s.sampled_T)
            # Position t - 1 predicts t: in the branch, or the prefix's last position for t == P.
            predict.append(np.where(targets == P, N + P - 1, at + targets - 1 - P))
            rows.append((s, targets))
            at += length
        N = at

    def flat(arrays: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(_joined(arrays)).to(device=device, dtype=dtype)

    def each(value: float, targets: np.ndarray) -> np.ndarray:
        return np.full(len(targets), value, np.float32)

    return Batch(
        tokens_N=flat(tokens, torch.int64),
        positions_N=flat(positions, torch.int64),
        blocks=tuple(blocks),
        predict_S=flat(predict, torch.int64),
        target_S=flat([s.tokens_T[t] for s, t in rows], torch.int64),
        sampled_logprobs_S=flat([s.logprobs_T[t] for s, t in rows], torch.float32),
        advantage_S=flat([s.advantages_T[t] for s, t in rows], torch.float32),
        temperature_S=flat([each(s.temperature, t) for s, t in rows], torch.float32),
        group_S=_joined([np.full(len(t), s.group) for s, t in rows]),
        version_S=_joined([s.versions_T[t] for s, t in rows]),
        place_S=np.arange(sum(len(t) for _, t in rows)),
        lengths=tuple(len(t) for _, t in rows),
        units=tuple(units),
        mtp=_lay_out_mtp([x for x, f in zip(zip(units, blocks, strict=True), follow, strict=False) if f], device),
    )


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def _lay_out_mtp(units: Sequence[tuple[Unit, Block]], device: torch.device | str) -> MtpBatch | None:
    source, following, positions, mtp_blocks, student, teacher = [], [], [], [], [], []
    M = 0
    for unit, block in units:
        P = unit.prefix
        source.append(block.start + np.arange(P - 1))
        following.append(unit.sequences[0].tokens_T[1:P])
        positions.append(np.arange(P - 1))
        mtp_blocks.append(Block(M, P - 1, block.branches))
        if unit.sequences[0].context < P:  # a document: positions t = 0 .. P-2 of the prefix predict x_{t+2} too
            wanted = np.flatnonzero(unit.sequences[0].sampled_T[2 : P + 1])
            student.append(M + wanted)
            teacher.append(block.start + wanted + 1)
        at, branch_start = M + P - 1, block.start + P
        for s, length in zip(unit.sequences, block.branches, strict=True):
            # Branch positions t = P-1 .. T-3; h at P-1 is the prefix's last.
            steps = np.arange(P - 1, P - 1 + length)
            source.append(np.where(steps == P - 1, block.start + P - 1, branch_start + steps - P))
            following.append(s.tokens_T[P : P + length])
            positions.append(steps)
            # h_{t+1} stands in the branch; it counts where t + 2 was sampled.
            wanted = np.flatnonzero(s.sampled_T[P + 1 : P + 1 + length])
            student.append(at + wanted)
            teacher.append(branch_start + wanted)
            at += length
            branch_start += length
        M = at
    if not sum(len(x) for x in student):
        return None

    def flat(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.as_tensor(np.concatenate(arrays)).to(device=device, dtype=torch.int64)

    return MtpBatch(
        source_M=flat(source),
        next_M=flat(following),
        positions_M=flat(positions),
        blocks=tuple(mtp_blocks),
        student_R=flat(student),
        teacher_R=flat(teacher),
    )
