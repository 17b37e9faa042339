"""Identifiers. Every one is a short ASCII string that can stand in a file name, a topic key and a metric label."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

import xxhash


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


def policy_prefix(run: str, serial: int) -> str:
    """Object-store prefix of a published policy version."""
    return f"runs/{run}/policies/{serial:08d}"


def checkpoint_prefix(run: str, incarnation: int, step: int) -> str:
    """Object-store prefix of a step checkpoint (weights, optimiser, the group ids it contains)."""
    return f"runs/{run}/checkpoints/{incarnation:04d}-{step:08d}"
