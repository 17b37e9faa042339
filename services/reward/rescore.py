"""Recorded attempts scored again, under another reward configuration. Pure; `records` reads, `cli` prints.

Invariant: nothing recorded is changed. The same records and the same configuration give the same table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.reward.score import missing, score
from shared.contracts.allowed import objections, unfit
from shared.contracts.graded import Graded
from shared.contracts.messages import Effort, Verdict
from shared.contracts.run import RewardConfig, RunConfig

EXAMPLES = 5
SAME = 1e-12  # rewards that differ by less are equal: sums of floats in another order


class BadConfig(ValueError):
    """The configuration cannot be used; the text names field, found and allowed."""


@dataclass(frozen=True, slots=True)
class Record:
    """One scored attempt as the ledger and the object store have it. `graded`: None: its verdict is not stored any more. `version`:
    the newest of its tokens; None: the ledger does not say."""

    attempt: str
    group: str
    problem: str
    epoch: int
    verdict: Verdict
    effort: Effort
    reward: float
    terms: Mapping[str, float]
    reward_config: str
    graded: Graded | None
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """`missing`: terms with a weight that have no answer for this attempt, with the reason; they add nothing."""

    record: Record
    reward: float
    terms: Mapping[str, float]
    missing: Mapping[str, str]

    @property
    def changed(self) -> bool:
        return abs(self.reward - self.record.reward) > SAME


@dataclass(slots=True)
class Summary:
    """`terms`: term -> (attempts where it is not 0 before, after, mean before, after). `reordered`: groups whose attempts are
    ranked in another order. `signal`: groups in which not all rewards are equal, before and after."""

    attempts: int = 0
    changed: int = 0
    mean: tuple[float, float] = (0.0, 0.0)
    terms: dict[str, tuple[int, int, float, float]] = field(default_factory=dict)
    groups: int = 0
    reordered: int = 0
    signal: tuple[int, int] = (0, 0)
    missing: dict[str, tuple[int, str]] = field(default_factory=dict)  # term -> (attempts, one of the reasons)
    examples: list[Change] = field(default_factory=list)  # those that changed most


def merged(old: RewardConfig, wanted: Mapping[str, Any]) -> RewardConfig:
    """Return a reward configuration with changes, as a run's are written: `{"reward": {…}}`, or its inside alone. Raises
    BadConfig."""
    changes = wanted.get("reward", wanted) if isinstance(wanted.get("reward", {}), dict) else wanted
    if wrong := list(unfit({"reward": dict(changes)}, RunConfig, "")):
        raise BadConfig("\n".join(wrong))
    config = msgspec.convert(_overlaid(msgspec.to_builtins(old), changes), RewardConfig)
    if wrong := list(objections(config, "reward.")):
        raise BadConfig("\n".join(wrong))
    return config


def _overlaid(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(old)
    for name, value in new.items():
        both = isinstance(old.get(name), dict) and isinstance(value, dict)
        result[name] = _overlaid(old[name], value) if both else value
    return result


def rescored(records: Iterable[Record], config: RewardConfig) -> list[Change]:
    return [_one(record, config) for record in records]


def _one(record: Record, config: RewardConfig) -> Change:
    graded = record.graded
    if graded is None:
        weighted = [name for name, weight in config.behaviour.items() if weight]
        without = dict.fromkeys(weighted, "the verdict is not stored any more")
        graded = Graded(verdict=record.verdict)
    else:
        without = missing(config, graded)
    reward, terms = score(config, record.verdict, record.effort, graded.findings, without)
    return Change(record, reward, terms, without)


def summary(changes: Sequence[Change]) -> Summary:
    found = Summary(attempts=len(changes), changed=sum(change.changed for change in changes))
    if not changes:
        return found
    count = len(changes)
    found.mean = (sum(c.record.reward for c in changes) / count, sum(c.reward for c in changes) / count)
    for name in sorted({name for c in changes for name in (*c.record.terms, *c.terms)}):
        before = [c.record.terms.get(name, 0.0) for c in changes]
        after = [c.terms.get(name, 0.0) for c in changes]
        hits = (sum(value != 0 for value in before), sum(value != 0 for value in after))
        found.terms[name] = (*hits, sum(before) / count, sum(after) / count)
    groups: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        groups[change.record.group].append(change)
        for name, reason in change.missing.items():
            found.missing[name] = (found.missing.get(name, (0, ""))[0] + 1, reason)
    found.groups = len(groups)
    found.reordered = sum(
        _order([c.record.reward for c in g]) != _order([c.reward for c in g]) for g in groups.values()
    )
    found.signal = (
        sum(_spread([c.record.reward for c in g]) for g in groups.values()),
        sum(_spread([c.reward for c in g]) for g in groups.values()),
    )
    most = sorted(changes, key=lambda c: (-abs(c.reward - c.record.reward), c.record.attempt))
    found.examples = [change for change in most[:EXAMPLES] if change.changed]
    return found


def _order(rewards: Sequence[float]) -> list[int]:
    """Return the rank of each; equal rewards share one."""
    values = sorted({round(reward, 9) for reward in rewards})
    return [values.index(round(reward, 9)) for reward in rewards]


def _spread(rewards: Sequence[float]) -> bool:
    return max(rewards) - min(rewards) > SAME
