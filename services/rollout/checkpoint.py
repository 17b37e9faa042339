"""A rollout checkpoint: an attempt between two turns, as data, from which another worker continues. Pure.

Format, version 1: zstd(msgpack). A checkpoint names the parts of its journal (`recorder.Entry`, each part written once, with
what was recorded since the part before), and holds the rest: the agent's counters, the conversation with the engines and the
workspace's saved state. Replayed, the journal gives the recorder that it was taken from, id for id and row for row.

Example: an attempt of three turns, a checkpoint after each:

    runs/R/attempts/A/0/checkpoint/part-000001-….zst     turn 1
    runs/R/attempts/A/0/checkpoint/part-000002-….zst     turn 2
    runs/R/attempts/A/0/checkpoint/part-000003-….zst     turn 3
    runs/R/attempts/A/0/checkpoint/000003-….zst          names the three parts
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zstandard

from services.rollout.agent import State
from services.rollout.generation import Generation
from services.rollout.recorder import Entry
from shared.contracts.messages import AttemptKey
from shared.contracts.run import Ref
from shared.sandbox.contract import Decision

FORMAT = 1
MAX_UNPACKED = 1 << 30  # a bomb is refused before it is unpacked


class Damaged(ValueError):
    """The bytes are no checkpoint that this release reads; the text says why."""


class Conversation(msgspec.Struct, frozen=True):
    """What the next worker must know of the attempt's requests to engines. `first`: the oldest version of its first tokens, -1
    before them. `partial`: what is sampled of the next turn already. `requests`: how many were made: seeds differ by it."""

    requests: int
    first: int
    partial: Generation | None


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """`key`: the epoch that wrote it. `number`: of this attempt's checkpoints, over all epochs. `spent_s`: seconds that the agent
    has worked, without those that a dead worker's lease took. `workspace`: what `Workspace.save` returned."""

    format: int = FORMAT
    key: AttemptKey
    number: int
    parts: list[Ref]
    agent: State
    conversation: Conversation
    workspace: bytes
    notes: dict[str, str]
    decisions: list[Decision]
    spent_s: float


def due(now: float, last: float, every_s: float) -> bool:
    """Return whether a turn that ends at `now` is followed by a checkpoint. `last`: when there was one, or the attempt began. Both
    in seconds of one clock. So at most one turn is lost where turns are longer than `every_s`, else at most `every_s`."""
    return now - last >= every_s


def pack(thing: Checkpoint | Sequence[Entry]) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(_ENCODER.encode(thing))


def unpack(data: bytes) -> Checkpoint:
    """Raises Damaged."""
    found: Checkpoint = _read(data, _CHECKPOINT)
    if found.format != FORMAT:
        raise Damaged(f"checkpoint format {found.format}; allowed: {FORMAT}")
    return found


def unpack_part(data: bytes) -> list[Entry]:
    """Raises Damaged."""
    entries: list[Entry] = _read(data, _PART)
    return entries


def _read(data: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    try:
        if zstandard.frame_content_size(data) > MAX_UNPACKED:
            raise Damaged(f"more than {MAX_UNPACKED} bytes unpacked")
        return decoder.decode(zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_UNPACKED))
    except (zstandard.ZstdError, msgspec.MsgspecError, ValueError) as error:
        raise Damaged(f"no rollout checkpoint: {error}") from None


def _encoded(thing: Any) -> Any:
    if isinstance(thing, np.ndarray):
        return thing.dtype.str, thing.shape, np.ascontiguousarray(thing).tobytes()
    raise NotImplementedError(f"no part of a checkpoint: {type(thing).__name__}")


def _decoded(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        if dtype not in ("<f4", "<i4", "|u1", "<u2"):
            raise ValueError(f"found an array of {dtype!r}; allowed: float32, int32, uint8, uint16")
        return np.frombuffer(data, dtype).reshape(shape)
    raise NotImplementedError(f"no part of a checkpoint: {kind}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)
_CHECKPOINT = msgspec.msgpack.Decoder(Checkpoint, dec_hook=_decoded)
_PART = msgspec.msgpack.Decoder(list[Entry], dec_hook=_decoded)
