"""Outcomes folded into digests, and counted: what happened in them, so that the digest is known to cover it.

`portable` is the same on every machine: it reads objects uncompressed and rounds rewards, for another release of zstd or of
the C library may differ in the last byte. `exact` takes the stored bytes and every digit: compare it on one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash
import zstandard

from shared.contracts.messages import StopReason
from shared.contracts.run import Purpose
from shared.contracts.trajectory import pack
from tests.guard.world import Outcome

# Of RolloutFinished: not `seconds` and `worker`, and not the references, which name compressed bytes.
MESSAGE = ("run", "key", "stop", "reward_config", "effort", "oldest_version", "oldest_kv_version", "newest_version")
PARTS = ("trajectory", "message", "verdict", "rewards")

# Of a verdict: not `failed` and `notes`, words for people, which came later.
VERDICT = ("error", "first_edit_solved", "passed", "solved", "total")


def portable(outcome: Outcome) -> dict[str, str]:
    """A digest of each of PARTS."""
    trajectory = outcome.trajectory
    trajectory.routing = None  # its reference holds a checksum of compressed bytes
    return _hashed(
        outcome,
        _plain(pack(trajectory)) + (b"" if outcome.routing is None else _plain(outcome.routing)),
        {name: getattr(outcome.finished, name) for name in MESSAGE},
        [(f"{reward:.9f}", {name: f"{term:.9f}" for name, term in terms.items()}) for reward, terms in outcome.rewards],
    )


def exact(outcome: Outcome) -> dict[str, str]:
    """The same, of the bytes as they are stored."""
    message = {name: getattr(outcome.finished, name) for name in (*MESSAGE, "trajectory", "pack", "pack_hidden")}
    return _hashed(outcome, outcome.stored + (outcome.routing or b""), message, outcome.rewards)


def _hashed(outcome: Outcome, trajectory: bytes, message: Any, rewards: Any) -> dict[str, str]:
    judged = {name: getattr(outcome.graded.verdict, name) for name in VERDICT}
    verdict = [judged, outcome.graded.findings, outcome.graded.grader]
    parts = (trajectory, *(msgspec.json.encode(part, order="sorted") for part in (message, verdict, rewards)))
    return {name: xxhash.xxh3_128_hexdigest(part) for name, part in zip(PARTS, parts, strict=True)}


def fold(attempts: dict[str, dict[str, str]]) -> str:
    """One digest of all, in the order of attempts."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(attempts, order="sorted"))


def _plain(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=1 << 30)


def count(outcomes: Sequence[Outcome], context: int) -> Counter[str]:
    """Count what happened, above all what EXPECTED names. `context`: tokens that a segment may hold."""
    seen: Counter[str] = Counter()
    for outcome in outcomes:
        seen["attempts"] += 1
        seen[f"stop: {outcome.finished.stop.value}"] += 1
        seen[f"run: {outcome.request.run}"] += 1
        seen[f"purpose: {outcome.request.key.purpose.value}"] += 1
        seen[f"retry: {outcome.request.sampling.retry}"] += 1
        _count_effort(outcome, seen)
        _count_spans(outcome, seen, context)
        _count_verdict(outcome, seen)
    return seen


def _count_effort(outcome: Outcome, seen: Counter[str]) -> None:
    effort, sampling = outcome.finished.effort, outcome.request.sampling
    for name in ("broken_tool_calls", "summaries", "turns", "edits", "tests", "thinking_tokens"):
        seen[name] += getattr(effort, name)
    stopped = outcome.finished.stop is StopReason.turn_limit
    seen["edit limit"] += stopped and effort.turns < sampling.max_turns
    seen["forgiven turns"] += max(0, effort.turns - sampling.max_turns)
    seen["forgiven edits"] += max(0, effort.edits - sampling.max_edits)
    seen["versions mixed"] += outcome.finished.oldest_version != outcome.finished.newest_version


def _count_spans(outcome: Outcome, seen: Counter[str], context: int) -> None:
    segments = outcome.trajectory.segments
    summarised = sum(bool(one.spans) and one.spans[-1].role == "summary" for one in segments[:-1])
    seen["restarts"] += max(0, len(segments) - 1 - summarised)
    last = segments[-1].spans[-1]
    if last.role == "summary":  # the attempt ended with it
        seen["summaries cut" if last.fault == "endless" else "summaries too long"] += 1
    seen["context filled"] += any(len(one.tokens) == context for one in segments)
    faults: set[tuple[int, int, str]] = set()
    calls: Counter[tuple[int, int]] = Counter()
    for i, segment in enumerate(segments):
        for span in segment.spans:
            if span.fault:
                faults.add((i, span.turn, span.fault))
            if span.role == "tool_call":
                calls[i, span.turn] += 1
                seen[f"calls: {span.tool}"] += 1
            if span.role == "tool_output" and span.tool == "test":
                seen["tests passed" if span.passed else "tests failed"] += 1
    for _, _, fault in faults:
        seen[f"fault: {fault}"] += 1
    seen["several calls in a turn"] += sum(number > 1 for number in calls.values())


def _count_verdict(outcome: Outcome, seen: Counter[str]) -> None:
    verdict = outcome.graded.verdict
    seen["solved" if verdict.solved else "not solved"] += 1
    seen["partly passed"] += 0 < verdict.passed < verdict.total
    if verdict.error:
        seen[f"error: {verdict.error}"] += 1
    if outcome.request.key.purpose is Purpose.evaluate:
        seen["first edits"] += outcome.trajectory.first_edit_files is not None
        if verdict.first_edit_solved is not None:
            seen["first edit solved" if verdict.first_edit_solved else "first edit failed"] += 1
    for name in outcome.graded.findings:
        seen[f"finding: {name}"] += 1


EXPECTED = (
    "stop: submitted", "stop: turn_limit", "stop: context_full", "stop: format_errors",
    "purpose: train", "purpose: evaluate", "retry: fresh", "retry: append",
    "broken_tool_calls", "summaries", "summaries cut", "restarts", "thinking_tokens", "versions mixed",
    "edit limit", "forgiven turns", "forgiven edits", "fault: repeated", "fault: gave_up", "fault: endless",
    "calls: edit", "calls: undo", "calls: test", "several calls in a turn", "tests passed", "tests failed",
    "solved", "not solved", "partly passed", "error: SyntaxError", "error: Timeout", "error: ModuleNotFoundError",
    "context filled", "summaries too long",
    "first edits", "first edit solved", "first edit failed",
    "finding: broken_tool_call", "finding: no_submit", "finding: untested_submit", "finding: thoughts_in_comments",
)  # fmt: skip


def missing(seen: Counter[str]) -> list[str]:
    """What the attempts do not cover."""
    return [name for name in EXPECTED if not seen[name]]
