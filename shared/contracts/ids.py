"""Identifiers. Every one is a short ASCII string that can stand in a file name, a topic key and a metric label."""

from __future__ import annotations

import re
import secrets
from datetime import UTC, datetime
from typing import NamedTuple

import xxhash

_ATTEMPT = re.compile(r"runs/([^/]+)/attempts/([^/]+)/(\d+)/(.+)")
_POLICY = re.compile(r"runs/([^/]+)/policies/(\d+)/(.+)")
_CHECKPOINT = re.compile(r"runs/([^/]+)/checkpoints/(\d+)-(\d+)/(.+)")


def new_run_id(now: datetime | None = None) -> str:
    """`r-<utc>-<4 hex>`, sortable by start."""
    now = now or datetime.now(UTC)
    return f"r-{now:%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"


def group_id(run: str, problem: str, sequence: int) -> str:
    """The group that practises `problem`, the `sequence`-th that the run asks for. Deterministic: asking again names it again."""
    return "g-" + xxhash.xxh3_128_hexdigest(f"{run}|{problem}|{sequence}".encode())[:16]


def attempt_id(run: str, group: str, index: int) -> str:
    """Attempt `index` of a group. Deterministic, so that a redelivered request names the same attempt."""
    return "a-" + xxhash.xxh3_128_hexdigest(f"{run}|{group}|{index}".encode())[:20]


def attempt_prefix(run: str, attempt: str, epoch: int) -> str:
    """Object-store prefix of one epoch of an attempt. A zombie of an older epoch writes elsewhere (fencing)."""
    return f"runs/{run}/attempts/{attempt}/{epoch}"


CHECKPOINT = "checkpoint/"  # below an `attempt_prefix`: rollout checkpoints, which go when the attempt is over


def attempts_prefix(run: str, attempt: str) -> str:
    """Object-store prefix of all epochs of an attempt."""
    return f"runs/{run}/attempts/{attempt}/"


class AttemptKey(NamedTuple):
    run: str
    attempt: str
    epoch: int
    name: str


def parse_attempt(key: str) -> AttemptKey | None:
    """What a key below an `attempt_prefix` says; None: it lies elsewhere."""
    match = _ATTEMPT.fullmatch(key)
    return AttemptKey(match[1], match[2], int(match[3]), match[4]) if match else None


def policy_prefix(run: str, serial: int) -> str:
    """Object-store prefix of a published policy version."""
    return f"runs/{run}/policies/{serial:08d}"


class PolicyKey(NamedTuple):
    run: str
    serial: int
    name: str


def parse_policy(key: str) -> PolicyKey | None:
    """What a key below a `policy_prefix` says; None: it lies elsewhere."""
    match = _POLICY.fullmatch(key)
    return PolicyKey(match[1], int(match[2]), match[3]) if match else None


def checkpoint_prefix(run: str, incarnation: int, step: int) -> str:
    """Object-store prefix of a step checkpoint (weights, optimiser, the group ids it contains)."""
    return f"runs/{run}/checkpoints/{incarnation:04d}-{step:08d}"


class CheckpointKey(NamedTuple):
    run: str
    incarnation: int
    step: int
    name: str


def parse_checkpoint(key: str) -> CheckpointKey | None:
    """What a key below a `checkpoint_prefix` says; None: it lies elsewhere."""
    match = _CHECKPOINT.fullmatch(key)
    return CheckpointKey(match[1], int(match[2]), int(match[3]), match[4]) if match else None


OPEN_EVALUATIONS = "evals/open/"  # below it `<run>/<eval>.json`: requests whose report is still to come


def open_evaluation(run: str, evaluation: str) -> str:
    """Object-store key of an evaluation's request, there from its acceptance until its report is announced."""
    return f"{OPEN_EVALUATIONS}{run}/{evaluation}.json"


REPORT = "report.json"  # below an `evaluation_prefix`, once it has ended


def evaluations(run: str) -> str:
    """Object-store prefix of all evaluations of a run."""
    return f"runs/{run}/evals/"


def evaluation_prefix(run: str, evaluation: str) -> str:
    """Object-store prefix of what came of one."""
    return f"{evaluations(run)}{evaluation}"
