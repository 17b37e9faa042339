"""The loss on held-out data. A codebase is one long text: its files follow one another, and a window rolls over them, so that
each token is predicted once, from up to `window` tokens before it (docs/recipe.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from services.trainer import loss
from services.trainer.context import Context
from services.trainer.layout import lay_out
from services.trainer.mesh import Mesh
from services.trainer.packing import TrainSequence, Unit, whole
from services.trainer.phases.data import supervised
from services.trainer.phases.shards import Shards
from shared.model import Transformer, published


@dataclass(frozen=True, slots=True)
class Loss:
    """`nats`: summed over `tokens` predictions. `text_bytes`: of the text that they spell; 0: not known."""

    nats: float
    tokens: int
    text_bytes: float = 0.0

    @property
    def per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / self.text_bytes / 0.6931471805599453 if self.text_bytes else None

    @property
    def figures(self) -> dict[str, float | None]:
        """Return what files say of it."""
        return {"nats_per_token": self.per_token, "tokens": self.tokens, "bits_per_byte": self.bits_per_byte}


def measured(shards: Shards, most: int) -> int:
    """Return how many tokens of a codebase are measured. `most`: first tokens alone; 0: all."""
    return min(shards.manifest.tokens, most or shards.manifest.tokens)


def windows(shards: Shards, window: int, stride: int, most: int = 0) -> Iterator[TrainSequence]:
    """Yield the windows of a codebase; in each, the tokens that it predicts first have weight 1. `most`: first tokens alone;
    0: all."""
    total = measured(shards, most)
    done = 1  # the first token is predicted by nothing
    while done < total:
        end = min(total, done + stride if done > 1 else window + 1)
        start = max(0, end - window - 1)
        tokens = shards.tokens(start, end)
        weight = np.zeros(len(tokens), np.float32)
        weight[done - start :] = 1.0
        yield supervised(tokens, weight)
        done = end


def count(tokens: int, window: int, stride: int) -> int:
    """Return how many windows cover so many tokens."""
    return 1 + max(0, -(-(tokens - window - 1) // stride)) if tokens > 1 else 0


@torch.no_grad()
def measure(
    model: Transformer,
    sequences: Iterable[TrainSequence],
    micro_batch_tokens: int,
    tell: Callable[[int], None] = lambda sequences: None,
    arithmetic: torch.dtype = torch.float32,
) -> tuple[float, int]:
    """Return (nats, predictions) over all sequences, on the weights that are published (bf16). `tell` hears how many sequences are
    done."""
    device = next(model.parameters()).device
    nats, count = 0.0, 0
    context = Context(Mesh())
    with published(model, arithmetic):
        for units in _grouped(sequences, micro_batch_tokens):
            batch = lay_out(units, device=device)
            out = model(batch.tokens_N, batch.positions_N, context.attend(batch.blocks, device))
            hidden_SD = out.hidden_ND.index_select(0, batch.predict_S)
            logprobs, _ = loss.token_logprobs(hidden_SD, model.head(), batch.target_S, batch.temperature_S)
            nats -= float(logprobs.double().sum())
            count += len(logprobs)
            tell(len(units))
    return nats, count


def _grouped(sequences: Iterable[TrainSequence], most: int) -> Iterator[list[Unit]]:
    waiting: list[TrainSequence] = []
    room = most
    for sequence in sequences:
        fed = len(sequence.tokens_T) - 1
        if waiting and fed > room:
            yield whole(waiting)
            waiting, room = [], most
        waiting.append(sequence)
        room -= fed
    if waiting:
        yield whole(waiting)


def codebase(
    model: Transformer,
    shards: Shards,
    *,
    window: int,
    stride: int,
    most: int,
    micro_batch_tokens: int,
    tell: Callable[[int], None] = lambda sequences: None,
    arithmetic: torch.dtype = torch.float32,
) -> Loss:
    """Return the loss over a codebase, by a rolling window."""
    nats, tokens = measure(model, windows(shards, window, stride, most), micro_batch_tokens, tell, arithmetic)
    # Of a part of a codebase, its bytes are taken to be that part of all bytes.
    part = (tokens + 1) / shards.manifest.tokens
    return Loss(nats, tokens, shards.manifest.text_bytes * part)
