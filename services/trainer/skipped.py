"""Steps that were skipped: their gradient was not finite, or a spike. After MOST in a row the run pauses, with the batch kept.

One skipped step costs its groups. Several in a row mean that the policy itself, the data or the device is broken, and every
further step would throw good groups away. The batch of the last one is put into the object store, whole: a person can look at
it, and train the same step again.

Format of a batch: zstd(safetensors). Tensors `<i>.<name>` are the arrays of sequence i; the header is JSON in the metadata.
No pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import zstandard
from safetensors.numpy import load, save

from services.trainer.packing import TrainSequence
from shared.contracts.messages import Alert
from shared.contracts.run import TrainConfig
from shared.objects import Objects

FORMAT = "etude-batch-1"
MOST = 3  # skipped steps in a row
_ARRAYS = ("tokens_T", "sampled_T", "logprobs_T", "versions_T", "advantages_T")


class BadBatch(ValueError):
    """A file that holds no batch; the text says why."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the step was called with. `serial`: the published version whose weights it began from. A sequence's group is an index
    of `groups`."""

    run: str
    incarnation: int
    step: int
    serial: int
    attempts: int
    progress: float
    train: TrainConfig
    groups: list[str]
    grad_norm: float | None = None  # that the step found; None: it was not finite, or an older trainer wrote the batch
    limit: float = 0.0  # the norm above which a gradient was a spike; 0: the gradient was not finite
    mtp_stride: int = 1  # the speculation head learns from one unit in so many
    format: str = FORMAT


@dataclass(frozen=True, slots=True)
class Batch:
    header: Header
    sequences: Sequence[TrainSequence]


def say(header: Header, norm: float, limit: float) -> tuple[str, str, Alert]:
    """Return why a step was skipped: as a label, as each group's reason, as an alert. `limit`: the norm above which its gradient
    was a spike; 0: it was not finite."""
    about = f"step {header.step}: the gradient"
    spike = f"was a spike: found a norm of {norm:.4g}, allowed: {limit:.4g} (train.spike)"
    reason = f"{about} {spike if limit else 'was not finite'}"
    what = f"{reason}; {len(header.groups)} groups are quarantined"
    if limit:
        alert = Alert(run=header.run, name="gradient_spike", severity="warning", what=what, examples=header.groups[:5])
        return "spike", reason, alert
    alert = Alert(
        run=header.run, name="gradient_not_finite", severity="critical", what=what, examples=header.groups[:5]
    )
    return "not_finite", reason, alert


def stop(header: Header, key: str) -> Alert:
    """Return the alert at which every run pauses (shared.contracts.run.ALWAYS_PAUSE)."""
    what = f"{MOST} steps in a row were skipped; the run pauses. The batch of the last one, step {header.step}, is kept: {key}"
    return Alert(run=header.run, name="steps_skipped", severity="critical", what=what, examples=header.groups[:5])


def keep(objects: Objects, batch: Batch) -> str:
    """Put the batch into the object store. Durable when it returns. Returns its key."""
    header = batch.header
    key = f"runs/{header.run}/checkpoints/skipped/{header.incarnation:04d}-{header.step:08d}"
    return objects.put(key, pack(batch)).key


def pack(batch: Batch) -> bytes:
    tensors: dict[str, np.ndarray] = {}
    for i, s in enumerate(batch.sequences):
        arrays = {name: getattr(s, name) for name in _ARRAYS}
        arrays["group"], arrays["temperature"] = np.int64(s.group), np.float64(s.temperature)
        if s.experts_TLK is not None:
            arrays["experts_TLK"] = s.experts_TLK
        tensors |= {f"{i}.{name}": np.ascontiguousarray(array) for name, array in arrays.items()}
    data = save(tensors, metadata={"batch": msgspec.json.encode(batch.header).decode()})
    return zstandard.ZstdCompressor(level=1).compress(data)


def unpack(data: bytes) -> Batch:
    """Inverse of `pack`. Raises BadBatch."""
    try:
        raw = zstandard.ZstdDecompressor().decompress(data)
        length = int.from_bytes(raw[:8], "little")
        metadata = msgspec.json.decode(raw[8 : 8 + length])["__metadata__"]
        header = msgspec.json.decode(metadata["batch"], type=Header)
        tensors = load(raw)
        count = sum(name.endswith(".tokens_T") for name in tensors)
        sequences = [_sequence(tensors, i) for i in range(count)]
    except Exception as error:  # zstd, safetensors, msgspec and numpy each have their own
        raise BadBatch(f"no batch of a skipped step: {error}") from None
    if header.format != FORMAT:
        raise BadBatch(f"batch format {header.format!r}; allowed: {FORMAT!r}")
    return Batch(header, sequences)


def _sequence(tensors: Mapping[str, np.ndarray], i: int) -> TrainSequence:
    return TrainSequence(
        group=int(tensors[f"{i}.group"].item()),
        temperature=float(tensors[f"{i}.temperature"].item()),
        experts_TLK=tensors.get(f"{i}.experts_TLK"),
        **{name: tensors[f"{i}.{name}"] for name in _ARRAYS},
    )
