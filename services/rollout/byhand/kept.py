"""Keeps attempts made by hand: one folder each, below `attempts` in the state directory.

attempts/ID/attempt.json                  the facts (`Record`), written last
attempts/ID/problem.json                  the public part of the problem, as a line
attempts/ID/conversation.json             what was said, as text (`Conversation`)
attempts/ID/trajectory.safetensors.zst    token ids, log-probabilities, versions
attempts/ID/changes.diff                  the work as a unified diff
attempts/formats/DIGEST/                  tokenizer and card of a checkpoint, once for all attempts that used it
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from services.rollout.byhand.builtin import builtin
from services.rollout.byhand.watched import Turn
from shared.contracts.messages import Effort, StopReason, Verdict
from shared.contracts.trajectory import Trajectory, pack, unpack
from shared.problems import Problem
from shared.renderers import Renderer
from shared.renderers.registry import load_renderer
from shared.weights.checkpoint_objects import SMALL, kept_files

FORMATS = "formats"


class UnknownAttempt(ValueError):
    """No attempt of that name is kept; the text names those that are near."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """`messages`: the brief that the agent began with. `tools`: names, descriptions and schemas of the tools offered."""

    messages: list[Said]
    tools: list[dict[str, Any]]
    turns: list[Turn]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """`trainable`: the trajectory holds the ids and log-probabilities that the policy sampled. `versions_known`: True: versions are
    the serials of a run, or 0 for a checkpoint; False: the server did not say, and 0 is a placeholder. `format`: the chat format.
    `digest`: its folder below `formats`; empty: the built-in one. `verdict`: None: the attempt was not graded; `ungraded` says why.
    `error`: the failure, if `stop` is infrastructure; else empty."""

    id: str
    at: str
    problem: str
    kind: str
    source: str
    policy: str
    trainable: bool
    versions_known: bool
    format: str
    digest: str
    temperature: float
    stop: StopReason
    effort: Effort
    seconds: float
    verdict: Verdict | None = None
    ungraded: str = ""
    error: str = ""
    notes: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Kept:
    """An attempt as it lies on the disk."""

    record: Record
    conversation: Conversation
    trajectory: Trajectory
    diff: str
    renderer: Renderer


def new_id() -> str:
    """Return `h-<utc>-<4 hex>`; ids sort by time."""
    return f"h-{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"


def keep_format(attempts: Path, checkpoint: Path | None) -> str:
    """Copy what a renderer reads of a checkpoint; return the digest that names the copy. None: the built-in format, and an
    empty digest."""
    if checkpoint is None:
        return ""
    files = kept_files(checkpoint, SMALL)
    digest = xxhash.xxh3_128()
    for name, path in files.items():
        digest.update(name.encode() + b"\0" + path.read_bytes())
    target = attempts / FORMATS / digest.hexdigest()[:16]
    if not target.exists():
        half = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        half.mkdir(parents=True)
        for name, path in files.items():
            (half / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, half / name)
        try:
            half.rename(target)
        except OSError:  # another attempt was faster
            shutil.rmtree(half)
    return target.name


def keep(
    attempts: Path, record: Record, problem: Problem, conversation: Conversation, trajectory: Trajectory, diff: str
) -> Path:
    """Write the folder of an attempt and return it. Raises OSError."""
    folder = attempts / record.id
    folder.mkdir(parents=True)
    (folder / "problem.json").write_bytes(msgspec.json.encode(problem) + b"\n")
    (folder / "conversation.json").write_bytes(_pretty(conversation))
    (folder / "trajectory.safetensors.zst").write_bytes(pack(trajectory))
    (folder / "changes.diff").write_text(diff, encoding="utf-8", errors="surrogateescape")
    (folder / "attempt.json").write_bytes(_pretty(record))
    return folder


def load(attempts: Path, id: str) -> Kept:
    """Return a kept attempt. Raises UnknownAttempt, ValueError for a damaged one."""
    known = names(attempts)
    matching = [name for name in known if name == id] or [name for name in known if id and name.endswith(id)]
    if len(matching) != 1:
        raise UnknownAttempt(_unknown(attempts, id, known, matching))
    folder = attempts / matching[0]
    try:
        record = msgspec.json.decode((folder / "attempt.json").read_bytes(), type=Record)
        conversation = msgspec.json.decode((folder / "conversation.json").read_bytes(), type=Conversation)
        trajectory = unpack((folder / "trajectory.safetensors.zst").read_bytes())
        diff = (folder / "changes.diff").read_text(encoding="utf-8", errors="replace")
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"{folder}: damaged: {error}") from None
    renderer = load_renderer(attempts / FORMATS / record.digest) if record.digest else builtin()
    return Kept(record, conversation, trajectory, diff, renderer)


def records(attempts: Path) -> list[Record]:
    """Return the facts of all kept attempts, the newest first; damaged ones are passed over."""
    found = []
    for name in reversed(names(attempts)):
        try:
            found.append(msgspec.json.decode((attempts / name / "attempt.json").read_bytes(), type=Record))
        except (OSError, msgspec.MsgspecError):
            continue
    return found


def names(attempts: Path) -> list[str]:
    """Return the ids of all kept attempts, the oldest first."""
    return sorted(path.parent.name for path in attempts.glob("*/attempt.json"))


def _unknown(attempts: Path, id: str, known: Sequence[str], matching: Sequence[str]) -> str:
    if matching:
        return f"{id!r} names {len(matching)} attempts: {', '.join(matching)}"
    if not known:
        return f"{attempts}: no attempt is kept there; `etude rollout run` makes one, and --state says where to look"
    near = get_close_matches(id, known, 3, 0.4) or list(known[-3:])
    offered = f"{', '.join(near)}, or RUN/ATTEMPT for one of a run (`RUN/` names some)"
    return f"found no attempt {id!r:.80} in {attempts}; allowed: {offered}"


def _pretty(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
