"""The trajectory: what one attempt's policy really saw and sampled, token by token, and its codec.

Invariants:
- Token ids are exactly those the engine saw and produced. No text is ever tokenised again for training.
- `loss_mask` is 1 exactly on sampled tokens; only those have a log-probability, a version and count in the loss.
- A self-summary starts a new segment; the summary is trained once, in the segment that sampled it, and stands in the
  next with mask 0.
- Routed experts are an object of their own (`routing` in the header): they are large and expendable after training.

Format: zstd(safetensors). One tensor set per segment, `<i>.<name>`; the header (JSON in the safetensors metadata) has
everything that is not an array. No pickle.
"""

from __future__ import annotations

from typing import IO, Any

import msgspec
import numpy as np
import zstandard
from safetensors.numpy import load, save

from shared.contracts.messages import AttemptKey, Effort, StopReason
from shared.contracts.run import Ref
from shared.sandbox.contract import Decision

FORMAT = 1
MAX_UNPACKED = 1 << 30  # a bomb is refused before it is unpacked
MAX_HEADER = 1 << 20  # bytes of safetensors' own header: a hundred or so for each segment


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of a segment, what they are and which turn they belong to."""

    start: int
    end: int
    role: str  # prompt | thinking | tool_call | tool_output | final | summary
    turn: int = 0
    tool: str = ""  # edit, test, submit, …
    ok: bool = True  # False: the call was broken
    passed: bool = False  # output of a test: nothing failed
    # Of a sampled turn. repeated: it tested files that had failed; gave_up: it submitted files that had;
    # endless: the budget ended it; cut: a deadline ended it while it was sampled.
    fault: str = ""


class Segment(msgspec.Struct, kw_only=True):
    """One context of the model. Arrays are aligned with `tokens` (shape [T]).

    tokens int32; loss_mask bool; logprobs float32 under the sampling temperature (0 where mask is 0); versions int32,
    the serial that sampled the token (-1 where mask is 0).
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    oldest_kv_version: int
    spans: list[Span] = []
    teacher_logprobs: np.ndarray | None = None  # float32 [T], a place for distillation

    def check(self) -> None:
        """Raises ValueError where the arrays contradict the invariants."""
        T = len(self.tokens)
        for name in ("loss_mask", "logprobs", "versions"):
            if getattr(self, name).shape != (T,):
                raise ValueError(f"segment.{name}: shape {getattr(self, name).shape}, expected ({T},)")
        if not np.isfinite(self.logprobs).all() or (self.logprobs > 1e-4).any():
            raise ValueError("segment.logprobs: expected finite values of at most 0")
        if (self.versions[self.loss_mask] < 0).any():
            raise ValueError("segment.versions: a sampled token without a policy version")


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file of a tree as the attempt left it. `text`, or `data` where it is no UTF-8; neither: the file was deleted."""

    text: str | None = None
    data: bytes | None = None
    executable: bool = False

    @property
    def deleted(self) -> bool:
        return self.text is None and self.data is None


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """The work of an attempt, as data. `files`: the submitted state of a problem whose files are few, path -> text.
    `first_edit_files`: the same after the first edit alone; None: there was no edit. `changes`: of a problem that is a tree,
    the paths that differ from it. `steps`: of a problem of several steps, the changes when each step was submitted, the last
    one reached included; each holds those of the steps before."""

    files: dict[str, str] = {}
    first_edit_files: dict[str, str] | None = None
    changes: dict[str, Change] = {}
    steps: list[dict[str, Change]] = []


class TrajectoryHeader(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    key: AttemptKey
    stop: StopReason
    temperature: float
    effort: Effort
    segments: list[dict[str, Any]]  # spans and oldest_kv_version per segment
    files: dict[str, str] = {}  # submitted state of the problem's files
    first_edit_files: dict[str, str] | None = None
    notes: dict[str, str] = {}
    routing: Ref | None = None
    # Changes of a tree; left out where there are none, so that other trajectories have the bytes that they had before.
    changes: dict[str, Change] | msgspec.UnsetType = msgspec.UNSET
    # Requests to the egress proxy; left out where there are none, for the same reason.
    decisions: list[Decision] | msgspec.UnsetType = msgspec.UNSET
    # As in Submission; left out where there are none, for the same reason.
    steps: list[dict[str, Change]] | msgspec.UnsetType = msgspec.UNSET


class Trajectory(msgspec.Struct, kw_only=True):
    key: AttemptKey
    stop: StopReason
    temperature: float
    effort: Effort
    segments: list[Segment]
    files: dict[str, str] = {}
    first_edit_files: dict[str, str] | None = None
    notes: dict[str, str] = {}
    routing: Ref | None = None
    changes: dict[str, Change] = {}
    decisions: list[Decision] = []  # of the sandbox's egress proxy, oldest first
    steps: list[dict[str, Change]] = []  # as in Submission

    @property
    def submission(self) -> Submission:
        return Submission(
            files=self.files, first_edit_files=self.first_edit_files, changes=self.changes, steps=self.steps
        )


_ARRAYS = ("tokens", "loss_mask", "logprobs", "versions", "teacher_logprobs")


def pack(trajectory: Trajectory) -> bytes:
    """zstd-compressed safetensors. Raises ValueError where a segment breaks an invariant."""
    tensors: dict[str, np.ndarray] = {}
    for i, segment in enumerate(trajectory.segments):
        segment.check()
        for name in _ARRAYS:
            array = getattr(segment, name)
            if array is not None:
                tensors[f"{i}.{name}"] = np.ascontiguousarray(array)
    header = TrajectoryHeader(
        format=FORMAT,
        key=trajectory.key,
        stop=trajectory.stop,
        temperature=trajectory.temperature,
        effort=trajectory.effort,
        segments=[{"spans": s.spans, "oldest_kv_version": s.oldest_kv_version} for s in trajectory.segments],
        files=trajectory.files,
        first_edit_files=trajectory.first_edit_files,
        notes=trajectory.notes,
        routing=trajectory.routing,
        changes=trajectory.changes or msgspec.UNSET,
        decisions=trajectory.decisions or msgspec.UNSET,
        steps=trajectory.steps or msgspec.UNSET,
    )
    data = save(tensors, metadata={"trajectory": msgspec.json.encode(header).decode()})
    return zstandard.ZstdCompressor(level=1).compress(data)


def unpack(data: bytes) -> Trajectory:
    """Inverse of `pack`. Raises ValueError on damage or a foreign format."""
    try:
        raw = _decompress(data)
        length = int.from_bytes(raw[:8], "little")
        meta = msgspec.json.decode(raw[8 : 8 + length])["__metadata__"]["trajectory"]
        header = msgspec.json.decode(meta, type=TrajectoryHeader)
        tensors = load(raw)
    except Exception as error:
        raise ValueError(f"not a trajectory: {error}") from None
    if header.format != FORMAT:
        raise ValueError(f"trajectory format {header.format}: this reader knows {FORMAT}")
    segments = []
    for i, extra in enumerate(header.segments):
        arrays = {name: tensors.get(f"{i}.{name}") for name in _ARRAYS}
        segment = Segment(
            **arrays,  # type: ignore[arg-type]
            oldest_kv_version=extra["oldest_kv_version"],
            spans=msgspec.convert(extra["spans"], list[Span]),
        )
        segment.check()
        segments.append(segment)
    return Trajectory(
        key=header.key,
        stop=header.stop,
        temperature=header.temperature,
        effort=header.effort,
        segments=segments,
        files=header.files,
        first_edit_files=header.first_edit_files,
        notes=header.notes,
        routing=header.routing,
        changes=header.changes or {},
        decisions=header.decisions or [],
        steps=header.steps or [],
    )


def _decompress(data: bytes) -> bytes:
    announced = zstandard.frame_content_size(data)  # -1: not said; zstandard itself keeps no limit where it is
    if announced > MAX_UNPACKED:
        raise ValueError(f"{announced} bytes unpacked; allowed: {MAX_UNPACKED}")
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_UNPACKED)


def pack_routing(rows: list[np.ndarray]) -> bytes:
    """Routed experts of every segment: rows[i] uint8|uint16 [tokens - 1, moe_layers, top_k] (the last token has no row)."""
    return zstandard.ZstdCompressor(level=1).compress(
        save({str(i): np.ascontiguousarray(r) for i, r in enumerate(rows)})
    )


def unpack_routing(data: bytes) -> list[np.ndarray]:
    tensors = load(_decompress(data))
    return [tensors[str(i)] for i in range(len(tensors))]


def routing_rows(file: IO[bytes], segment: int, first: int, count: int) -> np.ndarray:
    """Rows [first, first + count) of one segment, as far as there are so many. What lies before them is unpacked and passed over,
    what follows is not looked at: a long attempt's routing never lies in memory as a whole. Raises ValueError on damage."""
    try:
        with zstandard.ZstdDecompressor().stream_reader(file) as source:
            length = int.from_bytes(_exactly(source, 8), "little")
            if length > MAX_HEADER:
                raise ValueError(f"a header of {length} bytes; allowed: {MAX_HEADER}")
            tensor = msgspec.json.decode(_exactly(source, length))[str(segment)]
            dtype, (rows, layers, top_k) = _ROUTING[tensor["dtype"]], tensor["shape"]
            size, first = layers * top_k * dtype.itemsize, min(first, rows)
            count = min(count, rows - first)
            skip = tensor["data_offsets"][0] + first * size
            if skip + count * size > MAX_UNPACKED:
                raise ValueError(f"{skip + count * size} bytes unpacked; allowed: {MAX_UNPACKED}")
            while skip:
                skip -= len(_exactly(source, min(skip, 1 << 20)))
            return np.frombuffer(_exactly(source, count * size), dtype).reshape(count, layers, top_k)
    except Exception as error:
        raise ValueError(f"no routing of segment {segment}: {type(error).__name__}: {error}") from None


_ROUTING: dict[str, np.dtype[Any]] = {"U8": np.dtype("<u1"), "U16": np.dtype("<u2")}


def _exactly(source: zstandard.ZstdDecompressionReader, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        if not (part := source.read(count - len(parts))):
            raise ValueError("it ends early")
        parts += part
    return bytes(parts)
