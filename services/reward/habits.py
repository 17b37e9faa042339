"""What a policy takes to, by version and reward configuration, from recorded attempts. Pure; `records` reads, `cli` prints.

Invariant: the figures depend on the ledger and the object store alone, so a restart of any service changes nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from services.reward.rescore import Record
from services.reward.terms.thoughts_in_comments import comments
from shared.contracts.trajectory import Trajectory

EXAMPLES = 3
# Behaviour terms that show an attempt at the reward instead of the task.
HACK_SIGNATURES = ("untruthful_final", "out_of_scope", "untested_submit", "terminal_only", "thoughts_in_comments")


@dataclass(frozen=True, slots=True)
class Done:
    """What one trajectory holds beyond its record. `tools`: calls by tool. `comments`: characters of comments in the Python files
    that were changed. `submission`: a checksum of what was submitted."""

    tools: Mapping[str, int]
    comments: int
    submission: str


@dataclass(slots=True)
class Habits:
    """Figures of the attempts of some versions under one reward configuration. Shares are of attempts, lengths are means.

    `best_of`: share of groups with a solved attempt; `pass_at_1`: share of attempts; `k`: mean attempts per group. `tools`: share
    of calls. `distinct`: mean share of different submissions among those of a group with two or more; None: there is no such
    group. `read`: attempts whose trajectories were read, for tools, comments and `distinct`. `examples`: of each hack signature,
    the attempts where it shows most.
    """

    config: str
    versions: tuple[int, int]
    attempts: int = 0
    groups: int = 0
    k: float = 0.0
    pass_at_1: float = 0.0
    best_of: float = 0.0
    reward: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)
    broken_calls: float = 0.0
    reply_tokens: float = 0.0
    sampled_tokens: float = 0.0
    signatures: dict[str, float] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    read: int = 0
    tools: dict[str, float] = field(default_factory=dict)
    comment_characters: float = 0.0
    distinct: float | None = None


def done(trajectory: Trajectory) -> Done:
    """Return what a trajectory holds for the figures."""
    tools = Counter(
        span.tool
        for segment in trajectory.segments
        for span in segment.spans
        if span.tool and span.role in ("tool_call", "final")
    )
    changed = {path: change.text for path, change in trajectory.changes.items()}
    files = {**trajectory.files, **changed}
    said = sum(len(c) for p, t in files.items() if t and p.endswith(".py") for _, c in comments(t, t.count("\n") + 1))
    content = "\0".join(f"{path}\0{text}" for path, text in sorted(files.items(), key=lambda item: item[0]))
    return Done(dict(tools), said, xxhash.xxh3_128_hexdigest(content.encode("utf-8", "replace")))


def buckets(records: Iterable[Record], every: int) -> dict[tuple[str, int], list[Record]]:
    """Return the records by reward configuration and by first version of `every`; a record without a version counts as 0."""
    found: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in records:
        found[record.reward_config, (record.version or 0) // every * every].append(record)
    return dict(sorted(found.items()))


def habits(config: str, first: int, every: int, records: Sequence[Record], known: Mapping[str, Done]) -> Habits:
    """Return the figures of one bucket. `known`: by attempt, of those whose trajectories were read."""
    found = Habits(config, (first, first + every - 1), attempts=len(records))
    if not records:
        return found
    count = len(records)
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.group].append(record)
    found.groups, found.k = len(groups), count / len(groups)
    found.pass_at_1 = sum(record.verdict.solved for record in records) / count
    found.best_of = sum(any(record.verdict.solved for record in group) for group in groups.values()) / len(groups)
    found.reward = sum(record.reward for record in records) / count
    names = sorted({name for record in records for name in record.terms})
    found.terms = {name: sum(record.terms.get(name, 0.0) for record in records) / count for name in names}
    calls = sum(record.effort.tool_calls for record in records)
    found.broken_calls = sum(record.effort.broken_tool_calls for record in records) / max(1, calls)
    found.reply_tokens = sum(record.effort.final_tokens for record in records) / count
    found.sampled_tokens = sum(record.effort.sampled_tokens for record in records) / count
    for name in HACK_SIGNATURES:
        showing = sorted((record for record in records if _amount(record, name)), key=lambda one: -_amount(one, name))
        found.signatures[name] = len(showing) / count
        if showing:
            found.examples[name] = [record.attempt for record in showing[:EXAMPLES]]
    _of_trajectories(found, groups, known)
    return found


def _of_trajectories(found: Habits, groups: Mapping[str, Sequence[Record]], known: Mapping[str, Done]) -> None:
    read = [known[one.attempt] for group in groups.values() for one in group if one.attempt in known]
    found.read = len(read)
    tools: Counter[str] = Counter()
    for each in read:
        tools.update(each.tools)
    total = sum(tools.values())
    found.tools = {tool: number / total for tool, number in tools.most_common()}
    found.comment_characters = sum(each.comments for each in read) / max(1, len(read))
    shares = []
    for group in groups.values():
        submissions = [known[one.attempt].submission for one in group if one.attempt in known]
        if len(submissions) > 1:
            shares.append(len(set(submissions)) / len(submissions))
    found.distinct = sum(shares) / len(shares) if shares else None


def _amount(record: Record, name: str) -> float:
    finding = record.graded.findings.get(name) if record.graded is not None else None
    return abs(finding.amount) if finding is not None else 0.0
